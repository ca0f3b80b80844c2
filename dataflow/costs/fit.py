"""Latency and bandwidth from measured times: the model is linear in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataflow.costs.cluster import Link


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
    """The link that makes relative errors smallest (least squares; latency is never negative).

    Raises `ValueError` for fewer than two sizes, or times that do not grow with bytes.
    """
    if len({(point.rounds, point.nbytes) for point in points}) < 2:
        raise ValueError("two different sizes at least are needed to tell latency from bandwidth")
    measured = np.array([point.seconds for point in points])
    if not (measured > 0).all():
        raise ValueError("measured times must be > 0 seconds")
    design = np.array([[point.rounds, point.nbytes] for point in points]) / measured[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(design, np.ones(len(points)), rcond=None)
    if latency < 0:  # the best of those that are possible: no latency
        bytes_ = design[:, 1]
        latency, per_byte = 0.0, bytes_.sum() / (bytes_ @ bytes_)
    if not per_byte > 0:
        raise ValueError("the measured times do not grow with bytes: measure larger sizes")
    link = Link(float(latency), float(1 / per_byte))
    errors = tuple(seconds(link, point) / point.seconds - 1 for point in points)
    return Fitted(link, errors)
