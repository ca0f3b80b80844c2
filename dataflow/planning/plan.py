"""The plan of any epoch, for one rank: it decides which samples come when."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import partial
from pkgutil import resolve_name
from typing import Any, ClassVar, TypeVar, Unpack

import numpy as np

from dataflow.dataset import ShardedDataset
from dataflow.limits import memory_limit_bytes
from dataflow.mixture import Mixture
from dataflow.planning.length_aware import are_measured, make_planner, packing_window_bytes, tells_lengths
from dataflow.planning.settings import PASSING, StreamSettings
from dataflow.staging.block_source import SOURCE_SHIFT
from sharding.cached_property import cached_property
from sharding.lengths.batching import Batching
from sharding.lengths.unit_plan import UnitPlanner
from sharding.mixture.succession import succeeding
from sharding.mixture.token_schedule import TokenEpochs
from sharding.mixture.weight_steps import MAX_STEPS
from sharding.mixture.windows import MixturePlan, MixtureWindows
from sharding.order.epoch_order import EpochOrder
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle
from sharding.plan.batch_plan import Dealing, Tail
from sharding.plan.difference import (
    SOURCES,
    Difference,
    Facts,
    bounded,
    differing,
    facts_of_catalog,
    short_digest,
)
from sharding.plan.history import PassedRange, StepHistory
from sharding.plan.placement import read_amplification, shard_index_of
from sharding.plan.plan import EpochPlan, PlanState, RankPlan
from sharding.plan.window_size import resolve_windows
from sharding.spans import Ints
from sharding.topology.topology import Topology

_ORDERS_KEPT = 2
MOST_SOURCES = 16
"""Sources that a state tells one by one, for its size."""
PlanT = TypeVar("PlanT", bound=RankPlan)
KindT = TypeVar("KindT", bound="StreamPlan")


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """Everything that decides which samples come when, for one rank."""

    dataset: ShardedDataset | Mixture
    shuffle: Shuffle
    """With `window_blocks` filled in."""
    seed: int
    batch_size: int
    rank: int
    world_size: int
    tail: Tail
    planner: UnitPlanner | None = None
    """The planner of length-aware batches; `batch_size` then counts its units."""
    measures_lengths: ClassVar[bool] = False
    """True if it says which samples are made, and not which batches they are in."""
    asked: Batching | None = None
    """The batching, where transforms are only asked for lengths; None: they make samples."""
    makes_twice: bool = False
    """True if samples that are made to be measured do not fit: they are made again with their row."""
    weights_taken: int = 0
    """Up to which call of `set_weights` it has the mixture's weights."""
    passed: tuple[PassedRange, ...] = ()
    """The items that are passed over, of any epochs."""
    _orders: dict[int, EpochOrder] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The orders of the epochs that were asked for last."""

    def __getstate__(self) -> dict[str, object]:
        """A copy finds its epochs by tokens by itself: tables and the compiled core are not for others."""
        state = {name: value for name, value in self.__dict__.items() if name != "token_epochs"}
        return {**state, "_orders": {}}  # the one here changes while it is copied

    def as_kind(self, kind: type[KindT], **other: Any) -> KindT:
        """The same plan as one of another class, with other values of some fields."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.init}
        return kind(**{**values, **other})

    def on_rank(self, topology: Topology, tail: Tail) -> StreamPlan:
        """The same plan for a rank, and for what becomes of the last, incomplete global batch."""
        # In file order what is gathered by rank must be in order: lanes may number ranks otherwise.
        is_by_rank = self.shuffle.is_file_order or topology.world_size == 1
        rank = topology.data_rank if is_by_rank else shard_index_of(topology)
        return replace(self, rank=rank, world_size=topology.data_world_size, tail=tail)

    @property
    def has_joins(self) -> bool:
        """Return whether samples bring columns of another dataset along."""
        return any(component.joins_used for component in self.dataset.sources)

    @cached_property
    def makes_rows(self) -> bool:
        """Return whether samples are made when the row that they are planned for is built.

        So it is where lengths are known, and samples may be large: columns come whole, as pixels do, or the
        transform has `measure`. Text alone is made by the packing window, many samples together, which takes
        half of the time; so are samples that are cut, which would be made again for each piece.
        """
        planner = self.planner
        if planner is None or not planner.is_measured or planner.lengths is None:
            return False
        if not (planner.batching.whole or self.makes_twice or tells_lengths(self.dataset)):
            return False
        return int(planner.batching.num_segments(planner.lengths).max(initial=0)) <= 1

    @cached_property
    def measures_ahead(self) -> bool:
        """Return whether transforms tell the lengths of a packing window before any sample of it is made."""
        planner = self.planner
        is_open = planner is not None and planner.is_measured and planner.lengths is None
        return is_open and (self.makes_twice or tells_lengths(self.dataset))

    @property
    def samples_per_batch(self) -> int:
        """Samples of a batch; about how many, of length-aware ones."""
        return self.batch_size * (self.planner.samples_per_unit if self.planner else 1)

    @cached_property
    def read_amplification(self) -> float | None:
        """The figure of `LoaderStats.read_amplification`, from the order of one epoch."""
        if self.shuffle.kind == "full":
            return None  # formats of whole blocks read one for each sample, also on one rank
        if self.world_size == 1:
            return 1.0
        if self.planner or not isinstance(self.dataset, ShardedDataset):
            return None
        order = self.dataset.windows(0, self.shuffle, seed=self.seed)
        nbytes = self.dataset.catalog.blocks.length
        return read_amplification(order, self.batch_size, self.world_size, cost=nbytes)

    @cached_property
    def token_epochs(self) -> TokenEpochs | None:
        """The epochs of a mixture whose shares count tokens."""
        dataset, planner = self.dataset, self.planner
        if not isinstance(dataset, Mixture) or dataset.spec.counts != "tokens":
            return None
        if planner is None or planner.lengths is None:
            return None
        lengths = planner.batching.delivered(planner.lengths)
        return dataset.token_epochs(lengths, self.shuffle, seed=self.seed)

    @cached_property
    def sample_shares(self) -> Sequence[Fraction]:
        """The share of the samples that each source has."""
        if not isinstance(self.dataset, Mixture):
            return [Fraction(1)]
        if self.planner is None or self.planner.lengths is None:
            return self.dataset.shares
        lengths = self.planner.batching.delivered(self.planner.lengths)
        return self.dataset.sample_shares(np.split(lengths, np.cumsum(self.dataset.spec.sizes)[:-1]))

    def num_samples(self, epoch: int) -> int:
        """Samples of an epoch, over all ranks. 2**62 for one that never ends."""
        if isinstance(self.dataset, Mixture) and self.token_epochs is not None:
            return self.token_epochs.epoch(epoch).num_samples
        return self.dataset.num_samples(epoch)

    def windows_of(self, epoch: int) -> EpochOrder:
        """The order of an epoch. Both the loop and what reads ahead ask for it, one after the other."""
        if (order := self._orders.get(epoch)) is not None:
            return order
        if isinstance(self.dataset, Mixture) and self.token_epochs is not None:
            turns = self.token_epochs.epoch(epoch)
            return self.dataset.windows(epoch, self.shuffle, seed=self.seed, interleaving=turns)
        windows: EpochOrder = self.dataset.windows(epoch, self.shuffle, seed=self.seed)
        if isinstance(windows, Order):  # which never changes: any thread may use it
            for old in [*self._orders][: 1 - _ORDERS_KEPT]:
                self._orders.pop(old, None)
            self._orders[epoch] = windows
        return windows

    def mark(self, epoch: int, position: int) -> Mapping[str, object] | None:
        """Return what a state at a position of an epoch keeps of batches by length; None: there are none."""
        if self.planner is None:
            return None
        return self.planner.state(self.windows_of(epoch), position)

    def lacks_weights(self, of: ShardedDataset | Mixture) -> bool:
        """Return whether weights were set for the loader's dataset that the plan has not got."""
        return _num_weights_set(of) not in (0, self.weights_taken)

    def with_weights(self, epoch: int, position: int, of: ShardedDataset | Mixture) -> StreamPlan:
        """The plan that has the weights set for the loader's dataset, as soon after a position as can be.

        What is planned together keeps its weights; after the last batch of an epoch, the next one has them.
        """
        mixture, order, planner = self.dataset, self.windows_of(epoch), self.planner
        assert isinstance(of, Mixture)
        assert of.weights_set is not None
        assert isinstance(mixture, Mixture)
        assert isinstance(order, MixtureWindows)
        number, weights = of.weights_set
        change, since = position, None
        if planner is not None:
            start = planner.packing_window_start(order, position)
            change = planner.change_after(order, position)
            since, planner = start.position, planner.changed(start)
        if self.epoch(epoch, position).num_global_batches == 0:
            change = order.num_samples
        spec = mixture.spec.changed(order.interleaving, epoch, weights, position=change, since=since)
        if self.token_epochs:
            spec = replace(spec, begun=(epoch, tuple(order.interleaving.first.tolist())))
        return replace(self, dataset=mixture.with_spec(spec), planner=planner, weights_taken=number)

    # ---- states ---------------------------------------------------------------------------------------

    def state(self, epoch: int, position: int, *, of: ShardedDataset | Mixture, data: Facts) -> PlanState:
        """The state at a position; `of` is the dataset before weights were set, `data` its facts."""
        mixture, weights = self.dataset, None
        if isinstance(mixture, Mixture) and mixture.spec.changes.steps:
            weights = mixture.spec.changes.to_json()
        return PlanState(
            seed=self.seed,
            epoch=epoch,
            position=position,
            num_samples=self.num_samples(epoch),
            shuffle=self.shuffle,
            # The commit, behind "@", is for messages only.
            fingerprint=f"{of.fingerprint()}@{of.commit}" if of.commit else of.fingerprint(),
            batching=self.mark(epoch, position),
            sources=self._given(epoch, position, tells_sources=SOURCES in data),
            weights=weights,
            data=data,
            passed=self.passed or None,
        )

    def _given(self, epoch: int, position: int, *, tells_sources: bool) -> list[int] | None:
        """The numbers that each source gave before an epoch; `tells_sources`: the state tells of sources."""
        if self.token_epochs:
            return list(self.token_epochs.first(epoch))
        mixture = self.dataset
        if not isinstance(mixture, Mixture) or not (mixture.spec.begun or (tells_sources and not position)):
            return None
        return [int(count) for count in mixture.spec.first(epoch)]

    def meant(self, state: PlanState, of: ShardedDataset | Mixture) -> PlanState:
        """The state, or over other samples and batches the next epoch's, where nothing of its own is left."""
        is_other = self.planner or state.fingerprint.partition("@")[0] != of.fingerprint()
        is_at_end = state.batching is None and 0 < state.num_samples <= state.position
        is_over = is_other and is_at_end and not isinstance(of, Mixture)
        return replace(state, epoch=state.epoch + 1, position=0) if is_over else state

    def resumed(
        self, state: PlanState, *, of: ShardedDataset | Mixture, data: Facts, shuffle: Shuffle
    ) -> StreamPlan:
        """The plan that goes on where a state was taken; `of` and `data` as for `state`.

        Between two epochs, at position 0, no position is meant: an epoch over other data, or in other
        batches, begins with the state's seed. `shuffle` is then the loader's own. Raises `ValueError` with
        the one cause where a position means other samples here, or what sources have given is not known.
        """
        is_same = state.fingerprint.partition("@")[0] == of.fingerprint()
        if is_same:
            plan = self._gone_on(state, of)
            if state.batching == (mark := plan.mark(state.epoch, state.position)):
                return plan._checked(state)
            difference = differing(state.batching, mark)
            if difference is None:
                raise ValueError(
                    f"the state is damaged: it is of no packing window of these, {state.batching}"
                )
        else:
            difference = _differing_data(state, of, data)
        if not state.position:
            anew = replace(
                self,
                dataset=_anew(state, of, is_same=is_same),
                seed=state.seed,
                shuffle=state.shuffle if is_same else shuffle,
                planner=self.planner and self.planner.resumed({}, state.epoch),
                weights_taken=_num_weights_set(of),
                passed=(),
            )
            if gone := [passed[3:] for passed in state.passed or () if passed.epoch >= state.epoch]:
                steps = ", ".join(f"{first:,} to {end - 1:,}" for first, end in gone)
                warnings.warn(
                    f"{difference}: steps {steps} are not passed over: positions mean others here",
                    stacklevel=5,
                )
            anew.num_samples(state.epoch)  # raises where there is no such epoch, before anything changes
            return anew
        units = "samples" if state.batching is None else "rows or batches"
        raise ValueError(
            f"{difference}: {state.position:,} {units} of epoch {state.epoch} are other ones here. To go on "
            f"inside the epoch, give {difference.cure}. Else begin anew, without the state: "
            f"seed={state.seed} and loader.set_epoch({state.epoch + 1}) run the next epoch. A state that was "
            "taken between two epochs does so by itself"
        )

    def history(
        self, told: StepHistory | None, state: PlanState, of: ShardedDataset | Mixture
    ) -> StepHistory | None:
        """The history that a state tells, as far as its epochs and positions mean the same samples here."""
        is_same = state.fingerprint.partition("@")[0] == of.fingerprint()
        is_known = is_same and state.batching == self.mark(state.epoch, state.position)
        return told if is_known or told is None else told.forgotten()

    def _gone_on(self, state: PlanState, of: ShardedDataset | Mixture) -> StreamPlan:
        """The plan at a state of the same samples."""
        dataset = of
        if state.weights is not None:
            if not isinstance(of, Mixture):
                raise ValueError("the state has the weights of a mixture, and this is none")
            dataset = of.with_spec(of.spec.resumed(state.weights))
        first = _first_of(state, dataset) if isinstance(dataset, Mixture) else None
        if first and isinstance(dataset, Mixture) and first != dataset.spec.counted(state.epoch):
            dataset = dataset.with_spec(replace(dataset.spec, begun=(state.epoch, first)))
        return replace(
            self,
            dataset=dataset,
            seed=state.seed,
            shuffle=state.shuffle,
            planner=self.planner and self.planner.resumed(state.batching or {}, state.epoch),
            weights_taken=_num_weights_set(of),  # the state's weights hold
            passed=tuple(state.passed or ()),
        )

    def _checked(self, state: PlanState) -> StreamPlan:
        """Itself, whose epoch has the samples that the state tells of."""
        if (there := self.num_samples(state.epoch)) != state.num_samples:
            raise ValueError(f"the state is of {state.num_samples:,} samples, its epoch has {there:,} here")
        if self.planner:  # only a plan knows how many units there are: refuse before anything changes
            self.epoch(state.epoch, state.position)
        return self

    # ---- epochs ---------------------------------------------------------------------------------------

    def epoch(self, epoch: int, start: int = 0) -> RankPlan:
        """The plan of one epoch, from position `start` on."""
        plan: RankPlan
        windows = self.windows_of(epoch)
        dealing: Dealing = {
            "batch_size": self.batch_size, "rank": self.rank, "world_size": self.world_size,
            "tail": self.tail, "start": start,
        }  # fmt: skip
        if self.planner is not None:
            plan = self.planner.plan(windows, **dealing)
        elif isinstance(windows, MixtureWindows):
            plan = MixturePlan(windows, **dealing)
        else:
            assert isinstance(windows, Order)
            plan = EpochPlan(windows, **dealing)
        return self.without_passed(plan) if self.passed else plan

    def dealt(self, order: EpochOrder, **dealing: Unpack[Dealing]) -> RankPlan:
        """The plan of an epoch with this order, as any rank of any world has it."""
        changes: dict[str, Any] = {**dealing}
        start = changes.pop("start", 0)
        other = replace(self, **changes)
        other._orders[order.epoch] = order
        return other.epoch(order.epoch, start)

    def numbers(self, order: EpochOrder, positions: Ints) -> Ints:
        """The numbers of the samples at some positions, as windows have them (`RowNumbers`)."""
        samples, components = order.samples(positions), self.dataset.sources
        ends = np.cumsum([len(component) for component in components])
        source_numbers, numbers = np.searchsorted(ends, samples, side="right"), np.empty_like(samples)
        for which in np.unique(source_numbers).tolist():
            indices, component = np.flatnonzero(source_numbers == which), components[which]
            blocks, rows = component.selection.locate(samples[indices] - (int(ends[which]) - len(component)))
            numbers[indices] = (which << SOURCE_SHIFT) + component.catalog.blocks.first_sample[blocks] + rows
        return numbers

    def without_passed(self, plan: PlanT) -> PlanT:
        """The plan of an epoch without what is passed over of it."""
        ranges = [passed for passed in self.passed if passed.epoch == plan.order.epoch]
        return plan.passing_over(partial(resolve_name(PASSING), ranges=ranges)) if ranges else plan


