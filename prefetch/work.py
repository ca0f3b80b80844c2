"""The work of an engine, as it sees it.

A *window* is some blocks that are staged together, a *chunk* a few consecutive batches that are built from
one or more staged windows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)
Task = Callable[[], None]


class Batches(Protocol[T_co]):
    """A number of batches, to be iterated over once, by the consumer; they may be made as it goes."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[T_co]: ...


@dataclass(frozen=True)
class PartialChunk(Generic[T_co]):
    """Some finished batches of a chunk, or what the next ones will take, or wait for."""

    batches: Batches[T_co] = ()
    slot_bytes: int = 0
    """Beyond the chunk's `nbytes`; in use until the batches die. May be told before they are taken."""
    heap_bytes: int = 0
    """Beyond the chunk's `nbytes`, of objects whose death nobody sees."""
    made_bytes: int = field(default=0, kw_only=True)
    """The bytes that making these took beyond the chunk's `nbytes`: so much is reserved for those to come."""
    flush_now: bool = False
    """True if the consumer may have them before the chunk is whole. Never those that make it whole."""
    build_s: float = field(default=0.0, kw_only=True)
    """Seconds that one builder took to make these, or would have; 0: they were there."""
    parts: Sequence[Task] = field(default=(), kw_only=True)
    """Parts of the next batch, to be run by any builders before it is asked for. They do not raise."""


class Chunk(Protocol[T_co]):
    """A few consecutive batches, built together."""

    nbytes: int
    """Credits for its output; an upper bound."""
    num_batches: int
    needs: Sequence[StreamWindow]
    """Staged windows it reads: the one that listed it, or earlier ones."""
    leased_bytes: int
    """The bytes of `nbytes` that stay leased until the batches die; known when `finish` has ended."""
    closes: Sequence[StreamWindow]
    """The windows of `needs` that no later chunk needs."""
    reads_windows: bool
    """True if batches are still to be made of its windows, though they were delivered."""

    def halves(self) -> Sequence[Chunk[T_co]]:
        """Return two chunks of the same batches. Before it was begun; not of a single batch."""
        ...

    def begin(self) -> Sequence[Task]:
        """Take slots and give the parts that may run in parallel. On a builder's thread."""
        ...

    def finish(self) -> Generator[PartialChunk[T_co]]:
        """The batches in order. Between two partial chunks any time may pass, and any builder go on."""
        ...


class StreamWindow(Protocol):
    """Blocks that are staged together."""

    nbytes: int
    """Credits from admission to `close`; an upper bound."""
    epoch: int
    """The epoch. Windows of the one after the consumer's are admitted, none of later ones: it may stop
    there."""

    def reads(self) -> Sequence[Task]:
        """Independent tasks that stage the window; they may raise. On reader threads."""
        ...

    def chunks(self) -> Sequence[Chunk[object]]:
        """Its chunks in stream order; called once, at admission. Cheap."""
        ...

    def raise_priority(self) -> None:
        """The consumer waits for its reads. Called under the engine's lock, maybe often. Cheap."""
        ...

    def largest(self) -> str:
        """Its largest block, in words."""
        ...

    def close(self) -> None:
        """Give the staging memory back."""
        ...


class Wait(Protocol):
    """A wait of the consumer, which is told about and given up in time. Times are seconds on one clock."""

    was_told: bool
    """True if `tell` has said something."""

    @property
    def due_s(self) -> float:
        """The time at which `tell` has something to do."""
        ...

    def tell(self, now_s: float, reason: str, otherwise: str, stats: Callable[[], object]) -> None:
        """Say what is waited for, if that is due. Raises `StallError` after the time-out."""
        ...

    def end(self, waited_s: float) -> None:
        """Say that the wait is over, where `was_told`."""
        ...
