"""What holds a training loop up, and what curing it would bring: a pure function of measured rates.

Each part is measured without the others, in the way of DS-Analyzer (Mohan et al., VLDB 2021) and Plumber
(Kuchnik et al., MLSys 2022): the computation over synthetic data, the storage without decoding, loading from
memory (without the storage), and the whole loader without computation. If all overlap, the slowest decides:
predicted rate = min(computation, storage, decoding). The gain of curing one is what the rest was measured or
predicted to reach without it, over the rate now; the part whose cure gains most is the bound. Where parts
compete for the same cores, the loader stays below the prediction, and the gains show it.

Loading from memory spares the cores what reading takes of them, which no faster store does. So a store's cure
gains no more than if nothing overlapped: rate / (rate - rate now), of reading alone. Decoding that would gain
nothing even so is not called one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Bound = Literal["storage", "decode", "memory", "compute"]

_WORTH = 1.05
"""A cure that gains less is no cure: runs differ by as much."""
_COMPETING = 0.8


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Samples a second of all ranks together, each measured alone."""

    measured: float
    """The whole: loading, computing, ranks in step."""
    compute: float
    """Computing over a batch that is there already."""
    storage: float
    """Reading the blocks and doing nothing with them."""
    decode: float
    """The loader over data in memory, without computing: decoding, collating, transforms."""
    loader: float
    """The whole loader without computing."""
    more_memory: float | None = None
    """The same with four times the memory limit; None: not tried."""

    def __post_init__(self) -> None:
        rates = (self.measured, self.compute, self.storage, self.decode, self.loader, self.more_memory or 1.0)
        if min(rates) <= 0:
            raise ValueError(f"rates must be > 0 samples/s, got {self}")


@dataclass(frozen=True)
class Bottleneck:
    """What the rates say."""

    bound: Bound
    """What holds the training up."""
    predicted: float
    """Samples a second, if the slowest of computation, storage and decoding alone decided."""
    gains: Mapping[Bound, float]
    """Times faster that training would become if this alone were cured (at least 1)."""
    reason: str

    @property
    def gain(self) -> float:
        """Of curing the bound."""
        return self.gains[self.bound]


def bottleneck_of(rates: Rates) -> Bottleneck:
    """The bound and what its cure would bring."""
    now = min(rates.loader, rates.compute)
    cured: dict[Bound, float] = {
        "compute": rates.loader,
        "memory": min(rates.more_memory or rates.loader, rates.compute),
        "storage": min(rates.decode, rates.compute, now * _one_by_one(rates.storage, now)),
        "decode": min(rates.storage, rates.compute) if _one_by_one(rates.decode, now) >= _WORTH else now,
    }
    gains: dict[Bound, float] = {name: max(1.0, rate / now) for name, rate in cured.items()}
    # Equal gains go to the first: a limit is raised more easily than a store or a decoder made faster.
    bound = max(gains, key=lambda name: gains[name])
    if gains[bound] < _WORTH:
        slowest: dict[Bound, float] = {
            "compute": rates.compute,
            "storage": rates.storage,
            "decode": rates.decode,
        }
        bound = min(slowest, key=lambda name: slowest[name])
    predicted = min(rates.compute, rates.storage, rates.decode)
    return Bottleneck(bound, predicted, gains, _reason(bound, rates, gains[bound]))


def _one_by_one(alone: float, now: float) -> float:
    """Times faster without a part of this rate alone, if it came before all the rest instead of beside it."""
    return alone / (alone - now) if alone > now else math.inf


def _reason(bound: Bound, rates: Rates, gain: float) -> str:
    if bound == "compute":
        text = f"computing allows {_rate(rates.compute)}, loading alone reaches {_rate(rates.loader)}"
    elif bound == "memory":
        more = rates.more_memory or rates.loader
        text = f"loading reaches {_rate(rates.loader)}, and with four times the memory limit {_rate(more)}"
    else:
        what = "reading alone" if bound == "storage" else "decoding and collating from memory"
        rest = rates.decode if bound == "storage" else rates.storage
        other = "decoding from memory" if bound == "storage" else "reading alone"
        own = rates.storage if bound == "storage" else rates.decode
        text = f"{what} reaches {_rate(own)}, {other} {_rate(rest)}, computing allows {_rate(rates.compute)}"
    if gain < _WORTH:
        return f"{text}; no single cure gains 5 %"
    alone = min(rates.storage, rates.decode)
    if bound in ("storage", "decode") and rates.loader < _COMPETING * alone:
        text += f"; together they reach only {_rate(rates.loader)}: they compete for the same cores"
    return text


def _rate(rate: float) -> str:
    return f"{rate:,.0f} samples/s" if rate >= 10 else f"{rate:.3g} samples/s"