def first_plan(dataset: ShardedDataset | Mixture, settings: StreamSettings) -> tuple[StreamPlan, str]:
    """The plan that settings ask for, of one rank, and why its windows are as large as they are.

    It never depends on the machine: ranks of unlike machines must agree on the order. Each source of a
    mixture has windows of its own.
    """
    limit = None if settings.memory_limit is None else memory_limit_bytes(settings.memory_limit, 1)
    batching, planner = settings.batching, None
    if batching:
        measured = are_measured(settings, dataset)
        planner = make_planner(batching, dataset, packing_window_bytes(limit), measured=measured)
    tables = [component.kept_blocks for component in dataset.sources]
    shuffle, reason = resolve_windows(settings.order, tables, limit)
    plan = StreamPlan(
        dataset=dataset,
        shuffle=shuffle,
        seed=settings.seed,
        batch_size=settings.batch_size,
        rank=0,
        world_size=1,
        tail="uneven",
        planner=planner,
    )
    return plan, reason


def check_known(plan: RankPlan) -> None:
    """Raise `ValueError` for a plan that has batches of what is not known any more."""
    if plan.start < plan.known_from and plan.num_batches:
        raise ValueError(
            f"epoch {plan.order.epoch} cannot begin anew: weights were set more than {MAX_STEPS} times, and "
            "what came before is not known any more; load a state of before, or make another loader"
        )


