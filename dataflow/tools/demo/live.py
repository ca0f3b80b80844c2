"""The line that shows a training run: redrawn in place on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

_REDRAW_S = 0.1
_PLAIN_LINES = 4
"""Lines a run prints where nothing can be redrawn."""


class LiveLine:
    """Shows progress on rank 0; does nothing on the others. Redraws at most ten times a second."""

    def __init__(self, title: str, steps: int, *, visible: bool) -> None:
        self._title, self._steps = title, steps
        self._visible = visible
        console = Console(highlight=False)
        # No refresh thread: it would run beside the training that is measured.
        self._live = Live(console=console, auto_refresh=False) if visible and console.is_terminal else None
        self._text = ""
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.update(Text(self._text), refresh=True)
            self._live.stop()

    def show(
        self, step: int, loss: float, samples_per_s: float, sample_bytes: int, waiting_share: float
    ) -> None:
        """Tell about a finished step."""
        if not self._visible:
            return
        mb_per_s = samples_per_s * sample_bytes / 1e6
        self._text = (  # fits 80 columns
            f"  {self._title:<13} {step:>3}/{self._steps} loss {loss:.3f} {samples_per_s:>5,.0f} samples/s "
            f"{mb_per_s:.3f} MB/s waiting {waiting_share:.1%}"
        )
        if self._live is None:
            if step % max(1, self._steps // _PLAIN_LINES) == 0:
                print(self._text, flush=True)
        elif time.perf_counter() - self._shown_at > _REDRAW_S:
            self._shown_at = time.perf_counter()
            self._live.update(Text(self._text), refresh=True)
