"""What `dataflow plan` is asked: the options of the command."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from dataflow.tools.terminal.options import COUNT, POSITIVE, SIZE, Finite, option

_MOST_COUNTS = 256
_MOST_RANKS = 1 << 17
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


class AccumulationCounts(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """Numbers from text such as "1,2,4" or "1..8"."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Text to a list of numbers >= 1."""
        if not isinstance(value, str):
            return value
        ranges: list[range] = []
        try:
            for text in value.split(","):
                first, dots, last = text.partition("..")
                ranges.append(range(int(first), int(last if dots else first) + 1))
        except ValueError:
            self.fail(f"must be like 1..8 or 1,2,4, got {value!r}", param, ctx)
        numbers = sum(each.stop - each.start for each in ranges if each)  # too many for len
        if not numbers or min(each.start for each in ranges if each) < 1:
            self.fail(f"must be numbers >= 1, got {value!r}", param, ctx)
        if numbers > _MOST_COUNTS:
            example = "name some of them, such as 1,10,100"
            self.fail(f"takes {_MOST_COUNTS} numbers at most, got {numbers:,}; {example}", param, ctx)
        return [number for each in ranges for number in each]


class Quantity(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """A number with K, M, B, G or T behind it."""

    name = "number"

    def __init__(self, *, zero: bool) -> None:
        self._zero = zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Text to a finite number >= 0, or > 0."""
        text = str(value).strip()
        unit = _UNITS.get(text[-1:].upper())
        try:
            number = float(text[:-1] if unit else text) * (unit or 1.0)
        except ValueError:
            self.fail(f"must be a number such as 1.3B, got {value!r}", param, ctx)
        if not 0 <= number < math.inf:
            self.fail(f"must be finite and >= 0, got {value!r}", param, ctx)
        if not number and not self._zero:
            self.fail("must be > 0, got 0", param, ctx)
        return number


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """A cluster, a model, and what things cost."""

    nodes: int = option("Machines.", COUNT)
    racks: int = option("They stand in.", COUNT, 1)
    ranks_per_node: int = option("Processes, one a GPU.", COUNT, 8)
    parameters: float = option("Of the model, such as 1.3B.", Quantity(zero=False), metavar="N")
    gradient_bits: int = option("Sent for a parameter.", click.IntRange(1, 64), 32)
    microbatch_ms: float = option("Forward and backward of one microbatch, measured.", POSITIVE)
    microbatch: int = option("Its samples.", COUNT, 1)
    accumulate: Sequence[int] = option(
        "Microbatches a step to choose from, such as 1..8 or 1,2,4.",
        AccumulationCounts(),
        tuple(range(1, 33)),
        metavar="K",
        show_default="1..32",
    )
    max_batch: int | None = option("Most samples of a step, of all ranks.", COUNT, None, metavar="N")
    sample_bytes: int | None = option("Read from the store for one sample.", SIZE, None, metavar="SIZE")
    network_gbit: float = option("Of a node's card.", POSITIVE, 100.0)
    network_us: float = option("Latency of a message.", POSITIVE, 15.0)
    within_gbit: float = option("Between ranks of a node.", POSITIVE, 1600.0)
    within_us: float = option("Latency between them.", POSITIVE, 5.0)
    link: str | None = option(
        "Network latency and bandwidth from dataflow.tools.plan.measure, instead.", None, None, metavar="PATH"
    )
    oversubscription: float = option(
        "Bandwidth of a rack's nodes over that of its uplink.", Finite(min=1), 1.0
    )
    bucket_mb: float = option("DDP's bucket_cap_mb; 1 byte at least.", Finite(min=1e-6), 25.0)
    gated: bool = option("Read no data while gradients travel.", bool, False)
    samples: float = option("Of the whole run, epochs counted.", Quantity(zero=True), 0.0, metavar="N")
    node_hour: float | None = option("Price of a node for an hour.", Finite(min=0), None)
    egress_gb: float | None = option("Price of 10^9 bytes out of the store.", Finite(min=0), None)
    watts: float | None = option("Power of a node under this load.", Finite(min=0), None)

    def __post_init__(self) -> None:
        ranks = self.nodes * self.ranks_per_node
        if ranks > _MOST_RANKS:
            raise click.UsageError(
                f"--nodes times --ranks-per-node may be {_MOST_RANKS:,} at most, got {ranks:,}"
            )
