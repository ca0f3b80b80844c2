"""The command `dataflow plan`."""

from __future__ import annotations

import math
from typing import Any

import click

from dataflow.tools.terminal.options import POSITIVE, Finite, json_option, plain_errors, size

_MOST_COUNTS = 256
_MOST_RANKS = 1 << 17


def _counts(_ctx: click.Context, _param: click.Parameter, value: str) -> list[int]:
    """Numbers from text such as "1,2,4" or "1..8"."""
    parts: list[range] = []
    try:
        for part in value.split(","):
            first, dots, last = part.partition("..")
            parts.append(range(int(first), int(last if dots else first) + 1))
    except ValueError:
        raise click.BadParameter(f"must be like 1..8 or 1,2,4, got {value!r}") from None
    numbers = sum(part.stop - part.start for part in parts if part)  # too many for len
    if not numbers or min(part.start for part in parts if part) < 1:
        raise click.BadParameter(f"must be numbers >= 1, got {value!r}")
    if numbers > _MOST_COUNTS:
        raise click.BadParameter(
            f"takes {_MOST_COUNTS} numbers at most, got {numbers:,}; name some of them, such as 1,10,100"
        )
    return [number for part in parts for number in part]


def _number(_ctx: click.Context, _param: click.Parameter, value: str) -> float:
    """A number with K, M, B or G behind it."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
    text = value.strip()
    unit = units.get(text[-1:].upper(), 1.0)
    try:
        found = float(text[:-1] if text[-1:].upper() in units else text) * unit
    except ValueError:
        raise click.BadParameter(f"must be a number such as 1.3B, got {value!r}") from None
    if not 0 <= found < math.inf:
        raise click.BadParameter(f"must be finite and >= 0, got {value!r}")
    return found


def _more_than_none(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """As `_number`, but not 0."""
    found = _number(ctx, param, value)
    if not found:
        raise click.BadParameter("must be > 0, got 0")
    return found


@click.command(short_help="Predict a step and a run on a cluster, and what they cost.")
@click.option("--nodes", type=click.IntRange(min=1), required=True, help="Machines.")
@click.option("--racks", type=click.IntRange(min=1), default=1, show_default=True, help="They stand in.")
@click.option(
    "--ranks-per-node", type=click.IntRange(min=1), default=8, show_default=True, help="Processes, one a GPU."
)
@click.option(
    "--parameters", callback=_more_than_none, required=True, metavar="N", help="Of the model, such as 1.3B."
)
@click.option(
    "--gradient-bits", type=click.IntRange(1, 64), default=32, show_default=True, help="Sent for a parameter."
)
@click.option(
    "--microbatch-ms", type=POSITIVE, required=True, help="Forward and backward of one microbatch, measured."
)
@click.option("--microbatch", type=click.IntRange(min=1), default=1, show_default=True, help="Its samples.")
@click.option(
    "--accumulate",
    callback=_counts,
    default="1..32",
    show_default=True,
    metavar="K",
    help="Microbatches a step to choose from, such as 1..8 or 1,2,4.",
)
@click.option(
    "--max-batch", type=click.IntRange(min=1), metavar="N", help="Most samples of a step, of all ranks."
)
@click.option("--sample-bytes", callback=size, metavar="SIZE", help="Read from the store for one sample.")
@click.option("--network-gbit", type=POSITIVE, default=100.0, show_default=True, help="Of a node's card.")
@click.option("--network-us", type=POSITIVE, default=15.0, show_default=True, help="Latency of a message.")
@click.option(
    "--within-gbit", type=POSITIVE, default=1600.0, show_default=True, help="Between ranks of a node."
)
@click.option("--within-us", type=POSITIVE, default=5.0, show_default=True, help="Latency between them.")
@click.option(
    "--link", metavar="PATH", help="Network latency and bandwidth from dataflow.tools.plan.measure, instead."
)
@click.option(
    "--oversubscription",
    type=Finite(min=1),
    default=1.0,
    show_default=True,
    help="Bandwidth of a rack's nodes over that of its uplink.",
)
@click.option(
    "--bucket-mb",
    type=Finite(min=1e-6),
    default=25.0,
    show_default=True,
    help="DDP's bucket_cap_mb; 1 byte at least.",
)
@click.option("--gated", is_flag=True, help="Read no data while gradients travel.")
@click.option(
    "--samples", callback=_number, default="0", metavar="N", help="Of the whole run, epochs counted."
)
@click.option("--node-hour", type=Finite(min=0), help="Price of a node for an hour.")
@click.option("--egress-gb", type=Finite(min=0), help="Price of 10^9 bytes out of the store.")
@click.option("--watts", type=Finite(min=0), help="Power of a node under this load.")
@json_option
@plain_errors
def plan(json_path: str | None, **wish: Any) -> None:
    """Predict step time, the best accumulation, reduction and placement, and what a run costs.

    An alpha-beta model: each message costs a latency and its bytes over the bandwidth of the fullest link on
    its way; data that the ranks read flows into the same network cards. Measure --microbatch-ms on one rank,
    and the network with: torchrun ... -m dataflow.tools.plan.measure --output link.json

    \b
    Examples:
      dataflow plan --nodes 64 --racks 8 --parameters 1.3B --microbatch-ms 180
      dataflow plan --nodes 4 --ranks-per-node 1 --parameters 25M --microbatch-ms 120 \\
          --network-gbit 1 --microbatch 64 --sample-bytes 100KB --gated
      dataflow plan --nodes 16 --parameters 7B --gradient-bits 16 --microbatch-ms 900 \\
          --samples 2M --node-hour 30 --watts 6500
    """  # noqa: D301 - click wants the control character
    from dataflow.tools.plan.plan import Wish, show_plan

    if (ranks := wish["nodes"] * wish["ranks_per_node"]) > _MOST_RANKS:
        raise click.UsageError(
            f"--nodes times --ranks-per-node may be {_MOST_RANKS:,} at most, got {ranks:,}"
        )

    show_plan(Wish(**wish), json_path)
