"""Latency percentiles that are told only where there are enough samples to know them.

The q-th percentile of n values is the ceil(q n)-th smallest (nearest rank: always a value that occurred). It
is told if at least ten values lie beyond it; with fewer, a repetition would give quite another one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

PERCENTILES = ("50", "90", "99", "99.9")
"""Those that are reported, in per cent."""
_BEYOND = 10


def needed(percentile: str) -> int:
    """Values that the percentile needs: "99.9" needs 10,000."""
    return math.ceil(_BEYOND / (1 - Fraction(percentile) / 100))


def percentiles_of(values: NDArray[np.floating[Any]]) -> dict[str, float | None]:
    """Percentile -> value, None where `values` [n] are too few for it."""
    ordered = np.sort(values)
    found: dict[str, float | None] = {}
    for name in PERCENTILES:
        rank = math.ceil(Fraction(name) / 100 * len(ordered))
        found[name] = float(ordered[rank - 1]) if len(ordered) >= needed(name) else None
    return found


def absent_text(found: Mapping[str, float | None], count: int) -> str:
    """Why some percentiles are not told; "" if all are."""
    absent = [name for name, value in found.items() if value is None]
    if not absent:
        return ""
    wants = ", ".join(f"p{name} needs {needed(name):,}" for name in absent)
    return f"{count:,} reads are too few for some percentiles ({wants}); --seconds makes more"
