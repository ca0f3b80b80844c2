"""The bottleneck of a training loop, and what curing it would bring: a pure function of measured rates.

Each part is measured without the others, in the way of DS-Analyzer (Mohan et al., VLDB 2021) and Plumber
(Kuchnik et al., MLSys 2022): the computation over synthetic data, the storage without decoding, loading from
memory (without the storage), and the whole loader without computation. If all overlap, the slowest decides:
predicted rate = min(computation, storage, decoding). The gain of curing one is what the rest was measured or
predicted to reach without it, over the rate now. Where a perfect loader gains nothing (`data_stall_report`),
computing is the bound; else it is the part of the loader whose cure gains most. Where parts compete for the
same cores, the loader stays below the prediction, and the gains show it.

Loading from memory spares the cores what reading takes of them, which no faster store does. So a store's cure
gains no more than if nothing overlapped: rate / (rate - rate now), of reading alone. Decoding that would gain
nothing even so is not called one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dataflow.telemetry.timing.shares import WORTH

Bound = Literal["storage", "decode", "memory", "compute", "epochs"]

_COMPETING = 0.8
_BUSY_CORES = 0.7
"""Share of the cores. Where fewer are in use, nothing competes for them."""
_REACHED = 1.25
"""A part that alone is faster by more is not what loading was held up by, if it was measured at borders."""


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """The epochs of a loader that was measured without computing."""

    batches: int
    """Number of batches of an epoch, on a rank."""
    ahead: int
    """Batches that the loader makes ahead."""
    border_share: float
    """Share of the time that first batches of epochs took beyond what others take, in [0, 1)."""

    @property
    def are_measured(self) -> bool:
        """Return whether their borders are: too few batches for the read-ahead, or much time lost there."""
        return self.batches <= 2 * self.ahead or self.border_share >= 1 - 1 / WORTH


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Samples a second of all ranks together, each measured alone."""

    measured: float
    """The whole: loading, computing, ranks in step."""
    compute: float
    """The whole with a batch from memory in the loader's place: with a perfect loader."""
    storage: float
    """Reading the blocks and doing nothing with them."""
    decode: float
    """The loader over data in memory, without computing: decoding, collating, transforms."""
    loader: float
    """The whole loader without computing."""
    more_memory: float | None = None
    """The same with four times the memory limit; None: not tried."""
    epochs: Epochs | None = None
    """Begins of epochs while the loader was measured; None: not known."""
    cores_used: float | None = None
    """Share of the cores that the loader kept busy then, in [0, 1]."""

    def __post_init__(self) -> None:
        rates = (self.measured, self.compute, self.storage, self.decode, self.loader, self.more_memory or 1.0)
        if min(rates) <= 0:
            raise ValueError(f"rates must be > 0 samples/s, got {self}")


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """The part that bounds a training, by measured rates."""

    bound: Bound
    """The part that holds the training up."""
    predicted: float
    """Samples a second, if the slowest of computation, storage and decoding alone decided."""
    gains: Mapping[Bound, float]
    """Times faster that training would become if this alone were cured (at least 1)."""
    reason: str
    cores_used: float | None = None
    """Share of the cores that the loader kept busy, in [0, 1]; None: not known."""

    @property
    def gain(self) -> float:
        """The gain of curing the bound."""
        return self.gains[self.bound]