def facts_of(dataset: ShardedDataset | Mixture) -> dict[str, Any]:
    """The facts that a state tells of its data, so that another loader names what differs.

    As `sharding.plan.difference` has them: some 200 bytes.
    """
    if not isinstance(dataset, Mixture):
        facts = {"data": "dataset", **facts_of_catalog(dataset.catalog)}
        if not dataset.selection.is_whole:
            facts["view"] = f"{len(dataset):,} ({short_digest(dataset.selection.digest)})"
        if dataset.balance:
            facts["balanced"] = dataset.balance.digest[:8]
        if dataset.joins:
            facts["joins"] = short_digest(" ".join(join.other.fingerprint() for join in dataset.joins))
        return facts
    spec, used = dataset.spec, dataset.spec.num_used
    facts = {"data": "mixture", "num_sources": used}
    if len(dataset.sources) <= MOST_SOURCES:
        facts[SOURCES] = " ".join(sources_of(dataset))
    else:
        facts["digest"] = short_digest(repr(sources_of(dataset)[:used]))
    steps = [f"{step}: {' '.join(map(str, weights[:used]))}" for step, weights in spec.steps]
    facts["weights"] = bounded("; ".join(steps).removeprefix("0: "))
    runs = {"run_length": spec.run_length} if spec.run_length > 1 else {}
    return {**facts, "stop": spec.stop or "repeats", **runs, "shares": spec.counts}


