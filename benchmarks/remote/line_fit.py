"""The slope of a straight line through measurements, with its confidence interval."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Slope:
    """By least squares; per unit of the x axis."""

    value: float
    low: float
    """The lower end of the 95 % confidence interval. Above 0: it rises, and not by chance."""
    high: float


def slope(x: ArrayLike, y: ArrayLike) -> Slope:
    """Fit a line to at least 5 points, whose deviations from it are taken for independent.

    Raises:
        ValueError: too few points, or all at the same x.
    """
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(xs) < 5 or len(xs) != len(ys) or np.ptp(xs) == 0:
        raise ValueError(f"a line needs 5 points or more, at different x; got {len(xs)} and {len(ys)}")
    from_mean = xs - xs.mean()
    spread = float(from_mean @ from_mean)
    value = float(from_mean @ ys) / spread
    left = ys - ys.mean() - value * from_mean
    free = len(xs) - 2
    margin = _t_975(free) * float(np.sqrt(left @ left / free / spread))
    return Slope(value, value - margin, value + margin)


def means_of_bins(
    x: ArrayLike, y: ArrayLike, width: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Means over bins of x. Measurements one after the other are alike: means of long bins nearly are not."""
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    bins = np.floor((xs - xs.min()) / width).astype(np.int64)
    counts = np.bincount(bins)
    used = counts > 0
    means = [np.bincount(bins, values)[used] / counts[used] for values in (xs, ys)]
    return means[0], means[1]


def _t_975(free: int) -> float:
    """Student's quantile by its Cornish-Fisher expansion: within 1 % from 3 degrees of freedom on."""
    z = NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * free)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
    )
