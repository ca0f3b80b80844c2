"""`convert`: plan shards, have workers write them, index what they wrote.

The plan comes first, and decides everything: a worker is given a number. Receipts of finished shards are
believed, so a restart goes on where the last one was stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow.conversion.dispatch import ShownShards, warm_up, write_all, write_iterable
from dataflow.conversion.folder import CATALOG_NAME, LISTING_NAME, PLAN, ConversionError, OutputFolder
from dataflow.conversion.plan import Plan
from dataflow.conversion.source import ConvertSource, opened_source, tokenizing
from dataflow.conversion.target import SUFFIXES, TOKENS
from dataflow.conversion.verify import Asked, verify_shards
from dataflow.conversion.work import TaskSpec, codec_of, finished_shards
from dataflow.executors import run_all
from dataflow.sources.indexing import index
from dataflow.sources.opening import save_catalog
from prefetch.store.retrier import Retrier
from sharding.redaction import identity_of
from sharding.urls import is_local, local_path
from sharding.write.mds import index_entry, index_json

_BATCH_SIZE = 1000


@dataclass(frozen=True, kw_only=True)
class Converted:
    """The result of a conversion. Of all shards, those of earlier runs included, but for `seconds`.

    Examples:
        >>> from dataflow import convert
        >>> made = convert("images/*.tar", "images-parquet", to="parquet", workers=1)
        >>> made.shards, made.samples, made.skipped
        (1, 8, 0)
    """

    catalog: str
    """URL of the catalog, which `ShardedDataset` opens."""
    shards: int
    """The number of shards that have samples."""
    samples: int
    """The number of samples in them."""
    bytes: int
    """The bytes of the shards, without what lies beside them."""
    skipped: int
    """Shards that an earlier run had finished."""
    verified: int
    """Samples that were compared with the source."""
    seconds: float
    """The time that this run took."""
    files: Sequence[str] = field(repr=False, default=())
    """URLs of the shards."""


def convert(
    source: Any,
    dest: str | os.PathLike[str],
    *,
    to: str,
    map: Callable[..., Any] | None = None,  # noqa: A002
    batched: bool | int = False,
    filter: Any = None,  # noqa: A002
    shard_size: int | str | None = None,
    shard_samples: int | None = None,
    shuffle: int | None = None,
    columns: Sequence[str] | Mapping[str, str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    text_column: str = "text",
    dtype: str | None = None,
    length: int | None = None,
    end_token: int | str | None = None,
    schema: pa.Schema | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    verify: bool | int = False,
    overwrite: bool = False,
    identity: str | None = None,
    checksum: bool = True,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Converted:
    """Write a dataset as shards, with their catalog, the same bytes however many workers write them.

    Shard k is a fixed range of the source. So a conversion that was stopped goes on when it is started
    again, and finished shards stay as they are. Values keep their types: images stay the bytes they are.

    Args:
        source: what `ShardedDataset` opens, such a dataset, a map-style dataset, or an iterable. Of shards,
            the stored values of the columns are taken; of a dataset with a transform, a join or `decode=`
            of your own, what it delivers.
        dest: path or fsspec URL of a folder for this conversion alone.
        to: "tar", "parquet", "mds", "tokens" or "megatron".
        map: called with each sample, a dict; returns the dict to be written, with the same columns each
            time, or None to leave the sample out.
        batched: call `map` with columns of 1,000 samples of a shard, or of so many, as `datasets.map` does: a
            dict of lists. It returns such a dict of all that is written, of as many samples as it likes.
        filter: called with each sample, before `map`: whether to keep it. Shards get smaller by it. Or, of
            shards, a pyarrow expression, as `ShardedDataset.filter` takes it.
        shard_size: bytes of the source in a shard, such as "64MiB"; None: 128 MiB. For shards only.
        shard_samples: samples of the source in a shard, in place of `shard_size`. None: 10,000 of datasets
            that are no shards.
        shuffle: seed of an order. Of shards, blocks come in a permutation, and samples mix among 512 of them;
            of datasets, any sample comes anywhere. None: the source's order.
        columns: columns of shards to take; a mapping renames them. None: all.
        tokenizer: a `tokenizer.json` by which `text_column` becomes token ids; for "tokens" and "megatron".
        text_column: column of text.
        dtype: type of a token, such as "uint16". None: as small as the tokenizer allows, or "int32".
        length: tokens of a sample, which "tokens" needs.
        end_token: token after each document, by id, or by its text where there is a tokenizer.
        schema: `pyarrow.Schema` of Parquet shards. None: what the first samples show.
        workers: processes that write. None: one a core. Iterables are written by this process.
        executor: a `concurrent.futures.Executor` that writes, in place of processes of this machine.
        verify: compare what was written with the source: True: all samples, or how many, drawn at random.
        overwrite: begin anew beside what another conversion wrote to `dest`, and remove that at the end.
            Meanwhile there are both: open the catalog, not the folder.
        identity: your word that source and functions are those of the conversion that was begun under this
            name, or under none: they are not compared. For what cannot be told apart in another process.
        checksum: keep a CRC-32 of each block in the catalog, which later reads are checked against.
        progress: show a progress bar; None: on a terminal.
        storage_options: for the fsspec filesystem of `dest`, and of `source` where that is a URL.

    Returns:
        Numbers of shards, samples and bytes, and the catalog's URL.

    Raises:
        ConversionError: another conversion has the folder, or wrote it; a worker died too often.
        SampleError: a sample cannot be read, mapped or written; it is named.
        ShardWriteError: there is no room.
        ValueError: arguments that contradict each other.

    Examples:
        >>> made = convert("images/*.tar", "images-mds", to="mds", workers=1)
        >>> made.samples, len(ShardedDataset(made.catalog))
        (8, 8)
    """
    began, options = time.monotonic(), dict(storage_options or {})
    _check_destination(dest)
    if to not in SUFFIXES:
        raise ValueError(f"to must be one of {', '.join(SUFFIXES)}, got {to!r}")
    if shard_size is not None and shard_samples is not None:
        raise ValueError("give shard_size, in bytes, or shard_samples, not both")
    if to == "tokens" and length is None:
        raise ValueError("to='tokens' needs length= (--token-length), the tokens of a sample")
    if shard_samples is not None and shard_samples < 1:
        raise ValueError(f"shard_samples must be >= 1, got {shard_samples}")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be >= 1, got {workers}")
    if executor is None and workers != 1:
        warm_up(source, to, (map, filter))
    if batched is not False and (map is None or batched < 1):
        raise ValueError(f"batched must be True or a number of samples >= 1, with map=, got {batched}")
    folder = OutputFolder(os.fspath(dest), options)
    opened = opened_source(source, columns, filter, options, progress)
    filter = None if isinstance(filter, pc.Expression) else filter  # noqa: A001
    token_options: dict[str, Any] = {}
    if tokenizer is not None:
        if map is not None or to not in TOKENS:
            raise ValueError("tokenizer= is for to='tokens' and 'megatron', without map=")
        map, token_options = tokenizing(tokenizer, text_column, to, dtype, end_token)  # noqa: A001
    elif to in TOKENS:
        if isinstance(end_token, str):
            raise ValueError("end_token is an id where there is no tokenizer=")
        token_options = {"dtype": dtype or "int32", "end_token": end_token}
    if to in TOKENS:
        token_options["length"] = length
    elif names := [n for n, v in {"dtype": dtype, "length": length, "end_token": end_token}.items() if v]:
        raise ValueError(f"{names[0]}= is for to='tokens' and 'megatron'")
    if schema is not None and to != "parquet":
        raise ValueError("schema= is for to='parquet'")
    source_of = ConvertSource(
        opened,
        to=to,
        map=map,
        batch_size=_BATCH_SIZE if batched is True else batched or None,
        filter=filter,
        shuffle=shuffle,
        schema=schema,
        token_options=token_options,
    )
    asked = Asked.of(verify, source_of)
    proposal = source_of.plan(shard_size, shard_samples, checksum, identity)
    _refuse_own(folder, source_of)
    with folder.held():
        plan = _agreed(folder, proposal, source_of, overwrite=overwrite)
        folder = OutputFolder(folder.url, options, plan.run)
        folder.clear()
        task = source_of.task(plan, folder)
        receipts = finished_shards(task, sums=verify is not False)
        skipped = len(receipts)
        with ShownShards(receipts, plan.bounds, progress) as shown:
            if plan.bounds is None:
                write_iterable(task, source_of, shown, plan.options["shard_samples"])
            else:
                write_all(task, shown, workers=workers, executor=executor)
        _finish(task, receipts, progress, executor)
        verified = verify_shards(task, receipts, asked, progress) if asked else 0
    written = [receipts[number] for number in sorted(receipts) if receipts[number]["name"]]
    return Converted(
        catalog=folder.of(CATALOG_NAME),
        shards=len(written),
        samples=sum(receipt["samples"] for receipt in written),
        bytes=sum(receipt["bytes"] for receipt in written),
        skipped=skipped,
        verified=verified,
        seconds=time.monotonic() - began,
        files=[folder.of(receipt["name"]) for receipt in written],
    )


def _check_destination(dest: Any) -> None:
    """Raise `ValueError` where this is no folder: somebody forgot it, and named one source more."""
    text = os.fspath(dest) if isinstance(dest, (str, os.PathLike)) else ""
    if not text or not isinstance(text, str):
        raise ValueError(f"dest must be a folder, which the shards are written to, got {dest!r}")
    is_file = is_local(text) and os.path.isfile(local_path(text))
    if what := "a pattern" if {"*", "?"} & {*text} else "a file" if is_file else "":
        raise ValueError(
            f"the destination, {identity_of(text)}, is {what}: name a folder after the sources, or was it "
            "forgotten?"
        )


def _agreed(folder: OutputFolder, proposal: Plan, inputs: ConvertSource, *, overwrite: bool) -> Plan:
    """The plan that the folder has, if it is this one; else the new one, which it gets."""
    data = folder.read(PLAN)
    if data is not None:
        folder.abort_uploads()
    if data is not None and not overwrite:
        plan = Plan.from_json(data, identity_of(folder.of(PLAN)))
        differences = proposal.differences(plan)
        if differences:
            raise ConversionError(
                f"{identity_of(folder.url)} has another conversion: {'; '.join(differences)}. Give another "
                "folder; or overwrite=True (--overwrite), which removes it once the new one is whole; or "
                "identity='...' (--identity), if source and functions do the same all the same"
            )
        if proposal.identity not in (None, plan.identity):
            plan = replace(plan, identity=proposal.identity)
            folder.write(PLAN, plan.to_json())
        return plan
    if data is None:
        _refuse_foreign(folder, proposal.target.to, overwrite=overwrite)
    plan = replace(proposal, target=inputs.target(), run=folder.next_run(data))
    OutputFolder(folder.url, folder.options, plan.run).begin()
    folder.write(PLAN, plan.to_json())
    # Nothing leads to what runs in between had begun; the first one stays until another is whole.
    folder.forget({plan.run, *(folder.whole_runs() or [min(folder.runs(), default=0)])})
    return plan


def _refuse_own(folder: OutputFolder, inputs: ConvertSource) -> None:
    """Raise where the destination holds a file of the source, which it would mix with what is written."""
    url = folder.holding(inputs.files())
    if url is not None:
        raise ConversionError(
            f"the source's {identity_of(url)} lies in the destination, {identity_of(folder.url)}: a "
            "conversion never replaces its own source; give another folder"
        )


def _refuse_foreign(folder: OutputFolder, to: str, *, overwrite: bool) -> None:
    """Raise where files lie in the folder that no conversion wrote: they would be read with the shards."""
    others = sorted(name for name in folder.entries() if not name.startswith("."))
    if others and not overwrite:
        raise ConversionError(
            f"{identity_of(folder.url)} has files that no conversion wrote, such as {others[0]!r}: give an "
            "empty folder, or overwrite=True (--overwrite), which leaves them beside the shards"
        )
    if to == "mds" and LISTING_NAME in others:
        raise ConversionError(
            f"{identity_of(folder.of(LISTING_NAME))} names shards that no conversion wrote, and can be "
            "replaced by none: give an empty folder"
        )


# ---- the end --------------------------------------------------------------------------------------------


def _finish(
    task: TaskSpec,
    receipts: Mapping[int, Mapping[str, Any]],
    progress: bool | None,
    executor: Executor | None,
) -> None:
    """Index the shards, and save their catalog; for MDS, `index.json`, too. Then remove those of before."""
    folder, to = task.folder, task.target.to
    folder.clear()
    written = [receipts[number] for number in sorted(receipts) if receipts[number]["name"]]
    if not written:
        raise ConversionError("filter= and map= leave no sample: nothing was written")
    folder.put_whole({folder.run, *folder.whole_runs()})
    if to == "mds":
        encodings = dict(sorted(task.target.columns.items()))
        entries = [index_entry(encodings, row["name"], row["samples"], row["bytes"], {}) for row in written]
        folder.write(LISTING_NAME, index_json(entries))
    urls = [folder.of(receipt["name"]) for receipt in written]
    with Retrier() as retrier:
        codec = codec_of(task.target, urls[0])
        run = None if executor is None else partial(run_all, executor)
        catalog = index(urls, codec, retrier, storage_options=folder.options, progress=progress, run=run)
        if task.checksum:
            checksums = np.array([crc for receipt in written for crc in receipt["blocks"]], np.uint32)
            catalog = catalog.with_checksums(checksums)
        save_catalog(catalog, folder.of(CATALOG_NAME), folder.options, retrier)
    if to != "mds" and folder.has_older(".mds"):  # before its shards: whoever reads by it has all or none
        folder.remove(LISTING_NAME)
    folder.forget({folder.run})
    folder.put_whole({folder.run})
