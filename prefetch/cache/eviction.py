"""Choose the blocks to drop for a new one, where it is known when each is needed next.

Belady's rule (1966): drop what is needed latest, and if that is the newcomer, do not keep it. For blocks of
one size no rule, knowing the future, fetches less; for blocks of about one size it is close.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def victims(
    next_use: NDArray[np.float64],
    nbytes: NDArray[np.int64],
    *,
    newcomer: float,
    need: int,
    spare: int = 0,
) -> NDArray[np.int64]:
    """Indices of the blocks to drop, int64 [k].

    Args:
        next_use: [n] when each is needed next; infinity: never, NaN: it must stay.
        nbytes: [n] their sizes.
        newcomer: when the new block is needed after now. What is needed no later stays.
        need: bytes to free at least, or nothing is dropped: the newcomer is not worth it.
        spare: bytes to free if that costs only blocks needed later than the newcomer.
    """
    later = np.flatnonzero(next_use > newcomer)
    order = later[np.argsort(-next_use[later], kind="stable")]
    freed = np.cumsum(nbytes[order])
    if need > 0 and (not len(freed) or freed[-1] < need):
        return order[:0]
    least_bytes = max(need, spare)
    return order[: int(np.searchsorted(freed, least_bytes)) + 1] if least_bytes > 0 else order[:0]