def sources_of(mixture: Mixture) -> list[str]:
    """The samples and a digest of each source."""
    return [f"{len(component)}:{short_digest(component.fingerprint(), 3)}" for component in mixture.sources]


def _num_weights_set(dataset: ShardedDataset | Mixture) -> int:
    """Return how often `set_weights` was called."""
    return dataset.weights_set[0] if isinstance(dataset, Mixture) and dataset.weights_set else 0


def _differing_data(state: PlanState, of: ShardedDataset | Mixture, here: Facts) -> Difference:
    """Return why a state is of other samples."""
    content, _, commit = state.fingerprint.partition("@")
    (samples, _, there), (samples_here, _, ours) = content.partition("~"), of.fingerprint().partition("~")
    if samples == samples_here:
        marks = (
            f"a transform= (or tokenizer's file) of fingerprint {mark or 'none'}" for mark in (there, ours)
        )
        return Difference(next(marks), next(marks), "the transform= that it had")
    if commit and of.commit and commit != of.commit:
        word = "version" if "version" in of.sources[0].catalog.options else "commit"
        return Difference(
            f"{word} {commit}", f"{word} {of.commit}", f"ShardedDataset(..., revision={commit!r})"
        )
    return differing(state.data, here) or Difference(
        "other data", "data of another fingerprint", "the data that it had"
    )


def _first_of(state: PlanState, mixture: Mixture) -> tuple[int, ...] | None:
    """Return what each source gave before a state's epoch, as far as it tells; new ones gave nothing."""
    components, num = state.sources, len(mixture.sources)
    if components is None and mixture.spec.counts != "tokens":
        return None
    if components is None or not mixture.spec.num_used <= len(components) <= num:
        raise ValueError(f"sources must be {num} integers, got {components!r}")
    return (*components, *[0] * (num - len(components)))


def _anew(state: PlanState, of: ShardedDataset | Mixture, *, is_same: bool) -> ShardedDataset | Mixture:
    """The dataset from an epoch on; a mixture behind what the sources of the state have given."""
    if not isinstance(of, Mixture):
        return of
    here = sources_of(of)
    there = here if is_same else ((state.data or {}).get(SOURCES) or "").split()
    counts, weights = state.sources or (), state.weights
    return of.with_spec(
        succeeding(of.spec, state.epoch, given=counts, there=there, here=here, weights=weights)
    )
