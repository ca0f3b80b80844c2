"""The plan of any epoch, for one rank: it decides which samples come when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar

import numpy as np

from dataflow.dataset import ShardedDataset
from dataflow.limits import memory_limit_bytes
from dataflow.mixture import Mixture
from dataflow.planning.length_aware import are_measured, make_planner, megabatch_bytes
from dataflow.planning.settings import StreamSettings
from sharding.cached_property import cached_property
from sharding.lengths.unit_plan import UnitPlanner
from sharding.mixture.token_schedule import TokenEpochs
from sharding.mixture.weight_steps import MAX_STEPS
from sharding.mixture.windows import MixturePlan, MixtureWindows
from sharding.order.epoch_order import EpochOrder
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle
from sharding.plan.batch_plan import Dealing, Tail
from sharding.plan.placement import read_amplification, shard_index_of
from sharding.plan.plan import EpochPlan, PlanState, RankPlan
from sharding.plan.window_size import resolve_windows
from sharding.topology.topology import Topology

_ORDERS_KEPT = 2


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
    mixture_starts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """{epoch: samples that each source of a mixture by tokens gave before it}, as far as a state tells."""
    weights_taken: int = 0
    """Up to which call of `set_weights` it has the mixture's weights."""
    _orders: dict[int, Order] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The orders of the epochs that were asked for last."""

    def __getstate__(self) -> dict[str, object]:
        """A copy finds its epochs by tokens by itself: tables and the compiled core are not for others."""
        state = {name: value for name, value in self.__dict__.items() if name != "token_epochs"}
        return {**state, "_orders": {}}  # the one here changes while it is copied

    def on_rank(self, topology: Topology, tail: Tail) -> StreamPlan:
        """The same plan for a rank, and for what becomes of the last, incomplete global batch."""
        # In file order what is gathered by rank must be in order: lanes may number ranks otherwise.
        rank = topology.data_rank if self.shuffle.is_file_order else shard_index_of(topology)
        return replace(self, rank=rank, world_size=topology.data_world_size, tail=tail)

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
        return dataset.token_epochs(lengths, self.shuffle, seed=self.seed, starts=self.mixture_starts)

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
        if self.token_epochs is not None:
            return self.token_epochs.epoch(epoch).num_samples
        return self.dataset.num_samples(epoch)

    def windows_of(self, epoch: int) -> EpochOrder:
        """The order of an epoch. Both the loop and what reads ahead ask for it, one after the other."""
        kept = self._orders.get(epoch)
        if kept is not None:
            return kept
        if self.token_epochs is not None and isinstance(self.dataset, Mixture):
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
            start, change = planner.megabatch_start(order, position), planner.change_after(order, position)
            since, planner = start.position, planner.changed(start)
        if self.epoch(epoch, position).num_global_batches == 0:
            change = order.num_samples
        spec = mixture.spec.changed(order.interleaving, epoch, weights, position=change, since=since)
        starts = {epoch: order.interleaving.first.tolist()} if self.token_epochs else {}
        return replace(
            self,
            dataset=mixture.with_spec(spec),
            planner=planner,
            mixture_starts=starts,
            weights_taken=number,
        )

    # ---- states ---------------------------------------------------------------------------------------

    def state(self, epoch: int, position: int, *, of: ShardedDataset | Mixture) -> PlanState:
        """The state at a position of the plan; `of` is the dataset before weights were set."""
        tokens, weights = self.token_epochs, None
        if isinstance(self.dataset, Mixture) and self.dataset is not of:
            weights = self.dataset.spec.changes.to_json()
        return PlanState(
            seed=self.seed,
            epoch=epoch,
            position=position,
            num_samples=self.num_samples(epoch),
            shuffle=self.shuffle,
            fingerprint=_mark_of(of),
            batching=self.mark(epoch, position),
            sources=list(tokens.first(epoch)) if tokens else None,
            weights=weights,
        )

    def resumed(self, state: PlanState, *, of: ShardedDataset | Mixture) -> StreamPlan:
        """The plan that goes on where a state was taken; `of` as for `state`.

        Raises `ValueError` where its position means other samples here.
        """
        content, _, commit = state.fingerprint.partition("@")
        if content != (here := of.fingerprint()):
            _check_transform(content, here, of)
            if commit and of.commit and commit != of.commit:
                raise ValueError(
                    f"the state was taken at {_revision(of)} {commit}, whose samples are others than here "
                    f"{of.commit}; open that one: ShardedDataset(..., revision={commit!r})"
                )
            raise ValueError(
                "the state was taken over other shards (their names, sizes or blocks differ), another view "
                "or other shares or transforms of a mixture, where its position means other samples "
                f"({state.num_samples:,} samples, here {self.num_samples(0):,})"
            )
        marked = state.batching or {}
        planner = self.planner and self.planner.resumed(marked, state.epoch)
        dataset = of if state.weights is None else _mixed_again(of, state.weights)
        plan = replace(
            self,
            dataset=dataset,
            seed=state.seed,
            shuffle=state.shuffle,
            planner=planner,
            mixture_starts=self._starts_of(state, of),
            weights_taken=_num_weights_set(of),  # the state's weights hold
        )
        if state.batching != (mark := plan.mark(state.epoch, state.position)):
            raise ValueError(
                "the state was taken with other batching or lengths, where its position means other rows or "
                f"batches: it has {state.batching}, this loader {mark}"
            )
        if (there := plan.num_samples(state.epoch)) != state.num_samples:
            raise ValueError(f"the state is of {state.num_samples:,} samples, its epoch has {there:,} here")
        if planner:  # only a plan knows how many units there are: refuse before anything changes
            plan.epoch(state.epoch, state.position)
        return plan

    def _starts_of(self, state: PlanState, of: ShardedDataset | Mixture) -> Mapping[int, Sequence[int]]:
        """Return what a state of a mixture by tokens tells of where its epoch begins."""
        if self.token_epochs is None or not isinstance(of, Mixture):
            return {}
        sources, num = state.sources, len(of.sources)
        if sources is None or not of.spec.num_used <= len(sources) <= num:
            raise ValueError(f"sources must be {num} integers, got {sources!r}")
        return {state.epoch: (*sources, *[0] * (num - len(sources)))}  # new ones come last

    # ---- epochs ---------------------------------------------------------------------------------------

    def epoch(self, epoch: int, start: int = 0) -> RankPlan:
        """The plan of one epoch, from position `start` on."""
        windows = self.windows_of(epoch)
        dealing: Dealing = {
            "batch_size": self.batch_size,
            "rank": self.rank,
            "world_size": self.world_size,
            "tail": self.tail,
            "start": start,
        }
        if self.planner is not None:
            return self.planner.plan(windows, **dealing)
        if isinstance(windows, MixtureWindows):
            return MixturePlan(windows, **dealing)
        assert isinstance(windows, Order)
        return EpochPlan(windows, **dealing)


def first_plan(dataset: ShardedDataset | Mixture, settings: StreamSettings) -> tuple[StreamPlan, str]:
    """The plan that settings ask for, of one rank, and why its windows are as large as they are.

    It never depends on the machine: ranks of unlike machines must agree on the order. Each source of a
    mixture has windows of its own.
    """
    limit = None if settings.memory_limit is None else memory_limit_bytes(settings.memory_limit, 1)
    batching, planner = settings.batching, None
    if batching:
        measured = are_measured(settings, dataset)
        planner = make_planner(batching, dataset, megabatch_bytes(limit), measured=measured)
    tables = [source.kept_blocks for source in dataset.sources]
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


def _num_weights_set(dataset: ShardedDataset | Mixture) -> int:
    """Return how often `set_weights` was called."""
    return dataset.weights_set[0] if isinstance(dataset, Mixture) and dataset.weights_set else 0


def _revision(dataset: ShardedDataset | Mixture) -> str:
    """The word for revisions of a dataset."""
    is_table = "version" in dataset.sources[0].catalog.options
    return "version" if is_table else "commit"


def _mark_of(dataset: ShardedDataset | Mixture) -> str:
    """Return what a state says of its dataset; the commit, behind "@", is for messages only."""
    return f"{dataset.fingerprint()}@{dataset.commit}" if dataset.commit else dataset.fingerprint()


def _check_transform(content: str, here: str, dataset: ShardedDataset | Mixture) -> None:
    """Raise `ValueError` where a state is of the same samples, but of another transform of them."""
    (samples, _, there), (samples_here, _, own) = content.partition("~"), here.partition("~")
    if samples == samples_here:
        raise ValueError(
            "the state was taken with another transform=, or its tokenizer's file has changed: the "
            f"fingerprint was {there or 'none'} and is {own or 'none'}, of "
            f"{dataset.sources[0].transform!r}"
        )


def _mixed_again(dataset: ShardedDataset | Mixture, weights: Mapping[str, object]) -> Mixture:
    """The mixture as a state says that it goes on."""
    if not isinstance(dataset, Mixture):
        raise ValueError("the state has the weights of a mixture, and this is none")
    return dataset.with_spec(dataset.spec.resumed(weights))
