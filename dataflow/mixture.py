"""`Mixture`: several datasets delivered as one, in given shares, without any random-number state.

The shares are exact by construction (`sharding.mixture.shares`), each source keeps its own shuffled order and
its own epochs, and one position says where a run stands, whatever the number of ranks. Mixtures nest: one
inside another is spread out into its sources, each with the product of its weights.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from dataflow.dataset import ShardedDataset
from dataflow.outputs.output import Output
from dataflow.shard_order import Sharded
from dataflow.tables import Row, listed_shortly
from dataflow.topology_exchange import check_ranks_agree
from prefetch.core.kernels import kernels
from sharding.blocks import ColumnSpec
from sharding.catalog.widening import common_spec, is_alike
from sharding.lengths.unit_plan import epoch_lengths
from sharding.mixture.interleaving import Counts, Interleaving, MixtureSpec, Stop
from sharding.mixture.shares import (
    ENDLESS,
    Weight,
    exact_numbers,
    integer_shares,
    temperature_weights,
)
from sharding.mixture.token_schedule import TokenEpochs
from sharding.mixture.windows import MixtureWindows, source_seed
from sharding.order.selection import SelectedOrder
from sharding.order.shuffle import Shuffle

Member = Union[ShardedDataset, "Mixture"]
Weights = Mapping[Member, Weight] | Sequence[Weight]
_SOURCES_SHOWN = 12


class Mixture(Sharded):
    """Datasets mixed in fixed shares, for `DataLoader`.

        Mixture({web: 0.7, code: 0.3})                          shares of the samples
        Mixture([web, code])                                    every sample of each once an epoch
        Mixture([web, code], repeats=[1, 2.5])                  web once, code two and a half times an epoch
        Mixture([web, code], temperature=3)                     shares in proportion to size ** (1 / 3)
        Mixture([web, code], schedule={0: [1, 0], 10_000_000: [0.5, 0.5]})   shares from these samples on
        Mixture({web: 0.7, code: 0.3}, shares="tokens")         shares of the tokens, with `batching=`

    Every prefix of the sequence holds of each source its share, to less than one sample; shares whose common
    denominator exceeds 65,536 are rounded to it (`shares` says to what). Each source is shuffled by itself
    (or comes in file order, without `shuffle=`), in source epochs that each hold every sample once. What an
    epoch of the mixture leaves of a source comes first in the next. Thread-safe.

    Args:
        members: datasets or mixtures; a mapping gives each its weight. All deliver the same columns.
        repeats: how often each member comes in an epoch, for each member in order, or as a mapping.
        temperature: weights by size: 1 in proportion to it, larger ones evener, infinity all equal.
        schedule: {samples of all ranks since the training began: weights from there on}; members that a
            mapping leaves out have weight 0. Steps round up to whole runs.
        stop: when an epoch ends: "first", as soon as one source was seen once; "all", as soon as every source
            was, while smaller ones repeat; "never". With `repeats` or without weights, an epoch is all of it.
        run_length: consecutive samples of one source. 1 mixes inside batches; the global batch size (batch
            size times ranks) makes every batch one of a single source. It belongs to the order: keep it when
            the number of ranks changes.
        shares: what weights are shares of: "samples", or "tokens": elements of the column of `batching=`.
            Every prefix then holds of each source its share, to within the longest sample.

    Raises:
        ValueError: weights that do not fit, members without samples, members that deliver unlike columns.
        TypeError: a member that is neither a dataset nor a mixture.

    Examples:
        >>> web, code = ShardedDataset("web/*.jsonl"), ShardedDataset("code/*.jsonl")
        >>> with DataLoader(Mixture({web: 0.75, code: 0.25}), batch_size=4) as loader:
        ...     batch = next(iter(loader))  # three texts of `web` and one of `code`
        >>> sorted(batch["from"])
        ['code', 'web', 'web', 'web']
    """

    def __init__(
        self,
        members: Mapping[Member, Weight] | Sequence[Member],
        *,
        repeats: Weights | None = None,
        temperature: float | None = None,
        schedule: Mapping[int, Weights] | None = None,
        stop: Stop = "first",
        run_length: int = 1,
        shares: Counts = "samples",
    ) -> None:
        weights = members if isinstance(members, Mapping) else None
        self.members = tuple(members)
        _check_members(self.members)
        rules = {"weights": weights, "repeats": repeats, "temperature": temperature, "schedule": schedule}
        named = [name for name, rule in rules.items() if rule is not None]
        if len(named) > 1:
            raise ValueError(f"a mixture has one rule for its shares, got {' and '.join(named)}")
        self.sources = _in_common_types([dataset for member in self.members for dataset in _sources(member)])
        """The datasets, those of nested mixtures in their place, columns in one order and in one type."""
        sizes = [len(component) for component in self.sources]
        if weights is not None:
            schedule = {0: weights}
        elif temperature is not None:
            if shares == "tokens":
                raise ValueError(
                    'temperature= weighs by numbers of samples: give weights with shares="tokens"'
                )
            schedule = {
                0: temperature_weights([sum(map(len, _sources(m))) for m in self.members], temperature)
            }
        if schedule is not None:
            steps = {step: self._of_sources(rule, shares) for step, rule in schedule.items()}
            self.spec = MixtureSpec.weighted(sizes, steps, stop=stop, run_length=run_length, counts=shares)
        elif shares != "samples":
            raise ValueError(f"shares={shares!r} needs weights, for each member or by a schedule")
        elif stop != "first":
            raise ValueError(f"without weights an epoch has a fixed length: leave out stop={stop!r}")
        elif any(isinstance(member, Mixture) for member in self.members):
            raise ValueError("a mixture of mixtures needs weights; repeats are for datasets only")
        else:
            times = [1] * len(sizes) if repeats is None else self._in_order(repeats, "repeats")
            self.spec = MixtureSpec.repeated(sizes, times, run_length=run_length)
        self.outputs = _common_outputs(self.sources)
        self.weights_set: tuple[int, tuple[Fraction, ...]] | None = None
        """The number of calls of `set_weights`, and the weights of the sources since; None: none."""
        self.timeout_s = 600.0
        """Seconds that `set_weights` waits for other ranks; a loader over the mixture sets it."""
        first = self.sources[0]  # in what follows, all sources are alike
        self.on_error, self.error_budget = first.on_error, first.error_budget
        self.batch_transform = first.batch_transform

    @classmethod
    def from_energon(
        cls,
        source: str | os.PathLike[str],
        *,
        split: str = "train",
        training: bool = True,
        stop: Stop = "first",
        run_length: int = 1,
        **settings: Any,
    ) -> Mixture:
        """The datasets of a metadataset of Megatron-Energon, a YAML file of class MetadatasetV2.

        Weights of a `blend` are shares of the samples, as they are there; an epoch of a `blend_epochized` has
        each dataset as often as its `repetitions` say.

        Args:
            source: path or URL of the file.
            split: which of its splits.
            training: False: every sample of each dataset once, whatever its weight, as for validation.
            stop: see `Mixture`; for a `blend` only.
            run_length: see `Mixture`.
            settings: of each `ShardedDataset`, such as `decode=` or `storage_options=`.

        Raises:
            ValueError: what is not supported, by its name; datasets that deliver unlike columns.
            CorruptShardError: files that are damaged, or contradict each other.
        """
        from dataflow.sources.energon.metadatasets import open_members

        members, amounts, is_weighted = open_members(source, split, ShardedDataset, settings)
        if is_weighted and training:
            return cls(members, schedule={0: amounts}, stop=stop, run_length=run_length)
        return cls(members, repeats=amounts if training else None, run_length=run_length)

    def _in_order(self, weights: Weights, what: str = "weights") -> Sequence[Weight]:
        """One weight a member; `what` they are called."""
        if isinstance(weights, Mapping):
            if unknown := [member for member in weights if member not in self.members]:
                raise ValueError(f"{what} name {unknown[0]!r}, which is no member of the mixture")
            return [weights.get(member, 0) for member in self.members]
        if len(weights) != len(self.members):
            raise ValueError(f"a mixture of {len(self.members)} members got {len(weights)} {what}")
        return weights

    def _of_sources(self, weights: Weights, counts: Counts) -> list[Fraction]:
        """One weight a source: a nested mixture's weight goes to its sources in its own shares."""
        exact = exact_numbers(self._in_order(weights))
        pairs = zip(self.members, exact, strict=True)
        return [weight * part for member, weight in pairs for part in _parts(member, counts)]

    # ---- weights that change ------------------------------------------------------------------------

    def set_weights(self, weights: Weights) -> None:
        """Change the shares from the next batch of every loader over this mixture on, also of one that runs.

        Batches by length (`batching=`) of one packing window are planned together and keep their weights: the
        new ones hold from the next packing window on. A collective where torch.distributed is initialised:
        all ranks call it with the same weights, after the same number of batches. What was read ahead is
        dropped and read anew. Weights stay until the next call; a schedule ends here. A state has up to 64
        changes, some 50 bytes each, and an epoch in which there were some may begin anew; older ones are
        merged, and what came before is not known any more.

        Args:
            weights: one for each member, as for the constructor: 0 retires a member, for now or for good.

        Raises:
            ValueError: weights that do not fit, or differ between ranks; a mixture with `repeats`, or none.
            DataflowError: other ranks did not call it within the `timeout` of the newest loader.
        """
        parts, failure = tuple[Fraction, ...](), None
        try:
            parts = self.spec.checked_weights(self._of_sources(weights, self.spec.counts))
        except ValueError as error:
            failure = error  # told once the others know: they wait for this rank
        said = str(failure) if failure else " ".join(map(str, parts))
        check_ranks_agree("set_weights", "weights", said, self.timeout_s)
        if failure is not None:
            raise failure
        self.weights_set = (self.weights_set[0] + 1 if self.weights_set else 1, parts)

    def with_spec(self, spec: MixtureSpec) -> Mixture:
        """The same sources in another order of draws."""
        other = copy.copy(self)
        other.spec = spec
        return other

    # ---- what it is ---------------------------------------------------------------------------------

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """The share of each source, as it is delivered (at the first step of a schedule)."""
        if self.spec.stop is None:
            return self.spec.steps[0][1]
        draws = integer_shares(self.spec.steps[0][1])
        return tuple(Fraction(n, sum(draws)) for n in draws)

    def sample_shares(self, lengths: Sequence[NDArray[np.integer]]) -> tuple[Fraction, ...]:
        """The share of the samples that each source has, given what is delivered of each, by source."""
        if self.spec.counts == "samples":
            return self.shares
        pairs = zip(self.shares, lengths, strict=True)
        parts = [share * len(part) / max(1, int(part.sum(dtype=np.int64))) for share, part in pairs]
        return tuple(part / sum(parts) for part in parts)

    def __len__(self) -> int:
        """Samples of the first epoch. `TypeError` for one that never ends, or whose shares count tokens."""
        if self.spec.counts == "tokens":
            raise TypeError(
                'a mixture with shares="tokens" has a length with the lengths of its samples only'
            )
        length = self.num_samples(0)
        if length == ENDLESS:
            raise TypeError('a mixture with stop="never" has no length')
        return length

    def fingerprint(self) -> str:
        """16 hex digits over sources, shares and rules: what identifies the mixture in a state.

        Sources behind the last one with a share do not count: they may be added while a training goes on.
        """
        marks = [component.fingerprint() for component in self.sources[: self.spec.num_used]]
        return hashlib.blake2b(repr((marks, self.spec.digest)).encode(), digest_size=8).hexdigest()

    def num_samples(self, epoch: int) -> int:
        """Samples of an epoch; under a schedule they differ. 2**62 for one that never ends.

        `ValueError` where shares count tokens: `token_epochs` knows.
        """
        return self.spec.epoch(epoch).num_samples

    def token_epochs(self, lengths: NDArray[np.integer], shuffle: Shuffle, *, seed: int) -> TokenEpochs:
        """The epochs by tokens under an order.

        Args:
            lengths: what is delivered of the samples of all sources, one source after the other.
            shuffle: of all sources.
            seed: of the mixture.
        """
        parts = np.split(lengths, np.cumsum(self.spec.sizes)[:-1])

        def in_order(component: int, epoch: int) -> NDArray[np.integer]:
            return epoch_lengths(self._order(component, epoch, shuffle.resolved(), seed), parts[component])

        lengths_of = lru_cache(2 * len(self.sources))(in_order)
        return TokenEpochs(self.spec, lengths_of, take=kernels().token_draws)

    def _order(self, component: int, epoch: int, shuffle: Shuffle, seed: int) -> SelectedOrder:
        component_seed = source_seed(seed, component)
        return self.sources[component].windows(epoch, shuffle.of_source(component), seed=component_seed)

    def windows(
        self, epoch: int, shuffle: Shuffle, *, seed: int, interleaving: Interleaving | None = None
    ) -> MixtureWindows:
        """The order of one epoch. Every source has windows of its own (`Shuffle.of_source`).

        `interleaving`: the epoch's, where shares count tokens.
        """
        shuffle = shuffle.resolved()
        return MixtureWindows(
            interleaving or self.spec.epoch(epoch),
            seed=seed,
            epoch=epoch,
            shuffle=shuffle,
            sizes=[len(component) for component in self.sources],
            num_blocks=[int(np.count_nonzero(component.selection.num_samples)) for component in self.sources],
            orders=lambda component, source_epoch: self._order(component, source_epoch, shuffle, seed),
        )

    def _shown(self) -> Iterator[Row]:
        for share, component in islice(zip(self.shares, self.sources, strict=True), _SOURCES_SHOWN):
            yield f"{float(share):.3g} of", repr(component)
        yield "sources", f"{len(self.sources):,}"
        yield "set", self._weights_set
        yield "stop", self.spec.stop or "repeats"
        yield "shares of", self.spec.counts

    def _line(self) -> Iterator[str]:
        parts = (
            f"{float(share):.3g} of {len(component):,} samples"
            for share, component in zip(self.shares, self.sources, strict=True)
        )
        counts = ', shares="tokens"' if self.spec.counts == "tokens" else ""
        yield f"{listed_shortly(parts, _SOURCES_SHOWN)}; stop={self.spec.stop or 'repeats'}{counts}"
        yield self._weights_set

    @property
    def _weights_set(self) -> str:
        """The weights that a loader was told last, and from where on it has them, in words; "": none."""
        if not self.spec.changes.steps:
            return ""
        epoch, position, weights = self.spec.changes.steps[-1]
        shares = listed_shortly((f"{float(weight):.3g}" for weight in weights), _SOURCES_SHOWN)
        return f"weights {shares} from sample {position:,} of epoch {epoch} on"


