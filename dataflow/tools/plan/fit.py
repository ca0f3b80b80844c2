"""Latency and bandwidth from measured times: the model is linear in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataflow.tools.plan.cluster import Link

_TURNS = 50
_EXACT = 1e-9
"""An error that counts as none."""


@dataclass(frozen=True)
class Point:
    """One measurement."""

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
    """Of each point: predicted over measured, minus 1."""

    @property
    def median_error(self) -> float:
        """Median of the errors' sizes."""
        return float(np.median(np.abs(self.errors)))

    @property
    def worst_error(self) -> float:
        """Largest of the errors' sizes."""
        return float(np.max(np.abs(self.errors)))


def seconds(link: Link, point: Point) -> float:
    """What the model says."""
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
    for _ in range(_TURNS):
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
