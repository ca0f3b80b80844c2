"""A bar that is redrawn where it is told of progress, ten times a second at most: no thread draws it.

A further thread in the training process would keep the fork server from starting, so tqdm's monitor and
rich's refreshing are off. A bar that can no longer be drawn (stderr was closed) is dropped: progress never
ends what it is of.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from sharding.printable import printable_name

REDRAW_S = 0.1
"""Seconds from one drawing to the next: people see no more."""

_SIZE = {"ncols": 80, "nrows": 20}
"""The size of a terminal that says it has none, as in some containers."""

T = TypeVar("T")


class BarDrawing(Protocol):
    """The lines of one bar, as a library draws them."""

    def draw(self, done: int, total: int | None, text: str) -> None:
        """Draw them now."""

    def close(self) -> None:
        """Leave them as they are, or take them away. Idempotent."""


@dataclass(frozen=True, kw_only=True)
class BarStart:
    """The first state of a drawing, and how it looks."""

    title: str
    done: int
    total: int | None
    unit: str
    stays: bool
    """Leave the finished bar on the terminal."""


Draw = Callable[[BarStart], BarDrawing]
"""A function that begins a drawing."""


class ProgressBar:
    """A progress bar on stderr. Used by one thread.

    Args:
        title: what is done, at the left.
        total: steps in all; None: not known.
        done: steps done before.
        unit: the name of a step, as "batch".
        stays: leave the finished bar on the terminal.
        visible: None: where stderr is a terminal, on rank 0.
        after_s: seconds before it is drawn first: what takes less shows none.
        now: seconds on a clock that only goes forward.
        draw: begins a drawing; None: by tqdm where it is installed, else by rich.
    """

    def __init__(
        self,
        title: str,
        *,
        total: int | None = None,
        done: int = 0,
        unit: str = "",
        stays: bool = False,
        visible: bool | None = None,
        after_s: float = 0.0,
        now: Callable[[], float] = time.monotonic,
        draw: Draw | None = None,
    ) -> None:
        self._title, self._total, self._done, self._unit = printable_name(title), total, done, unit
        self._stays, self._now, self._draw = stays, now, draw
        self._drawing: BarDrawing | None = None
        self._text = ""
        self._hidden = not (is_watched() if visible is None else visible)
        self._due = float("inf") if self._hidden else now() + after_s
        if not self._hidden and after_s <= 0:
            self.draw(done)

    def show(self, done: int, total: int | None = None, text: str = "") -> None:
        """Draw that so many steps are done, unless it was drawn just now."""
        self._done, self._total, self._text = done, total or self._total, text
        if self._now() >= self._due:
            self.draw(done, total, text)

    def draw(self, done: int, total: int | None = None, text: str = "") -> None:
        """Draw that so many steps are done, now."""
        if self._hidden:
            return
        self._done, self._total, self._text = done, total or self._total, text
        try:
            if self._drawing is None:
                begin = self._draw or chosen_drawing()
                unit, stays = self._unit, self._stays
                self._drawing = begin(
                    BarStart(title=self._title, done=done, total=self._total, unit=unit, stays=stays)
                )
            self._drawing.draw(done, self._total, printable_name(text))
        except (OSError, ValueError):  # stderr is closed
            self._hidden = True
        self._due = float("inf") if self._hidden else self._now() + REDRAW_S

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """The items, each of which is a step."""
        for number, item in enumerate(items, self._done + 1):
            self.show(number)
            yield item

    def close(self) -> None:
        """Draw the last state, if it stays, and end. Idempotent."""
        drawing, self._hidden, self._due = self._drawing, True, float("inf")
        self._drawing = None
        if drawing is not None:
            with suppress(OSError, ValueError):
                if self._stays:
                    drawing.draw(self._done, self._total, printable_name(self._text))
                drawing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_watched() -> bool:
    """Return whether somebody may look at this process: stderr is a terminal, and it is rank 0."""
    from dataflow.topology_exchange import rank_and_world_size

    with suppress(AttributeError, ValueError):  # there is no stderr, or it is closed
        return sys.stderr.isatty() and rank_and_world_size()[0] == 0
    return False


def chosen_drawing() -> Draw:
    """The library that draws: tqdm where it is installed, else rich."""
    return TqdmDrawing if _tqdm() is not None else RichDrawing


@cache
def _tqdm() -> Any:
    """Return the class of tqdm for a terminal or notebook, without its thread; None: not installed."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return type("tqdm_without_monitor", (tqdm,), {"monitor_interval": 0})


def _has_size() -> bool:
    """Return whether stderr is not a terminal of 0 columns, on which tqdm would draw nothing."""
    with suppress(AttributeError, OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    return True


class TqdmDrawing:
    """A bar of tqdm."""

    def __init__(self, start: BarStart) -> None:
        self._bar = _tqdm()(
            desc=start.title,
            initial=start.done,
            total=start.total,
            unit=start.unit or "it",
            leave=None if start.stays else False,  # None: only the outermost of several stays
            **({} if _has_size() else _SIZE),
            mininterval=0,
            miniters=1,
        )

    def draw(self, done: int, total: int | None, text: str) -> None:
        """See `BarDrawing`."""
        bar = self._bar
        bar.total = total
        bar.set_postfix_str(text, refresh=False)
        if done > bar.n:
            bar.update(done - bar.n)  # draws, and learns the rate
        else:
            bar.refresh()

    def close(self) -> None:
        """See `BarDrawing`."""
        self._bar.close()


class RichDrawing:
    """A bar of rich."""

    def __init__(self, start: BarStart) -> None:
        from rich.console import Console
        from rich.errors import LiveError
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        look = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}", markup=False),
        )
        self._bar = Progress(
            *look,
            console=Console(stderr=True),
            transient=not start.stays,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task(start.title, completed=start.done, total=start.total, text="")
        try:
            self._bar.start()
        except LiveError:  # another one is drawn, by a rich that knows one at a time
            self._bar.disable = True

    def draw(self, done: int, total: int | None, text: str) -> None:
        """See `BarDrawing`."""
        self._bar.update(self._task, completed=done, total=total, text=text, refresh=True)

    def close(self) -> None:
        """See `BarDrawing`."""
        self._bar.stop()
