"""Values put together, and cut into blocks, as more than one format of samples in bytes has them."""

from __future__ import annotations

import numpy as np

from sharding.blocks import Spans
from sharding.byte_lists import ByteLists
from sharding.formats.arrow.columns import joined_lists
from sharding.spans import Ints, gathered


def cuts_within(bounds: Ints, nbytes: int) -> Ints:
    """Cut as `cuts_reaching` does, into runs of at most `nbytes`, or of one piece that has some.

    Pieces without a byte share a run with one that is not: a block without bytes could not be read.
    """
    cuts, last = [0], len(bounds) - 1
    while cuts[-1] < last:
        here = bounds[cuts[-1]]
        beyond = min(int(np.searchsorted(bounds, here, side="right")), last)
        end = max(here + nbytes, bounds[beyond])
        cuts.append(int(np.searchsorted(bounds, end, side="right")) - 1)
    return np.array(cuts, np.int64)


def gathered_lists(counts: Ints, items: Spans) -> ByteLists:
    """Lists of so many items each, [n], as one piece each; the items follow one another, list by list."""
    content = gathered(items.buffer.view(np.uint8), items.starts, items.lengths)
    return joined_lists(counts, items.lengths, content)