def bottleneck_of(rates: Rates) -> Bottleneck:
    """The bound and what its cure would bring."""
    now = min(rates.loader, rates.compute)
    cured: dict[Bound, float] = {
        "compute": rates.loader,
        "memory": min(rates.more_memory or rates.loader, rates.compute),
        "storage": min(rates.decode, rates.compute, now * _one_by_one(rates.storage, now)),
        "decode": min(rates.storage, rates.compute) if _one_by_one(rates.decode, now) >= WORTH else now,
    }
    gains: dict[Bound, float] = {name: max(1.0, rate / now) for name, rate in cured.items()}
    # Equal gains go to the first: a limit is raised more easily than a store or a decoder made faster.
    parts: tuple[Bound, ...] = ("memory", "storage", "decode")
    bound = max(parts, key=lambda name: gains[name])
    if rates.compute < WORTH * rates.measured:  # the headspace: nothing is to be gained by a faster loader
        bound = "compute"
    elif gains[bound] < WORTH:  # the slowest, though its cure alone is none
        alone: dict[Bound, float] = {
            "compute": rates.compute,
            "storage": rates.storage,
            "decode": rates.decode,
        }
        bound = min(alone, key=lambda name: alone[name])
    elif _at_borders(bound, rates):
        assert rates.epochs is not None
        bound = "epochs"
        gains[bound] = max(1.0, min(rates.loader / (1 - rates.epochs.border_share), rates.compute) / now)
    return Bottleneck(
        bound=bound,
        predicted=min(rates.compute, rates.storage, rates.decode),
        gains=gains,
        reason=_reason(bound, rates, gains[bound]),
        cores_used=rates.cores_used,
    )


def _at_borders(bound: Bound, rates: Rates) -> bool:
    """Return whether the figures name a part that is much faster alone, with borders of epochs measured."""
    alone: dict[Bound, float] = {"storage": rates.storage, "decode": rates.decode}  # memory's was measured
    measured = rates.epochs is not None and rates.epochs.are_measured
    return measured and alone.get(bound, 0.0) > _REACHED * rates.loader


def _one_by_one(alone: float, now: float) -> float:
    """Times faster without a part of this rate alone, if it came before all the rest instead of beside it."""
    return alone / (alone - now) if alone > now else math.inf


def _reason(bound: Bound, rates: Rates, gain: float) -> str:
    if bound == "compute":
        text = f"computing allows {_rate(rates.compute)}, loading alone reaches {_rate(rates.loader)}"
    elif bound == "memory":
        more = rates.more_memory or rates.loader
        text = f"loading reaches {_rate(rates.loader)}, and with four times the memory limit {_rate(more)}"
    elif bound == "epochs":
        return _epochs_reason(rates)
    else:
        what = "reading alone" if bound == "storage" else "decoding and collating from memory"
        rest = rates.decode if bound == "storage" else rates.storage
        other = "decoding from memory" if bound == "storage" else "reading alone"
        rate = rates.storage if bound == "storage" else rates.decode
        text = f"{what} reaches {_rate(rate)}, {other} {_rate(rest)}, computing allows {_rate(rates.compute)}"
    if gain < WORTH:
        return f"{text}; no single cure gains 5%"
    alone = min(rates.storage, rates.decode)
    if bound in ("storage", "decode") and rates.loader < _COMPETING * alone:
        text += f"; together they reach only {_rate(rates.loader)}"
        if rates.cores_used is None or rates.cores_used >= _BUSY_CORES:
            text += ": they compete for the same cores"
        else:
            text += f", with {rates.cores_used:.0%} of the cores in use: they wait for each other"
    return text


def _epochs_reason(rates: Rates) -> str:
    epochs = rates.epochs
    assert epochs is not None
    text = (
        f"borders of epochs are what was measured: an epoch has {epochs.batches:,} batches a rank, "
        f"{epochs.ahead:,} are made ahead, and first batches took {epochs.border_share:.0%} of the time that "
        f"loading took beyond what others take"
    )
    alone = f"reading alone reaches {_rate(rates.storage)}, decoding from memory {_rate(rates.decode)}"
    return (
        f"{text}; {alone}, both more than the {_rate(rates.loader)} of loading. Measure with more data, or a "
        "smaller --batch-size; a training on so little data has no borders over "
        'Mixture({dataset: 1}, stop="never")'
    )


def _rate(rate: float) -> str:
    return f"{rate:,.0f} samples/s" if rate >= 10 else f"{rate:.3g} samples/s"
