"""The progress bar of the benchmarks: on a terminal, on stderr, gone when they are done."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class Bar:
    """Steps done of so many, and what runs now. A context manager."""

    def __init__(self, title: str) -> None:
        console = Console(stderr=True)
        look = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        # No refresh thread: it would run beside what is measured.
        self._progress = Progress(
            *look, console=console, disable=not console.is_terminal, transient=True, auto_refresh=False
        )
        self._task = self._progress.add_task("")

    def tell(self, done: int, total: int, now: str) -> None:
        """So many are done, and this begins."""
        self._progress.update(self._task, completed=done, total=total, description=now, refresh=True)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
