"""The options of `dataflow plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import click

from dataflow.tools.terminal.options import COUNT, POSITIVE, SIZE, Finite, Parsed, option

_MOST_COUNTS = 256
_MOST_RANKS = 1 << 17
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def _counts(text: str) -> list[int]:
    """Numbers >= 1, from text such as "1,2,4" or "1..8"."""
    ranges: list[range] = []
    try:
        for part in text.split(","):
            first, dots, last = part.partition("..")
            ranges.append(range(int(first), int(last if dots else first) + 1))
    except ValueError:
        raise ValueError(f"must be like 1..8 or 1,2,4, got {text!r}") from None
    numbers = sum(each.stop - each.start for each in ranges if each)  # too many for len
    if not numbers or min(each.start for each in ranges if each) < 1:
        raise ValueError(f"must be numbers >= 1, got {text!r}")
    if numbers > _MOST_COUNTS:
        example = "name some of them, such as 1,10,100"
        raise ValueError(f"takes {_MOST_COUNTS} numbers at most, got {numbers:,}; {example}")
    return [number for each in ranges for number in each]


def _quantity(text: str) -> float:
    """A finite number >= 0, with or without K, M, B, G or T behind it."""
    unit = _UNITS.get(text.strip()[-1:].upper())
    try:
        number = float(text.strip()[:-1] if unit else text) * (unit or 1.0)
    except ValueError:
        raise ValueError(f"must be a number such as 1.3B, got {text!r}") from None
    if not 0 <= number < math.inf:
        raise ValueError(f"must be finite and >= 0, got {text!r}")
    return number


def _more_than_0(text: str) -> float:
    if not (number := _quantity(text)):
        raise ValueError("must be > 0, got 0")
    return number


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """A cluster, a model, and what things cost."""

    nodes: int = option("Number of machines of the cluster.", COUNT)
    racks: int = option("Number of racks the machines stand in.", COUNT, 1)
    ranks_per_node: int = option("Number of training processes on a machine, one a GPU.", COUNT, 8)
    parameters: float = option(
        "Number of parameters of the model, such as 25M or 1.3B.", Parsed("number", _more_than_0), metavar="N"
    )
    gradient_bits: int = option(
        "Number of bits sent for the gradient of a parameter.", click.IntRange(1, 64), 32
    )
    microbatch_ms: float = option(
        "Milliseconds that forward and backward of one microbatch take, measured on one rank.", POSITIVE
    )
    microbatch: int = option("Number of samples in a microbatch.", COUNT, 1)
    accumulate: Sequence[int] = option(
        "Numbers of microbatches a step to choose from, such as 1..8 or 1,2,4.",
        Parsed("counts", _counts),
        tuple(range(1, 33)),
        metavar="K",
        show_default="1..32",
    )
    max_batch: int | None = option(
        "Largest number of samples a step may have, over all ranks.",
        COUNT,
        None,
        metavar="N",
        show_default="no limit",
    )
    sample_bytes: int | None = option(
        "Bytes read from the store for one sample.",
        SIZE,
        None,
        metavar="SIZE",
        show_default="none are read",
    )
    network_gbit: float = option("Bandwidth of a machine's network card, in Gbit/s.", POSITIVE, 100.0)
    network_us: float = option("Latency of a message between machines, in microseconds.", POSITIVE, 15.0)
    within_gbit: float = option("Bandwidth between two ranks of a machine, in Gbit/s.", POSITIVE, 1600.0)
    within_us: float = option("Latency of a message within a machine, in microseconds.", POSITIVE, 5.0)
    link: str | None = option(
        "File of dataflow.tools.estimate.measure to take --network-us and --network-gbit from.",
        None,
        None,
        metavar="PATH",
    )
    oversubscription: float = option(
        "Ratio of the bandwidth of a rack's machines to that of its uplink.", Finite(min=1), 1.0
    )
    bucket_mb: float = option(
        "MiB of gradients sent at once, as DDP's bucket_cap_mb.", Finite(min=1e-6), 25.0
    )
    gated: bool = option("Assume that no data is read while gradients are sent.", bool, False)
    samples: float = option(
        "Number of samples of the whole run, over all epochs, such as 2M; 0 predicts a step only.",
        Parsed("number", _quantity),
        0.0,
        metavar="N",
    )
    node_hour: float | None = option(
        "Price of a machine for an hour, in any currency.", Finite(min=0), None, show_default="not known"
    )
    egress_gb: float | None = option(
        "Price of reading 10^9 bytes from the store, in the same currency.",
        Finite(min=0),
        None,
        show_default="not known",
    )
    watts: float | None = option(
        "Power that a machine draws in training, in watts.", Finite(min=0), None, show_default="not known"
    )

    def __post_init__(self) -> None:
        ranks = self.nodes * self.ranks_per_node
        if ranks > _MOST_RANKS:
            raise click.UsageError(
                f"--nodes times --ranks-per-node may be {_MOST_RANKS:,} at most, got {ranks:,}"
            )
