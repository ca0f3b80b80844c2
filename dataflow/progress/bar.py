"""A bar of tqdm that is redrawn where it is told of progress, ten times a second at most: no thread draws it.

A further thread in the training process would keep the fork server from starting, so tqdm's monitor is off. A
bar that can no longer be drawn (stderr was closed) is dropped: progress never ends what it is of.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from tqdm.auto import tqdm

from sharding.printable import printable_name

REDRAW_S = 0.1
"""Seconds from one drawing to the next: people see no more."""

_SIZE = {"ncols": 80, "nrows": 20}
"""The size of a terminal that says it has none, as in some containers."""

_BarWithoutThread: Any = type("BarWithoutThread", (tqdm,), {"monitor_interval": 0})
T = TypeVar("T")


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
        make: tqdm's class, or another with its arguments.
    """

    def __init__(
        self,
        title: str,
        *,
        total: int | None = None,
        done: int = 0,
        unit: str = "it",
        stays: bool = False,
        visible: bool | None = None,
        after_s: float = 0.0,
        make: Callable[..., Any] = _BarWithoutThread,
    ) -> None:
        self._bar: Any = None
        self._done = done
        if is_watched() if visible is None else visible:
            with suppress(OSError, ValueError):  # stderr is closed
                self._bar = make(
                    desc=printable_name(title),
                    total=total,
                    initial=done,
                    unit=unit,
                    leave=None if stays else False,  # None: only the outermost of several stays
                    mininterval=REDRAW_S,
                    miniters=1,
                    delay=after_s,
                    **({} if _has_size() else _SIZE),
                )

    def show(self, done: int, total: int | None = None, text: str = "", *, now: bool = False) -> None:
        """Draw that so many steps are done, unless it was drawn just now and is not to be drawn `now`."""
        bar = self._bar
        if bar is None:
            return
        try:
            bar.total = total or bar.total
            bar.set_postfix_str(printable_name(text), refresh=False)
            drawn = bar.update(done - bar.n)  # which also learns the rate
            if now and not drawn:
                bar.refresh()
        except (OSError, ValueError):  # stderr is closed
            self._bar = None

    def draw(self, done: int, total: int | None = None, text: str = "") -> None:
        """Draw that so many steps are done, now."""
        self.show(done, total, text, now=True)

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """The items, each of which is a step."""
        for number, item in enumerate(items, self._done + 1):
            self.show(number)
            yield item

    def close(self) -> None:
        """Draw the last state, if it stays, and end. Idempotent."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(OSError, ValueError):
                bar.close()

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


def _has_size() -> bool:
    """Return whether stderr is not a terminal of 0 columns, on which tqdm would draw nothing."""
    with suppress(AttributeError, OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    return True
