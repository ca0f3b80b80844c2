"""A run to be explained: its plan, and the places of the steps that it has taken."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

from dataflow.dataset import ShardedDataset
from dataflow.mixture import Mixture
from dataflow.planning.length_aware import are_measured, is_by_tokens, kept_lengths
from dataflow.planning.plan import StreamPlan
from dataflow.planning.settings import StreamSettings
from dataflow.state_checksum import checked_fields
from dataflow.stream.loader import StreamLoader
from sharding.lengths.batching import Batching
from sharding.order.epoch_order import EpochOrder
from sharding.plan.difference import TRANSFORMS
from sharding.plan.history import MOST_RANGES, StepHistory, StepPlace
from sharding.topology.topology import Topology

if TYPE_CHECKING:
    from dataflow.loader import DataLoader

Steps = SupportsIndex | Iterable[SupportsIndex]
_NOT_EXPLAINED = (
    "only loaders over a ShardedDataset or a Mixture are explained, since the sampler of others decides "
    "which samples come; this is a "
)
NO_HISTORY = (
    "the state is of a training that began before states told which epochs its steps were in: say where the "
    "step was, by epoch=, position= and global_batch="
)


class ExplainedRun(NamedTuple):
    """A loader's plan, and which steps it has taken."""

    plan: StreamPlan
    dataset: ShardedDataset | Mixture
    """Before weights were set."""
    settings: StreamSettings
    history: StepHistory | None
    """The steps; None: a state of before does not tell."""
    transforms: str = ""
    """The fact of the transforms that the state has which was loaded; "": none was, or it does not tell."""

    def places(self, steps: Steps) -> list[StepPlace]:
        """The places of some steps. `IndexError` for an unknown one, `ValueError` for a state of before."""
        if self.history is None:
            raise ValueError(NO_HISTORY)
        return [self.history.find(step) for step in numbers_of(steps)]

    def order(self, epoch: int) -> EpochOrder:
        """The order of an epoch.

        Raises `ValueError` where it is not a function of what is known here: weights that were merged, a
        mixture that another one went over into, lengths that only the run has measured.
        """
        self.check_lengths()
        plan, mixture = self.plan, self.plan.dataset
        if isinstance(mixture, Mixture) and (begun := mixture.spec.begun) and epoch < begun[0]:
            self._check_begun(*begun)
        return plan.windows_of(epoch)

    def order_at(self, place: StepPlace) -> EpochOrder:
        """The order of a step's epoch. Raises as `order`, and where nobody knows what was passed over."""
        self._check_passed(place)
        return self.order(place.epoch)

    def _check_passed(self, place: StepPlace) -> None:
        """Raise `ValueError` unless ranges that are passed over were so, or were not, when a step was taken.

        They are kept as positions of epochs, and an epoch may run before they are named and again after that.
        """
        passed, history = self.plan.passed, self.history
        if len(passed) >= MOST_RANGES and place.epoch <= passed[0].epoch:
            raise ValueError(
                f"steps of epoch {place.epoch} may have been passed over, as skip_steps said: a state keeps "
                f"the last {MOST_RANGES} ranges, from epoch {passed[0].epoch} on"
            )
        end = place.position + place.global_batch
        pieces = [piece for piece in passed if piece.epoch == place.epoch]
        if not (pieces := [piece for piece in pieces if piece.begin < end and place.position < piece.end]):
            return
        ends = max(piece.end_step for piece in pieces)
        if history is None or place.step < 0 or ends > history.num_steps or _goes_back(history):
            raise ValueError(
                f"whether position {place.position:,} of epoch {place.epoch} was passed over in that step, "
                "as skip_steps said, is not known: some of the steps that were named are still to come, or "
                "the training went back to an epoch that it had run"
            )

    def check_lengths(self) -> None:
        """Raise `ValueError` where lengths decide about batches, and are not known."""
        planner = self.plan.planner
        if planner is None:
            return
        if planner.is_measured and any(component.transform_wants_rng for component in self.dataset.sources):
            raise ValueError(
                "the lengths of samples were measured as transform= made them, with rng: they differ from "
                "epoch to epoch, so only the run itself knew which samples shared a batch"
            )
        if planner.lengths is None:
            raise ValueError(
                "the lengths of samples, which decide about batches, are not known here: they were measured "
                "as transform= made them. Name them, by lengths_key= of batching= or a fingerprint of the "
                "transform, so that they are kept, and have the file of the machine that trained "
                "(`dataflow index CATALOG --lengths` puts it beside the catalog)"
            )

    def _check_begun(self, epoch: int, first: Sequence[int]) -> None:
        """Raise unless sources gave, in the epochs before one, what a state says that they gave."""
        plan, mixture = self.plan, self.plan.dataset
        assert isinstance(mixture, Mixture)
        spec = replace(mixture.spec, begun=None)
        epochs = replace(plan, dataset=mixture.with_spec(spec)).token_epochs
        counts = spec.first(epoch).tolist() if epochs is None else epochs.first(epoch)
        if [*counts] != [*first]:
            raise ValueError(
                f"the mixture went on as this one in an epoch before {epoch}: what earlier epochs held is "
                "told by a state of that time, and the mixture as it was"
            )


