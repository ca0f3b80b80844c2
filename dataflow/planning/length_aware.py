"""The checks of `DataLoader(batching=...)`, and the lengths of all samples: both come before a plan."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from fractions import Fraction
from hashlib import blake2b
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from dataflow.batch.measured import MadeToMeasure, cost_reason
from dataflow.batch.samples import GatherSamples, not_cut
from dataflow.batch.transforms import LengthsAlone, fingerprint_of, has_random_lengths, measure_of
from dataflow.dataset import ShardedDataset
from dataflow.decode.values import LACKING
from dataflow.mixture import Mixture
from dataflow.outputs.objects import ObjectOutput
from dataflow.outputs.optional import Optional
from dataflow.outputs.output import Output
from dataflow.outputs.ragged import PaddedOutput, RaggedOutput
from dataflow.planning.exchange import LengthExchange
from dataflow.planning.settings import StreamSettings
from dataflow.staging.rows import read_columns
from sharding.blocks import Block, Column
from sharding.errors import SampleError
from sharding.lengths.batching import Batching, Bucketed, Lengths, Packed, TokenBudget
from sharding.lengths.column_lengths import resolve_lengths
from sharding.lengths.kept import KeptLengths, LengthsFile
from sharding.lengths.unit_plan import UnitPlanner
from sharding.lengths.units import DEFAULT_PACKING_WINDOW_SAMPLES
from sharding.order.epoch_order import EpochOrder
from sharding.plan.window_size import DEFAULT_LIMIT
from sharding.printable import listed
from sharding.spans import Ints
from sharding.topology.topology import Topology

_log = logging.getLogger("dataflow")

_THREADS = 16
_MEASURED_BYTES, _LEAST_MEASURED = 4 << 20, 256
"""Bytes and samples of a packing window whose samples are made to be measured: whoever goes on in it makes
them again, and a tokenizer makes tokens of some MB a second. A million tokens pack to 0.998."""
_PACKING_WINDOWS_IN_LIMIT = 8


def check_batching(settings: StreamSettings, dataset: ShardedDataset | Mixture) -> None:
    """Raise `ValueError` for what does not go with `batching=`; without it, of shares that count tokens."""
    batching, batch_size, collate_fn = settings.batching, settings.batch_size, settings.collate_fn
    if batching is None:
        raise ValueError(
            'shares="tokens" counts elements of the column that batching= names: pass batching=, or '
            'give the mixture shares="samples"'
        )
    name = type(batching).__name__
    if not isinstance(batching, Packed | TokenBudget | Bucketed):
        raise ValueError(f"batching must be Packed(...), TokenBudget(...) or Bucketed(...), got {batching!r}")
    if not batching.rows_are_units and batch_size != 1:
        raise ValueError(f"{name} decides how many samples a batch has: leave batch_size={batch_size} out")
    if isinstance(batching, Packed) and collate_fn:
        raise ValueError("Packed lays samples into rows by itself: use batch_transform instead")
    if isinstance(dataset, Mixture) and dataset.spec.stop == "never":
        raise ValueError(
            f'{name} counts the rows or batches of an epoch, and one with stop="never" has no end; with '
            'stop="first" or "all" each epoch goes on where the sources stopped in the one before'
        )
    if collate_fn and getattr(batching, "overlong", "error") != "error":
        raise ValueError('overlong="truncate" needs batches that are padded here: leave collate_fn out')
    if collate_fn and len(batching.columns) > 1:
        raise ValueError("columns= are padded here: leave it or collate_fn out")
    untyped = [name for name, value in optional(batching).items() if value.ndim == 1 and not len(value)]
    if (batching.balance is not None or batching.cost_columns) and untyped:
        raise ValueError(
            f"balance= and budget= have rows without {untyped[0]!r} come together, before a sample that has "
            "it: say of which dtype and shape they are, as in "
            f'whole={{{untyped[0]!r}: Optional(default=numpy.zeros((0, 1176), "uint8"))}}'
        )
    if (lacking := optional(batching)) and not are_measured(settings, dataset):
        first = next(iter(lacking))
        raise ValueError(
            f"whole= names {first!r} as Optional, which is for what transform= makes and batches without a "
            f"collate_fn: pass decode={{{first!r}: Optional(...)}} for a stored column"
        )
    if collate_fn is None and not are_measured(settings, dataset):
        for column in batching.columns:
            _check_column(column, dataset)
        _check_others(batching, dataset)


def is_by_tokens(dataset: ShardedDataset | Mixture) -> bool:
    """Return whether it is a mixture whose shares count tokens."""
    return isinstance(dataset, Mixture) and dataset.spec.counts == "tokens"


def are_measured(settings: StreamSettings, dataset: ShardedDataset | Mixture) -> bool:
    """Return whether what is batched, and so how long it is, is made by a function of the user's.

    Where a `collate_fn` forms the batches, the stored lengths count.
    """
    batching = settings.batching
    if batching is None or settings.collate_fn is not None:
        return False
    output = _output(batching.column, dataset)
    # Of text and of objects in JSON the schema says that they are no lists of numbers.
    is_made = isinstance(output, ObjectOutput) and output.convert not in (bytes.decode, json.loads)
    return is_made or any(component.transform for component in dataset.sources)


def tells_lengths(dataset: ShardedDataset | Mixture) -> bool:
    """Return whether all transforms have `measure`."""
    return all(measure_of(component.transform) for component in dataset.sources)


def _check_others(
    batching: Batching, dataset: ShardedDataset | Mixture, lengths: NDArray[np.integer] | None = None
) -> None:
    """Refuse lists that would come whole with every segment of their sample, unless the user says so.

    Lists of a fixed length count where the samples of the column that is cut have that length too: as its
    type says, or all `lengths`.
    """
    names = [output.name for output in dataset.outputs]
    if strange := [name for name in batching.whole if name not in names]:
        raise ValueError(f"whole names {strange[0]!r}, but the batches have {listed(names)}")
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
            f"whole={alike} to have a sample's whole lists with every segment of it, or leave them out of "
            "the dataset's columns="
        )


def _check_column(name: str, dataset: ShardedDataset | Mixture) -> None:
    output = _output(name, dataset)
    if output is None:
        names = listed(output.name for output in dataset.outputs)
        raise ValueError(f"batching by column {name!r}, but the batches have {names}; pass column=")
    if isinstance(output, PaddedOutput):
        raise ValueError(f"column {name!r} is padded by decode=Pad(...); leave that out, batching= does it")
    if not isinstance(output, RaggedOutput) and output.list_length is None:
        raise ValueError(
            f"column {name!r} must hold lists of numbers or bytes to be packed or padded, which it is "
            f'not as decoded; for bytes pass decode={{"{name}": None}}'
        )


def _output(name: str, dataset: ShardedDataset | Mixture) -> Output | None:
    return next((output for output in dataset.outputs if output.name == name), None)


def packing_window_bytes(given_limit: int | None) -> int:
    """Bytes of blocks that a packing window may have: an eighth of the limit that the user gave, if any.

    Else of a limit that is the same on all machines.
    """
    return (given_limit or DEFAULT_LIMIT) // _PACKING_WINDOWS_IN_LIMIT


def make_planner(
    batching: Batching, dataset: ShardedDataset | Mixture, window_bytes: int, *, measured: bool = False
) -> UnitPlanner:
    """Plan with the lengths of samples, which are looked up, or `measured` while samples are made.

    Reads shards where the catalog does not know. Where `batching.window` is None, a packing window has 16,384
    samples, more where these fill few rows, but at most about `window_bytes` of blocks, or 4 MiB where
    lengths are measured.

    Raises as `sharding.lengths.column_lengths.resolve_lengths` does, and `SampleError` where a sample has no
    length.
    """
    components = dataset.sources
    parts, names = None, (batching.column, *batching.cost_columns)
    if batching.lengths is not None or not measured:
        if measured and (absent := [name for name in names if batching.told.get(name) is None]):
            raise ValueError(f"lengths= does not tell of {absent[0]!r}: pass one for each of {listed(names)}")
        asked = [_lengths_asked(batching.told.get(name), dataset) for name in names]
        parts, *costs = (
            [_source_lengths(batching, *pair, name) for pair in zip(components, asked_lengths, strict=True)]
            for name, asked_lengths in zip(names, asked, strict=True)
        )
    shares: Sequence[Fraction] = [Fraction(1)]
    if isinstance(dataset, Mixture):
        shares = dataset.shares
        if parts is not None:
            shares = dataset.sample_shares([*map(batching.delivered, parts)])
    held = [np.maximum(s.catalog.blocks.length, s.catalog.blocks.nbytes).sum() for s in components]
    each = sum(
        share * max(1, int(n)) / max(1, len(s)) for share, n, s in zip(shares, held, components, strict=True)
    )
    num_in_token, most = sum(map(len, _used(dataset))), DEFAULT_PACKING_WINDOW_SAMPLES
    lengths, mean = None, None
    if parts is not None:
        lengths = parts[0] if len(parts) == 1 else np.concatenate(parts)
        means = (float(part.mean()) if len(part) else 0.0 for part in parts)
        mean = sum(float(share) * source_mean for share, source_mean in zip(shares, means, strict=True))
        most = max(most, batching.least_samples(lengths[:num_in_token]))
        lengths = np.column_stack([lengths, *map(np.concatenate, costs)]) if costs else lengths
    if measured and not tells_lengths(dataset):
        most = min(DEFAULT_PACKING_WINDOW_SAMPLES, max(_LEAST_MEASURED, int(_MEASURED_BYTES / each)))
    return UnitPlanner(
        batching,
        max(1, min(most, int(window_bytes / each))),
        lengths=lengths,
        measured_as=_lengths_key(batching, dataset) if measured else None,
        mean_length=mean,
        num_in_token=num_in_token,
    )


def _used(dataset: ShardedDataset | Mixture) -> Sequence[ShardedDataset]:
    """The sources that identify it: see `Mixture.fingerprint`."""
    return dataset.sources[: dataset.spec.num_used] if isinstance(dataset, Mixture) else dataset.sources


def _lengths_key(batching: Batching, dataset: ShardedDataset | Mixture) -> str:
    """Return what names the lengths that transforms make; "" where nothing does."""
    transforms = [component.transform for component in _used(dataset) if component.transform is not None]
    marks = [*dict.fromkeys(map(fingerprint_of, transforms))]
    if batching.lengths_key or not (marks and all(marks)):
        return batching.lengths_key
    # A state of many sources has no room for all.
    return marks[0] if len(marks) == 1 else blake2b("/".join(marks).encode(), digest_size=8).hexdigest()


def kept_lengths(settings: StreamSettings, dataset: ShardedDataset | Mixture) -> KeptLengths | None:
    """The lengths that were measured before; None where they have no name, or differ from epoch to epoch."""
    batching, components = settings.batching, dataset.sources
    if batching is None or not are_measured(settings, dataset) or batching.lengths is not None:
        return None
    transforms = [component.transform for component in components if component.transform is not None]
    if not _lengths_key(batching, dataset) or any(map(has_random_lengths, transforms)):
        return None
    names = (batching.column, *batching.cost_columns)
    return KeptLengths(*([_lengths_file(batching, each, name) for each in components] for name in names))


class SampleLengths:
    """The lengths of samples that are made, as a loader knows them, and the ranks that measure them with it.

    Args:
        settings: of the loader.
        dataset: its own.
    """

    def __init__(self, settings: StreamSettings, dataset: ShardedDataset | Mixture) -> None:
        self._timeout_s, self._dataset, self._batching = settings.timeout_s, dataset, settings.batching
        self._known_lengths = kept_lengths(settings, dataset)
        is_open = settings.batching is not None and settings.batching.lengths is None
        if is_open and not tells_lengths(dataset) and any(measure_of(s.transform) for s in dataset.sources):
            _log.warning(
                "the transforms of some sources of the mixture have no measure, so it is not used: "
                "packing windows are made to be planned"
            )
        self.exchange: LengthExchange | None = None
        """With the other ranks; None: not joined yet, or there are none."""

    @property
    def are_known(self) -> bool:
        """Return whether those of all samples are kept."""
        return self._known_lengths is not None and self._known_lengths.is_complete

    def join_ranks(self, planner: UnitPlanner, topology: Topology, shard_index: int) -> UnitPlanner:
        """Join the other ranks, once; the planner that knows what all of them know. A collective."""
        ranks, known_lengths = topology.world_size, self._known_lengths
        if self.exchange is None and ranks > 1 and dist.is_available() and dist.is_initialized():
            if dist.get_world_size() != ranks:
                raise ValueError(
                    f"topology= tells of {ranks} ranks, but torch.distributed of {dist.get_world_size()}: "
                    "lengths that are measured on the way are exchanged among all of them"
                )
            self.exchange = LengthExchange(shard_index, self._timeout_s)
            if not self.exchange.agreed(known_lengths.digest if known_lengths else "") and known_lengths:
                known_lengths.forget()  # as on the ranks of a machine that has not seen these samples
                planner = planner.with_lengths(None)
        return self._with_lengths(planner)

    def record(self, planner: UnitPlanner, order: EpochOrder, first: int, lengths: Ints) -> UnitPlanner:
        """Keep the lengths of samples from a position of an order on; the planner that knows them, too."""
        if self._known_lengths is not None:
            self._known_lengths.note(order.samples(np.arange(first, first + len(lengths))), lengths)
        return self._with_lengths(planner)

    def _with_lengths(self, planner: UnitPlanner) -> UnitPlanner:
        known_lengths = self._known_lengths
        if known_lengths is None or not known_lengths.is_complete or planner.lengths is not None:
            return planner
        if (known_lengths.lengths > planner.batching.most).any():
            return planner  # such samples are named, or left out, when they are made
        return planner.with_lengths(known_lengths.lengths)

    def measured(self, measure: Callable[[ShardedDataset], SampleLengths]) -> NDArray[np.int32]:
        """The lengths of all samples, before the first batch: shares of tokens begin with them.

        `measure` makes all samples of a source. Raises `ValueError` where nothing would tell the lengths from
        others, and where some samples have none.
        """
        if self._known_lengths is None:
            raise ValueError(
                'shares="tokens" needs the lengths of all samples before the first one is delivered; what '
                "transform= makes is measured once and kept, under its fingerprint or lengths_key= of "
                "batching=, and not where it takes rng="
            )
        _log.info("all samples are read and measured once, before the first batch; their lengths are kept")
        known = []
        for component in self._dataset.sources:
            alone = copy.copy(component)
            alone.batch_transform = None  # it would run for nothing
            if self._batching is not None and measure_of(component.transform):
                alone.transform = LengthsAlone(component.transform, self._batching)
            lengths = measure(alone)
            if not lengths.are_known:
                raise ValueError(
                    f"samples of {component!r} were left out, so they have no length: by tokens, a mixture "
                    "takes sources whose samples can all be made"
                )
            assert lengths._known_lengths is not None
            known.append(lengths._known_lengths.lengths)
        return np.concatenate(known)

    def save(self, topology: Topology, *, if_much: bool = False) -> None:
        """Write what is new, on one rank of each machine; `if_much`: not every few samples."""
        if self._known_lengths is not None and topology.local_rank == 0:
            (self._known_lengths.save_much if if_much else self._known_lengths.save)()


def _lengths_file(batching: Batching, component: ShardedDataset, column: str) -> LengthsFile:
    """Return where the lengths of a source's samples are kept, those of one column."""
    outputs = [f"{output.name} {output.sources} {output.description()}" for output in component.outputs]
    return LengthsFile(
        num_samples=len(component),
        catalog=component.catalog.fingerprint(),
        facts=[component.fingerprint(), column, *outputs, _lengths_key(batching, component)],
        catalog_path=component.catalog_path,
    )


