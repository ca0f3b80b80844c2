"""Write one shard of a conversion: what a worker does, in whatever process or machine.

A shard is made of its plan and the source alone, so whoever writes it again writes the same bytes. It appears
whole under its name, then its receipt does: bytes and times, samples, CRC-32 of each block. A worker that
dies leaves at most a temporary file.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, compress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataflow.batch.transforms import own_form
from dataflow.conversion.folder import THREADS, ConversionError, OutputFolder, index_name, write_errors
from dataflow.conversion.rows import KEY, GivenRows, Rows, Sample, StoredRows
from dataflow.conversion.target import SUFFIXES, TOKENS, Target
from prefetch.store.reader import StoreReader
from sharding.arrow_arrays import number_array
from sharding.blocks import DEFAULT_BLOCK_BYTES
from sharding.cached_property import cached_property
from sharding.catalog.build import scan_shards
from sharding.errors import DataflowError, SampleError, ShardError
from sharding.formats import resolve_format
from sharding.order.order import Order
from sharding.order.permutations import FULL_ORDER, feistel, mix_key
from sharding.order.shuffle import DEFAULT_WINDOW_BLOCKS, Shuffle
from sharding.printable import listed
from sharding.write.writer import ShardWriter

WINDOW_BLOCKS = DEFAULT_WINDOW_BLOCKS
"""Blocks of shards whose samples a shuffle mixes. It decides what is written."""
ROW_GROUP_BYTES = 4 << 20
_TOGETHER = 256
"""Samples that a function with a `batch` form is given at a time."""


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """All that a worker has to know. Picklable."""

    rows: Rows
    """The samples by position; of an iterable, those of a shard."""
    map: Callable[..., Any] | None
    filter: Callable[..., Any] | None
    target: Target
    folder: OutputFolder
    digest: str = ""
    """Identity of the plan."""
    bounds: Sequence[int] = ()
    """Positions at which shards begin and the last ends; (): of an iterable, nobody knows before."""
    seed: int | None
    """Seed of the order: of shards in windows of blocks, of others of all samples; None: the source's."""
    checksum: bool = False
    way: str = "samples"
    """"samples", "tables" (Arrow, whole columns) or "members" (of tars, as they lie)."""
    batch_size: int | None
    """Samples of a shard that `map` is called with, as columns; None: it is called with each sample."""
    index_at: str = ""
    """File in the destination that has the index of `rows`; "": they have it."""

    @cached_property
    def _order(self) -> Order:
        assert isinstance(self.rows, StoredRows)
        assert self.seed is not None
        shuffle = Shuffle("window", window_blocks=WINDOW_BLOCKS, canonical_nodes=1)
        return Order(self.rows.selection.num_samples, shuffle, seed=self.seed, epoch=0)

    def positions(self, number: int) -> NDArray[np.int64]:
        """Return the positions in the source of a shard's samples."""
        if isinstance(self.rows, GivenRows):
            return self.rows.first + np.arange(len(self.rows), dtype=np.int64)
        positions = np.arange(self.bounds[number], self.bounds[number + 1], dtype=np.int64)
        if self.seed is None:
            return positions
        if isinstance(self.rows, StoredRows):
            return self._order.samples(positions)
        key = mix_key(self.seed, 0, FULL_ORDER)
        return feistel(positions.astype(np.uint64), self.bounds[-1], key).astype(np.int64)


class ProducedSamples(NamedTuple):
    """Samples on their way, some at a time."""

    source: Rows
    positions: list[int]
    """Positions in the source."""
    keys: list[Any]
    """Keys in the source; None: it has none."""
    samples: list[Any]
    """The samples: at the end, what is written of them."""

    def where(self, mask: Sequence[Any]) -> ProducedSamples:
        """The samples for which `mask` is true."""
        if all(mask):
            return self
        return ProducedSamples(self.source, *(list(compress(column, mask)) for column in self[1:]))

    def failed(self, number: int, reason: str, stage: str) -> SampleError:
        """The error of one of them, by the name that it has in the source."""
        url, name = self.source.named(self.positions[number])
        key = self.keys[number]
        return SampleError(url, reason, key=name if key is None else str(key), stage=stage)


def shard_name(number: int, to: str, mark: str) -> str:
    """Return the name of a shard; `mark`: that of its run."""
    return f"shard.{number:05d}{mark}.mds" if to == "mds" else f"shard-{number:06d}{mark}{SUFFIXES[to]}"


def write_packed(packed: bytes, number: int) -> dict[str, Any]:
    """Write a shard of a pickled task; returns its receipt."""
    return write_shard(_unpacked(packed), number)


@lru_cache(maxsize=2)
def _unpacked(packed: bytes) -> TaskSpec:
    task: TaskSpec = pickle.loads(packed)
    if task.index_at:
        assert isinstance(task.rows, StoredRows)
        index = task.folder.read(task.index_at) or b""
        if index_name(index) != task.index_at:  # nothing else is unpickled
            raise ConversionError(f"{task.folder.of(task.index_at)} is not as it was written")
        task.rows.take_index(index)
    return task


