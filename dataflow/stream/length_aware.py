"""What `DataLoader(batching=...)` needs before it can plan: arguments that fit, and every sample's length."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dataflow.dataset import ShardedDataset
from dataflow.decode.values import CONVERTERS, LACKING
from dataflow.mixture import Mixture
from dataflow.outputs.objects import ObjectOutput
from dataflow.outputs.output import Output
from dataflow.outputs.ragged import PaddedOutput, RaggedOutput
from dataflow.stream.settings import StreamSettings
from prefetch.store.filesystems import shard_file
from sharding.errors import SampleError
from sharding.lengths.batching import Batching, Bucketed, Packed, TokenBudget
from sharding.lengths.column_lengths import resolve_lengths
from sharding.lengths.found_plan import FoundPlanner
from sharding.lengths.kept import KeptLengths
from sharding.lengths.unit_plan import UnitPlanner
from sharding.lengths.units import DEFAULT_MEGABATCH_SAMPLES

_THREADS = 16


def check_batching(settings: StreamSettings, dataset: ShardedDataset | Mixture) -> None:
    """Raise `ValueError` for what of the settings and the dataset does not go with `batching=`."""
    batching, batch_size, collate_fn = settings.batching, settings.batch_size, settings.collate_fn
    if batching is None:
        return
    if isinstance(dataset, Mixture):
        raise ValueError("batching= does not take a Mixture yet: lengths are known of one dataset at a time")
    name = type(batching).__name__
    if not isinstance(batching, Packed | TokenBudget | Bucketed):
        raise ValueError(f"batching must be Packed(...), TokenBudget(...) or Bucketed(...), got {batching!r}")
    if not batching.rows_are_units and batch_size != 1:
        raise ValueError(f"{name} decides how many samples a batch has: leave batch_size={batch_size} out")
    if isinstance(batching, Packed) and collate_fn:
        raise ValueError("Packed lays samples into rows by itself: use batch_transform instead")
    if collate_fn and getattr(batching, "overlong", "error") != "error":
        raise ValueError('overlong="truncate" needs batches that are padded here: leave collate_fn out')
    if collate_fn and len(batching.columns) > 1:
        raise ValueError("columns= are padded here: leave it or collate_fn out")
    if collate_fn is None and not are_found(settings, dataset):
        for column in batching.columns:
            _check_column(column, dataset)
        _check_others(batching, dataset)


def are_found(settings: StreamSettings, dataset: ShardedDataset | Mixture) -> bool:
    """Whether what is batched, and so how long it is, is made by a function of the user's.

    Where a `collate_fn` forms the batches, the stored lengths count.
    """
    batching = settings.batching
    if batching is None or settings.collate_fn is not None or isinstance(dataset, Mixture):
        return False
    output = _output(batching.column, dataset)
    is_made = isinstance(output, ObjectOutput) and output.convert is not CONVERTERS["text"]
    return is_made or dataset.transform is not None


def _check_others(
    batching: Batching, dataset: ShardedDataset, lengths: NDArray[np.integer] | None = None
) -> None:
    """Refuse lists that would come whole with every piece of their sample, unless the user says so.

    Lists of a fixed length count where the samples of the column that is cut have that length too: as its
    type says, or all `lengths`.
    """
    names = [output.name for output in dataset.outputs]
    if strange := [name for name in batching.whole if name not in names]:
        raise ValueError(f"whole names {strange[0]!r}, but the batches have {', '.join(names)}")
    lead, named = _output(batching.column, dataset), {*batching.columns, *batching.whole}
    assert lead is not None

    def is_alike(output: Output) -> bool:
        if lengths is not None:
            return output.list_length is not None and bool((lengths == output.list_length).all())
        if isinstance(output, RaggedOutput):
            return True
        return output.list_length is not None and output.list_length == lead.list_length

    alike = [output.name for output in dataset.outputs if output.name not in named and is_alike(output)]
    if alike and batching.cuts:
        lists = ", ".join(map(repr, alike))
        raise ValueError(
            f"{type(batching).__name__} cuts {lead.name!r}, and nothing says whether it shall cut the lists "
            f"in {lists} as well: pass columns={[*batching.columns, *alike]} to cut them alike, "
            f"whole={alike} to have a sample's whole lists with every piece of it, or leave them out of the "
            "dataset's columns="
        )


def _check_column(name: str, dataset: ShardedDataset) -> None:
    output = _output(name, dataset)
    if output is None:
        listed = ", ".join(output.name for output in dataset.outputs)
        raise ValueError(f"batching by column {name!r}, but the batches have {listed}; pass column=")
    if isinstance(output, PaddedOutput):
        raise ValueError(f"column {name!r} is padded by decode=Pad(...); leave that out, batching= does it")
    if not isinstance(output, RaggedOutput) and output.list_length is None:
        raise ValueError(
            f"column {name!r} must hold lists of numbers or bytes to be packed or padded, which it is "
            f'not as decoded; for bytes pass decode={{"{name}": None}}'
        )


def _output(name: str, dataset: ShardedDataset) -> Output | None:
    return next((output for output in dataset.outputs if output.name == name), None)


def make_planner(
    settings: StreamSettings, dataset: ShardedDataset, window_bytes: int
) -> UnitPlanner | FoundPlanner:
    """Plan with the lengths of samples, which are looked up, or will be found while samples are made.

    Reads shards where the catalog does not know. Where `batching.window` is None, a megabatch holds about
    `window_bytes` of blocks.

    Raises as `sharding.lengths.column_lengths.resolve_lengths` does, and `SampleError` where a sample has no
    length.
    """
    batching = settings.batching
    assert batching is not None
    blocks = dataset.catalog.blocks
    held = max(1, int(np.maximum(blocks.length, blocks.nbytes).sum()))
    window = max(1, min(DEFAULT_MEGABATCH_SAMPLES, window_bytes * len(dataset) // held))
    if not are_found(settings, dataset):
        return UnitPlanner(_lengths(batching, dataset), batching, window)
    lengths = None if batching.lengths is None else _lengths(batching, dataset)
    return FoundPlanner(batching, window, key=_lengths_key(batching, dataset), lengths=lengths)


def _lengths_key(batching: Batching, dataset: ShardedDataset) -> str:
    """What names the lengths that a transform makes; "" where nothing does."""
    return batching.lengths_key or str(getattr(dataset.transform, "fingerprint", "") or "")


def kept_lengths(settings: StreamSettings, dataset: ShardedDataset | Mixture) -> KeptLengths | None:
    """The lengths that were found before; None where they have no name, or differ from epoch to epoch."""
    batching = settings.batching
    if batching is None or not are_found(settings, dataset) or batching.lengths is not None:
        return None
    assert isinstance(dataset, ShardedDataset)
    key = _lengths_key(batching, dataset)
    if not key or dataset.transform_wants_rng:
        return None
    samples = dataset.fingerprint().partition("@")[0]
    outputs = [f"{one.name} {one.sources} {one.description()}" for one in dataset.outputs]
    return KeptLengths(len(dataset), [samples, batching.column, *outputs, key])


def _lengths(batching: Batching, dataset: ShardedDataset) -> NDArray[np.integer]:
    """Of the dataset's samples, as the batching says."""
    output = _output(batching.column, dataset)
    stored = output.sources[0] if output is not None else batching.column  # `columns=` may rename
    named = batching.lengths is not None
    join = next((join for join in dataset.joins_used if batching.column in join.names and not named), None)
    of = dataset if join is None else join.other
    reader = of.new_reader()
    with closing(reader), ThreadPoolExecutor(_THREADS, thread_name_prefix="dataflow-lengths") as pool:
        lengths = resolve_lengths(
            batching.lengths,
            of.catalog,
            stored,
            storage_options=of.storage_options,
            map=pool.map,
            open_shard=partial(shard_file, reader.read_into),
        )
    if join is not None or not dataset.selection.is_whole:
        # `lengths` are of all samples; a plan wants those of the view.
        at, row = dataset.selection.locate(np.arange(len(dataset)))
        samples = dataset.catalog.blocks.first_sample[at] + row
        lengths = lengths[samples if join is None else join.partners.of(samples)]
    lengths = _with_missing(lengths, output, stored, dataset)
    if len(lengths) and output is not None and dataset.transform is None:
        _check_others(batching, dataset, lengths)
    return lengths


def _with_missing(
    lengths: NDArray[np.integer], output: Output | None, stored: str, dataset: ShardedDataset
) -> NDArray[np.integer]:
    """The lengths, those of missing values as delivered. `SampleError` where one may not be missing."""
    if not (lengths < 0).any():
        return lengths
    if isinstance(output, RaggedOutput) and output.missing_length is not None:
        return np.where(lengths < 0, output.missing_length, lengths)
    block, row = dataset.selection.locate(np.flatnonzero(lengths < 0)[:1])
    first = dataset.catalog.block(int(block[0]))
    cure = output.cure if output is not None else "pass lengths= as an array"
    reason = f"column {stored!r}: {LACKING}, so it has no length; {cure}"
    raise SampleError(
        first.shard.url, reason, first.offset, str(first.first_in_shard + int(row[0])), stage="plan"
    )
