"""Measure what joins ranks of a job: `torchrun ... -m dataflow.tools.estimate.measure --output link.json`.

All ranks reduce tensors of growing sizes; the slowest rank's median counts; latency and bandwidth are fitted
with the ring's rounds and bytes, which is what gloo and, for large tensors, NCCL run: the model is linear in
both.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

from dataflow.tools.estimate.cluster import Link

SIZES = tuple(1 << power for power in range(10, 25, 2))
"""Bytes: 1 KiB to 16 MiB."""
_ITERATIONS = 50
_EXACT = 1e-9
"""An error that counts as none."""


@dataclass(frozen=True)
class Point:
    """One measurement of an all-reduce."""

    rounds: int
    """Messages one after the other."""
    nbytes: float
    """On the fullest link, in all rounds together."""
    seconds: float


@dataclass(frozen=True)
class Fitted:
    """A link, and how well it tells what was measured."""

    link: Link
    errors: tuple[float, ...]
    """Error of each point: predicted over measured, minus 1."""

    @property
    def median_error(self) -> float:
        """Median of the errors' sizes."""
        return float(np.median(np.abs(self.errors)))

    @property
    def worst_error(self) -> float:
        """Largest of the errors' sizes."""
        return float(np.max(np.abs(self.errors)))


def seconds(link: Link, point: Point) -> float:
    """Return what the model says."""
    return point.rounds * link.latency_s + point.nbytes / link.bytes_per_s


def fit(points: Sequence[Point]) -> Fitted:
    """The link whose relative errors have the smallest sum of sizes; latency is never negative.

    Least absolute errors, by reweighted least squares: one stretched time moves the fit little.

    Raises `ValueError` for fewer than two sizes, or times that do not grow with bytes.
    """
    if len({(point.rounds, point.nbytes) for point in points}) < 2:
        raise ValueError("two different sizes at least are needed to tell latency from bandwidth")
    measured = np.array([point.seconds for point in points])
    if not (measured > 0).all():
        raise ValueError("measured times must be > 0 seconds")
    design = np.array([[point.rounds, point.nbytes] for point in points]) / measured[:, None]
    weights = np.ones(len(points))
    for _ in range(_ITERATIONS):
        latency, per_byte = _least_squares(design, weights)
        errors = np.abs(design @ (latency, per_byte) - 1)
        weights = 1 / np.sqrt(np.maximum(errors, _EXACT))
    if not per_byte > 0:
        raise ValueError("the measured times do not grow with bytes: measure larger sizes")
    link = Link(float(latency), float(1 / per_byte))
    off = tuple(seconds(link, point) / point.seconds - 1 for point in points)
    return Fitted(link, off)


def _least_squares(design: NDArray[np.float64], weights: NDArray[np.float64]) -> tuple[float, float]:
    (latency, per_byte), *_ = np.linalg.lstsq(design * weights[:, None], weights, rcond=None)
    if latency >= 0:
        return float(latency), float(per_byte)
    bytes_ = design[:, 1] * weights  # the best of those that are possible: no latency
    return 0.0, float(bytes_ @ weights / (bytes_ @ bytes_))


def time_all_reduce(nbytes: int, *, repeats: int, device: str = "cpu") -> float:
    """Median seconds of an all-reduce, of the slowest rank; the same value on every rank."""
    values = torch.zeros(max(1, nbytes // 4), dtype=torch.float32, device=device)
    seconds_of_rounds = []
    for _ in range(repeats + 1):
        distributed.barrier()
        began = time.perf_counter()
        distributed.all_reduce(values)
        if device != "cpu":
            torch.cuda.synchronize()
        seconds_of_rounds.append(time.perf_counter() - began)
    slowest = torch.tensor(
        seconds_of_rounds[1:], dtype=torch.float64, device=device
    )  # the first one connects
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return float(statistics.median(slowest.tolist()))


def ring_point(ranks: int, nbytes: float, seconds: float) -> Point:
    """An all-reduce as the ring's rounds, and bytes that each rank sends."""
    return Point(2 * (ranks - 1), 2 * (ranks - 1) / ranks * nbytes, seconds)


def measure_link(
    sizes: Sequence[int] = SIZES,
    *,
    repeats: int = 11,
    device: str = "cpu",
    timed: Callable[..., float] = time_all_reduce,
) -> Fitted:
    """Fit a link to all-reduces of the default process group. Called by all ranks together.

    `timed`: seconds of an all-reduce, as `time_all_reduce` tells them.
    """
    ranks = distributed.get_world_size()
    if ranks < 2:
        raise ValueError("at least 2 ranks are needed to measure what joins them")
    return fit([ring_point(ranks, n, timed(n, repeats=repeats, device=device)) for n in sizes])


def save_link(fitted: Fitted, path: str) -> None:
    """Write the link as `dataflow plan --link` reads it."""
    figures = asdict(fitted.link) | {"median_error": fitted.median_error, "worst_error": fitted.worst_error}
    Path(path).write_text(json.dumps(figures, indent=2) + "\n")


def load_link(path: str) -> Link:
    """Return what `save_link` wrote; `ValueError` for another file."""
    text = Path(path).read_text()
    try:
        figures = json.loads(text)
        return Link(float(figures["latency_s"]), float(figures["bytes_per_s"]))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is not a link; `python -m dataflow.tools.estimate.measure --output {path}` under "
            f"torchrun writes one ({error})"
        ) from error


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--output",
    required=True,
    metavar="PATH",
    help="JSON file that the link is written to, for dataflow plan --link.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=11,
    show_default=True,
    help="Number of all-reduces of each size.",
)
def main(output: str, repeats: int) -> None:
    """Measure latency and bandwidth between the ranks of a job, for `dataflow plan --link`.

    Each rank runs all-reduces of 1 KiB to 16 MiB; latency in seconds and bytes a second are fitted to the
    times of the slowest rank. Run it under torchrun, on the machines that the plan is for.

    \b
    Examples:
      torchrun --nnodes 2 --nproc-per-node 1 -m dataflow.tools.estimate.measure --output link.json
    """  # noqa: D301 - click wants the control character
    cuda = torch.cuda.is_available()
    distributed.init_process_group("nccl" if cuda else "gloo")
    try:
        if cuda:
            torch.cuda.set_device(distributed.get_node_local_rank())
        fitted = measure_link(repeats=repeats, device="cuda" if cuda else "cpu")
        if distributed.get_rank() == 0:
            save_link(fitted, output)
            link = fitted.link
            click.echo(
                f"{link.latency_s * 1e6:.1f} us, {link.bytes_per_s * 8e-9:.3g} Gbit/s; the model is off by "
                f"{fitted.median_error:.0%} in the median, {fitted.worst_error:.0%} at most"
            )
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
