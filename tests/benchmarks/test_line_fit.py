"""The line that a soak is judged by."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.remote.line_fit import means_of_bins, slope
from benchmarks.remote.soak import MIB, Notes, judged


def test_a_line_without_noise_is_found_exactly() -> None:
    fit = slope(range(10), [3 + 2 * x for x in range(10)])
    assert (fit.value, fit.low, fit.high) == pytest.approx((2, 2, 2))


def test_the_interval_is_students() -> None:
    x, y = [1, 2, 3, 4, 5], [1.1, 1.9, 3.2, 3.8, 5.1]
    fit = slope(x, y)  # by hand: residual sum of squares 0.107, spread 10, t(0.975; 3) = 3.182
    assert fit.value == pytest.approx(0.99)
    assert fit.high - fit.value == pytest.approx(3.182 * np.sqrt(0.107 / 3 / 10), rel=0.01)


def test_the_interval_holds_the_true_slope_in_95_of_100_cases() -> None:
    draw, x = np.random.default_rng(0), np.arange(36)
    fits = [slope(x, 0.5 * x + draw.normal(0, 20, 36)) for _ in range(2000)]
    assert np.mean([fit.low <= 0.5 <= fit.high for fit in fits]) == pytest.approx(0.95, abs=0.015)


def test_a_line_needs_points() -> None:
    for x in ([1, 2, 3, 4], [1, 1, 1, 1, 1]):
        with pytest.raises(ValueError, match="5 points or more"):
            slope(x, x)


def test_bins_give_the_means_of_what_lies_in_them() -> None:
    x, y = means_of_bins([0, 1, 2, 10, 11], [1, 2, 3, 10, 20], 5)
    assert x.tolist() == [1, 10.5]
    assert y.tolist() == [2, 15]


def noted(*, leak_mib_per_hour: float = 0.0, descriptors_per_hour: float = 0.0) -> Notes:
    draw, seconds = np.random.default_rng(1), np.arange(1200.0)
    hours = seconds / 3600
    warming = 100 * (1 - np.exp(-seconds / 20))
    rss = (300 + warming + draw.normal(0, 3, 1200) + leak_mib_per_hour * hours) * MIB
    open_now = 40 + draw.integers(0, 5, 1200) + descriptors_per_hour * hours
    return Notes(seconds.tolist(), rss.astype(int).tolist(), open_now.astype(int).tolist(), [50] * 1200)


def test_what_only_warms_up_does_not_grow() -> None:
    found = judged(noted())
    assert not found["rss"]["grows"]
    assert not found["descriptors"]["grows"]
    assert found["bins"] == 36


def test_a_leak_is_seen() -> None:
    found = judged(noted(leak_mib_per_hour=15, descriptors_per_hour=20))
    assert found["rss"]["grows"]
    assert found["rss"]["low_95"] < 15 < found["rss"]["high_95"]
    assert found["descriptors"]["grows"]
