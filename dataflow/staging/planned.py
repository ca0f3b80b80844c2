"""Windows that are not read here: whoever builds their chunks, elsewhere, reads their blocks there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dataflow.staging.source import Source
from dataflow.staging.window import StagedWindow, WindowSamples
from prefetch.memory.arena import Arena


class PlannedWindow(StagedWindow):
    """A window of which only the plan is here: which blocks it has, and which rows batches take.

    Its rows are numbered as those of any window over whole blocks, so a window of the same blocks, which
    another machine has read, gives their values.
    """

    def __init__(
        self,
        source: Source,
        arena: Arena,
        numbers: NDArray[np.int64],
        rows: NDArray[np.int64],
        *,
        whole: bool,
    ) -> None:
        super().__init__(source, arena, WindowSamples(source.first_number, source.blocks(numbers)), rows)
        self.numbers = numbers
        """[b] of the blocks, in read order."""
        self.whole = whole
        """True if its blocks are read whole, so that they can be held to their checksums."""
        self.nbytes = rows.nbytes

    def reads(self) -> Sequence[Callable[[], None]]:
        """Return no tasks: a planned window reads nothing."""
        return ()

    def _release(self) -> None:
        return

    def _stored(self, ordinal: int) -> memoryview | None:
        return None