def _lengths_asked(lengths: Any, dataset: ShardedDataset | Mixture) -> Sequence[Lengths | None]:
    """Return where the lengths of each source come from."""
    if not isinstance(dataset, Mixture):
        return [lengths]
    components = dataset.sources
    if lengths is None or isinstance(lengths, str) or callable(lengths):
        return [lengths] * len(components)
    if isinstance(lengths, Mapping):
        if lengths.keys() == set(components):
            return [lengths[component] for component in components]
    elif isinstance(lengths, Sequence) and len(lengths) == len(components):
        return lengths
    raise ValueError(
        f"lengths= of a mixture of {len(components)} datasets must be a column, a function of a catalog, a "
        "list with one of these or an array for each dataset, in order, or a mapping from all its datasets"
    )


def _source_lengths(
    batching: Batching, dataset: ShardedDataset, asked: Lengths | None, column: str
) -> NDArray[np.integer]:
    """The lengths of a column of the samples of one dataset, those of a view alone."""
    output = _output(column, dataset)
    stored = output.sources[0] if output is not None else column  # `columns=` may rename
    named = asked is not None
    join = next((join for join in dataset.joins_used if column in join.names and not named), None)
    of = dataset if join is None else join.other
    source = of.source()

    def read(block: Block, column: str) -> Column:
        return read_columns(source, block, [column])[column]

    with closing(source.reader), ThreadPoolExecutor(_THREADS, thread_name_prefix="dataflow-lengths") as pool:
        lengths = resolve_lengths(asked, of.catalog, stored, read, map=pool.map)
    if join is not None or not dataset.selection.is_whole:
        # `lengths` are of all samples; a plan wants those of the view.
        numbers, row = dataset.selection.locate(np.arange(len(dataset)))
        samples = dataset.catalog.blocks.first_sample[numbers] + row
        lengths = lengths[samples if join is None else join.matches.of(samples)]
    if column != batching.column:
        lengths = np.where(lengths < 0, 0, lengths)  # a missing one costs nothing
        most = batching.most_costs.get(column, lengths.max(initial=0))
        if len(over := np.flatnonzero(lengths > most)[:1]):
            reason = cost_reason(batching, column, int(lengths[over[0]]))
            raise error_of_sample(dataset, over, reason, stage="plan")
        return lengths
    lengths = _with_missing(lengths, output, stored, dataset)
    _check_fit(lengths, batching, stored, dataset)
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
    cure = output.cure if output is not None else "pass lengths= as an array"
    reason = f"column {stored!r}: {LACKING}, so it has no length; {cure}"
    raise error_of_sample(dataset, np.flatnonzero(lengths < 0)[:1], reason, stage="plan")