def write_shard(task: TaskSpec, number: int) -> dict[str, Any]:
    """Write a shard, and then its receipt, which is returned."""
    folder = task.folder
    name = shard_name(number, task.target.to, folder.mark)
    url = folder.of(name)
    writer = task.target.writer(url, folder.options)
    try:
        with write_errors(url), writer:
            positions = task.positions(number)
            _WAYS[task.way](writer, task, positions)
    except DataflowError as error:
        error.add_note(f"shard {name} was not written; what was finished before stays")
        raise
    shards = writer.shards
    receipt = {
        "plan": task.digest,
        "shard": number,
        "name": name if shards else "",
        "read": len(positions),
        "samples": sum(shard.num_samples for shard in shards),
        "bytes": sum(shard.num_bytes for shard in shards),
        "files": [shard.url.rpartition("/")[2] for shard in shards],
        "blocks": block_checksums(task, url) if shards and task.checksum else [],
    }
    folder.put_receipt(number, receipt)
    return receipt


def finished_shards(task: TaskSpec, *, sums: bool) -> dict[int, dict[str, Any]]:
    """The receipts of shards that are as they were written, by number.

    Size and etag or time tell; where these differ, or of all if `sums`, the CRC-32 of blocks do.
    """

    def is_as_written(receipt: Mapping[str, Any], is_sure: bool) -> bool:
        if is_sure and not (sums and task.checksum):
            return True
        if not task.checksum or not (is_sure or [*receipt["files"]] in ([], [receipt["name"]])):
            return is_sure
        url = task.folder.of(receipt["name"])
        with suppress(DataflowError):
            is_same = not receipt["name"] or block_checksums(task, url) == receipt["blocks"]
            if is_same and not is_sure:
                task.folder.put_receipt(receipt["shard"], receipt)
            return bool(is_same)
        return False

    receipts = task.folder.receipts(task.digest)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="dataflow-convert") as pool:
        are_same = list(pool.map(lambda entry: is_as_written(*entry), receipts.values()))
    return {
        number: receipt
        for (number, (receipt, _)), is_same in zip(receipts.items(), are_same, strict=True)
        if is_same
    }


def block_checksums(task: TaskSpec, url: str) -> list[int]:
    """CRC-32 of each block of a shard, read back from where it lies."""
    options = task.folder.options
    scanned = scan_shards(
        [url],
        codec_of(task.target, url),
        storage_options=options,
        block_bytes=DEFAULT_BLOCK_BYTES,
        listed={},
    )
    (result,) = scanned
    if isinstance(result, ShardError):
        raise result
    shard, scan = result
    checksums: list[int] = []
    memory = np.empty(scan.length.max(initial=0), np.uint8)  # once: new pages cost as much as the sum
    with closing(StoreReader(options)) as reader:
        for offset, length in zip(scan.offset.tolist(), scan.length.tolist(), strict=True):
            reader.read_into(shard, offset, memory[:length])
            checksums.append(zlib.crc32(memory[:length].data))
    return checksums


def codec_of(target: Target, url: str) -> Any:
    """The format that reads the shards of a target."""
    return resolve_format(target.to, [url], length=target.length if target.to in TOKENS else None)


# ---- samples --------------------------------------------------------------------------------------------


def fitted_rows(task: TaskSpec, positions: NDArray[np.int64]) -> Iterator[ProducedSamples]:
    """Yield what is written of the samples at some positions, some at a time."""
    start = 0
    for part in _parts(task, task.rows.batches(positions)):
        part_positions = positions[start : start + len(part)].tolist()
        start += len(part)
        yield _made(task, part_positions, part)


def _parts(task: TaskSpec, batches: Iterable[Sequence[Any]]) -> Iterator[list[Any]]:
    """The samples that functions are called with together: those of columns so many, wherever blocks end."""
    size, step, held = task.batch_size or 1, task.batch_size or _TOGETHER, list[Any]()
    for batch in batches:
        held += batch
        whole = len(held) - len(held) % size
        for first in range(0, whole, step):
            yield held[first : min(first + step, whole)]
        del held[:whole]
    if held:
        yield held


def _made(task: TaskSpec, positions: list[int], samples: list[Any]) -> ProducedSamples:
    """Return what filter, map and target make of some samples. `SampleError` names the sample."""
    rows = _filtered(task, positions, samples)
    if task.map is not None and task.batch_size:
        rows = _mapped_columns(task.map, rows) if rows.samples else rows
    elif task.map is not None:
        values = _mapped(task.map, rows)
        rows = rows._replace(samples=values).where([value is not None for value in values])
    fitted, fit = list[Sample](), task.target.fitted
    try:
        for position, key, sample in zip(rows.positions, rows.keys, rows.samples, strict=True):
            fitted.append(fit(sample, f"{position:09d}" if key is None else key))
    except ValueError as error:
        raise rows.failed(len(fitted), str(error), "write") from error
    return rows._replace(samples=fitted)


def _filtered(task: TaskSpec, positions: list[int], samples: list[Any]) -> ProducedSamples:
    keys = [sample.get(KEY) if isinstance(sample, dict) else None for sample in samples]
    rows = ProducedSamples(task.rows, positions, keys, samples)
    return rows if task.filter is None else rows.where(_called("filter", task.filter, rows))


