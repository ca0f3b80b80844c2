"""The work of an engine, as it sees it.

A *window* is some blocks that are staged together, a *chunk* a few consecutive batches that are built from
one or more staged windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from prefetch.pool import Task

T_co = TypeVar("T_co", covariant=True)


class Chunk(Protocol[T_co]):
    """A few consecutive batches, built together."""

    nbytes: int
    """Credits for its output; an upper bound."""
    num_batches: int
    needs: Sequence[Window]
    """Staged windows it reads: the one that listed it, or earlier ones."""
    closes: Sequence[Window]
    """Those of `needs` that no later chunk needs."""

    def begin(self) -> Sequence[Task]:
        """Take slots and give the parts that may run in parallel. On a worker thread."""
        ...

    def finish(self) -> tuple[Sequence[T_co], int]:
        """The batches in order, and how many of `nbytes` stay leased until they die."""
        ...


class Window(Protocol):
    """Blocks that are staged together."""

    nbytes: int
    """Credits from admission to `close`; an upper bound."""
    epoch: int
    """Those of the one after the consumer's are admitted, none of later ones: it may stop there."""

    def reads(self) -> Sequence[Task]:
        """Independent tasks that stage the window; they may raise. On reader threads."""
        ...

    def chunks(self) -> Sequence[Chunk[object]]:
        """Its chunks in stream order; called once, at admission. Cheap."""
        ...

    def hurry(self) -> None:
        """The consumer waits for its reads. Called under the engine's lock, maybe often. Cheap."""
        ...

    def close(self) -> None:
        """Give the staging memory back."""
        ...