def _check_fit(lengths: NDArray[np.integer], batching: Batching, name: str, dataset: ShardedDataset) -> None:
    """Raise `SampleError` for the first sample that fits no row or batch, where that is an error."""
    most = batching.longest
    if most is None or not (lengths > most).any():
        return
    sample = np.flatnonzero(lengths > most)[:1]
    if batching.refused_beyond is None:
        outputs = (output for output in dataset.outputs if output.name in batching.whole)
        arrays = [output.name for output in outputs if len(getattr(output, "shape", ())) > 1]
        if arrays and dataset.transform is None:
            reason = f"column {name!r} has {lengths[sample[0]]:,} elements; {not_cut(batching, arrays[0])}"
            raise error_of_sample(dataset, sample, reason, stage="plan")
        return
    reason = (
        f"column {name!r} has {lengths[sample[0]]:,} elements, more than the {most:,} that "
        f"{type(batching).__name__} takes, as have {np.count_nonzero(lengths > most):,} samples in all; cut "
        "them by overlong=, or leave them out (dataset.filter, dataset.subset)"
    )
    raise error_of_sample(dataset, sample, reason, stage="plan")


def optional(batching: Batching) -> dict[str, NDArray[Any]]:
    """The values of samples that lack a column which `whole=` names as `Optional`.

    Raises `ValueError` for what `whole=` does not take.
    """
    entries = batching.whole.items() if isinstance(batching.whole, Mapping) else ()
    for name, rule in entries:
        plain = isinstance(rule, Optional) and rule.rule == "auto" and not rule.mask
        plain = plain and (rule.default is None or np.ndim(rule.default) > 0)
        if not plain and not (isinstance(rule, str) and rule == "auto"):
            raise ValueError(
                f'whole={{{name!r}: ...}} takes Optional(), Optional(default=an array [n, ...]), or "auto" '
                f"of a column that every sample has, got {rule!r}"
            )
    empty = np.empty(0, np.int64)
    rules = {name: rule for name, rule in entries if isinstance(rule, Optional)}
    return {name: empty if rule.default is None else np.asarray(rule.default) for name, rule in rules.items()}


def gather_of(batching: Batching) -> GatherSamples:
    """The function that gathers samples which a transform makes."""
    return GatherSamples((*batching.columns, *batching.whole), optional(batching))


def lengths_alone(transform: Any, batching: Batching) -> Callable[..., Any]:
    """Return what tells builders the lengths of a transform's samples, and costs, in its place."""
    if measure_of(transform):
        return LengthsAlone(transform, batching)
    return MadeToMeasure(transform, batching, gather_of(batching))


def error_of_sample(dataset: ShardedDataset, sample: Ints, reason: str, *, stage: str) -> SampleError:
    """An error that names a sample, [1], by what the index tells."""
    number, row = (int(values[0]) for values in dataset.selection.locate(sample))
    block = dataset.catalog.block(number)
    offsets = dataset.source().format.sample_offsets(block, None)
    offset = None if offsets is None else int(offsets[row])
    return SampleError(block.shard.url, reason, offset, str(block.first_in_shard + row), stage)