def _called(what: str, function: Callable[..., Any], rows: ProducedSamples) -> list[Any]:
    """Return what a function returns for each sample."""
    results: list[Any] = []
    try:
        for sample in rows.samples:
            results.append(function(sample))  # noqa: PERF401 - how many there are tells which failed
    except SampleError:
        raise
    except Exception as error:
        reason, sample = f"{what}= raised {type(error).__name__}: {error}", rows.samples[len(results)]
        if isinstance(error, KeyError) and isinstance(sample, dict):
            reason += f"; the sample has {listed(sample)}"
        raise rows.failed(len(results), reason, "transform") from error
    return results


def _mapped(function: Callable[..., Any], rows: ProducedSamples) -> list[Any]:
    """Return what a function makes of samples: of all at once where it has a `batch` form."""
    if (batch_form := own_form(function, "batch")) is None:
        return _called("map", function, rows)
    try:
        return list(batch_form(list(rows.samples)))
    except Exception as error:
        _called("map", function, rows)  # one by one, the sample at fault is found
        raise rows.failed(0, f"map= raised {type(error).__name__}: {error}", "transform") from error


def _mapped_columns(function: Callable[..., Any], rows: ProducedSamples) -> ProducedSamples:
    """Return what a function makes of the columns of samples; of other ones than it was given, if so many."""
    names = dict.fromkeys(chain.from_iterable(rows.samples))
    try:
        columns = function({name: [sample.get(name) for sample in rows.samples] for name in names})
        sizes = {name: len(values) for name, values in columns.items()}
    except Exception as error:
        reason = f"map= of {len(rows.samples)} samples from this one on: {type(error).__name__}: {error}"
        raise rows.failed(0, reason, "transform") from error
    if len(set(sizes.values())) > 1:
        reason = f"map= returned columns of different lengths for the samples from this one on: {sizes}"
        raise rows.failed(0, reason, "transform")
    samples = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if len(samples) == len(rows.samples):
        return rows._replace(samples=samples)
    first, count = rows.positions[0], len(samples)
    keys = [f"{first:09d}-{number:06d}" for number in range(count)]
    return ProducedSamples(rows.source, [first] * count, keys, samples)


def _by_sample(writer: ShardWriter, task: TaskSpec, positions: NDArray[np.int64]) -> None:
    before = 0
    for rows in fitted_rows(task, positions):
        try:
            writer.write_many(rows.samples)
        except SampleError as error:
            key = error.key or ""  # the number in the shard, unless the writer calls the sample otherwise
            number = (int(key) if key.isdecimal() else -1) - before
            if not 0 <= number < len(rows.samples):  # of rows that were kept back, or of no sample
                raise
            raise rows.failed(number, error.reason, "write") from error
        before += len(rows.samples)


# ---- without a sample in between ------------------------------------------------------------------------


def _by_table(writer: ShardWriter, task: TaskSpec, positions: NDArray[np.int64]) -> None:
    for table in chosen_tables(task, positions):
        writer.write_table(table)


def chosen_tables(task: TaskSpec, positions: NDArray[np.int64]) -> Iterator[pa.Table]:
    """Yield Arrow tables in the types of the target: of the samples that a filter leaves, in their order."""
    rows, schema = task.rows, task.target.arrow_schema
    assert isinstance(rows, StoredRows)
    if task.filter is not None:
        left, asked = list[int](), positions.tolist()
        for batch in rows.batches(positions):
            left += _filtered(task, asked[: len(batch)], batch).positions
            del asked[: len(batch)]
        positions = np.array(left, np.int64)
    order = np.argsort(positions, kind="stable")
    tables = (as_schema(table, schema) for table in rows.tables(positions[order]))
    if not (np.diff(positions) < 0).any():
        yield from tables
        return
    whole, places = pa.concat_tables(tables), np.argsort(order)
    step = max(1, len(places) * ROW_GROUP_BYTES // max(1, whole.nbytes))
    for first in range(0, len(places), step):
        yield whole.take(number_array(places[first : first + step]))


def as_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with the columns and types of a schema; columns that it lacks are null."""
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _by_member(writer: ShardWriter, task: TaskSpec, positions: NDArray[np.int64]) -> None:
    """Append blocks of tars as they lie, after seeing that they are what was indexed."""
    assert isinstance(task.rows, StoredRows)
    last: tuple[str, str] | None = None
    for block, data in task.rows.stored(positions):
        keys = task.rows.codec.keys(block, data)
        if last is not None and last[0] != block.shard.url and last[1] == keys[0]:
            reason = "two samples in a row with one key would be read as one; map= may give them others"
            raise SampleError(block.shard.url, reason, key=keys[0], stage="write")
        last = block.shard.url, keys[-1]
        writer.write_bytes(data, block.num_samples)


_WAYS: dict[str, Callable[[ShardWriter, TaskSpec, NDArray[np.int64]], None]] = {
    "samples": _by_sample,
    "tables": _by_table,
    "members": _by_member,
}