def _goes_back(history: StepHistory) -> bool:
    """Return whether a stretch begins before the end of the one before it, as far as they are known."""
    pairs = pairwise(history.stretches)
    return any(later[1:3] <= earlier.at(earlier.end - 1)[1:3] for earlier, later in pairs)


def run_of_loader(loader: DataLoader[Any, Any]) -> ExplainedRun:
    """The run of a loader so far. `TypeError` for one over another dataset."""
    return run_of_stream(stream_of(loader))


def stream_of(loader: DataLoader[Any, Any]) -> StreamLoader:
    """The stream of a loader. `TypeError` for one over another dataset."""
    if loader._stream is None:
        raise TypeError(_NOT_EXPLAINED + type(loader.dataset).__name__)
    return loader._stream


def run_of_stream(stream: StreamLoader) -> ExplainedRun:
    """The run of a loader's stream so far."""
    plan, history = stream.taken
    transforms = str((stream.facts_loaded or {}).get(TRANSFORMS, ""))
    return ExplainedRun(plan, stream.dataset, stream.settings, history, transforms)


def run_of_state(
    state: Mapping[str, Any], dataset: ShardedDataset | Mixture, batching: Batching | None = None
) -> ExplainedRun:
    """The run of a loader's state.

    Raises `ValueError` for a state that is damaged, or of other data or another `batching`.
    """
    if not isinstance(dataset, (ShardedDataset, Mixture)):
        raise TypeError(_NOT_EXPLAINED + type(dataset).__name__)
    fields = checked_fields(state)
    history = StepHistory.from_json(fields.get("history"))
    settings = StreamSettings(batching=batching, topology=Topology(), num_workers=0)
    if fields.get("batching") is None and batching is not None:
        raise ValueError("the state is of a loader without batching=: leave it out")
    if fields.get("batching") is not None and batching is None:
        raise ValueError("the state is of a loader with batching=: give the same, batching=Packed(...)")
    if batching is not None and are_measured(settings, dataset) and is_by_tokens(dataset):
        lengths = kept_lengths(settings, dataset)
        if lengths is None or not lengths.is_complete:
            raise ValueError(
                'shares="tokens" needs the lengths of all samples, which were measured where the training '
                "ran: have the lengths file of that machine (`dataflow index CATALOG --lengths`)"
            )
    stream = StreamLoader(dataset, settings)
    try:
        stream.load_state_dict(fields)
        run = run_of_stream(stream)
    finally:
        stream.close()
    if history and run.history and history.stretches and not run.history.stretches:
        raise ValueError(
            f"the state is of other data or another batching=: of fingerprint {fields['fingerprint']}, and "
            f"this dataset's is {dataset.fingerprint()}. Give it the dataset that the training had"
        )
    return run


def numbers_of(steps: Steps) -> list[int]:
    """The numbers of steps, in the order given. `ValueError` for none, or below 0; `TypeError` for others."""
    numbers = [*map(operator.index, steps if isinstance(steps, Iterable) else [steps])]
    if not numbers or min(numbers) < 0:
        raise ValueError(f"steps must be numbers >= 0, counted from the begin of the training, got {steps!r}")
    return numbers