def _check_members(members: Sequence[object]) -> None:
    if not members:
        raise ValueError("a mixture needs a dataset, got none")
    for member in members:
        if not isinstance(member, (ShardedDataset, Mixture)):
            raise TypeError(f"a mixture is made of ShardedDataset and Mixture, got {type(member).__name__}")


def _sources(member: Member) -> tuple[ShardedDataset, ...]:
    return member.sources if isinstance(member, Mixture) else (member,)


def _parts(member: Member, counts: Counts) -> Sequence[Fraction]:
    """Return the factors of a member's weight for each of its sources."""
    if not isinstance(member, Mixture):
        return [Fraction(1)]
    spec = member.spec
    if len(spec.steps) > 1 or spec.stop in ("all", "never") or spec.run_length > 1:
        raise ValueError("a nested mixture gives shares only: set schedule, stop and run_length on the outer")
    if spec.counts != counts:
        raise ValueError(f"a nested mixture has shares of what the outer one has: give it shares={counts!r}")
    return spec.steps[0][1]


def _in_common_types(components: Sequence[ShardedDataset]) -> tuple[ShardedDataset, ...]:
    """The components with their columns in the order of the first, in types that hold the values of all.

    Those that are of other columns or types all the same come as they are: `_common_outputs` says why.
    """
    names = [output.name for output in components[0].outputs]
    if any({output.name for output in component.outputs} != {*names} for component in components):
        return tuple(components)
    delivered = [{output.name: output for output in component.outputs} for component in components]
    types: list[dict[str, ColumnSpec]] = [{} for _ in components]
    for name in names:
        outputs = [by_name[name] for by_name in delivered]
        if all(output == outputs[0] for output in outputs):
            continue
        specs = [dataset.stored_specs(output) for dataset, output in zip(components, outputs, strict=True)]
        common = common_spec([spec for schema in specs for spec in schema.values()]) if all(specs) else None
        if common is None:
            continue
        # Errors of values that it cannot hold name a shard that has it.
        has = [any(is_alike(spec, common) for spec in schema.values()) for schema in specs]
        common = replace(common, note=components[has.index(True) if any(has) else 0].catalog.shard(0).url)
        for column_types, wider in zip(types, specs, strict=True):
            column_types.update(dict.fromkeys(wider, common))
    views = [component.delivering(names, schema) for component, schema in zip(components, types, strict=True)]
    columns: list[Sequence[Output]] = list(zip(*(view.outputs for view in views), strict=True))
    for number, column in enumerate(columns):
        arrays = [output.as_array() for output in column]
        if any(output != column[0] for output in column) and all(array == arrays[0] for array in arrays):
            columns[number] = arrays  # of one dtype and shape, wherever formats leave them
    for number, (view, *outputs) in enumerate(zip(views, *columns, strict=True)):
        if any(output is not other for output, other in zip(outputs, view.outputs, strict=True)):
            views[number] = view._view(view.selection)
            views[number].outputs = tuple(outputs)
    return tuple(views)


def _common_outputs(components: Sequence[ShardedDataset]) -> tuple[Output, ...]:
    """Return the outputs that all components deliver. The stored columns that they come from may differ."""
    first = components[0].outputs
    for number, dataset in enumerate(components[1:], 1):
        names, expected = [o.name for o in dataset.outputs], [o.name for o in first]
        if names != expected:
            cure = "choose and rename them with columns= or select()"
            raise ValueError(f"source {number} delivers {names}, source 0 {expected}: {cure}")
        for output, other in zip(dataset.outputs, first, strict=True):
            if output != other:
                raise ValueError(
                    f"column {output.name!r} is {output.description()} in source {number} and "
                    f"{other.description()} in source 0: give both the same decode="
                )
        if (dataset.on_error, dataset.error_budget) != (components[0].on_error, components[0].error_budget):
            raise ValueError(f"source {number} has another on_error or error_budget than source 0")
        if dataset.batch_transform is not components[0].batch_transform:
            raise ValueError(f"source {number} has another batch_transform than source 0, but shares batches")
    return first
