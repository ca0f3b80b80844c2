"""Build chunks: the interface between an engine and its builders, and builders that are threads.

An engine dispatches a chunk as a `Build` and hears by it of finished batches or of an error; it knows neither
where nor how the chunk is built. `Builders` may be threads, processes or machines: whatever happens to one of
them, each build that was dispatched must come to its `end`, or nobody would ever have its position in the
order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

from prefetch.engine.pool import PriorityPool
from prefetch.engine.stats import StageStats
from prefetch.errors import EngineClosedError
from prefetch.memory.copies import Copies
from prefetch.work import Chunk, PartialChunk, Task

T = TypeVar("T")


class Build(Protocol[T]):
    """A chunk that the engine has dispatched. Thread-safe."""

    chunk: Chunk[T]
    number: int
    """The number of the chunk, in stream order: the smaller, the more urgent."""
    progress: Any
    """The builder's own, None at first; dropped when the build ends."""

    @property
    def is_cancelled(self) -> bool:
        """Return whether nobody wants it any more."""
        ...

    def may_go_on(self) -> bool:
        """Return whether to make the next batches, before each partial chunk or what is charged at once.

        False: the build is suspended and dispatched again when there is room; it must be left alone at once.
        """
        ...

    def add(self, finished: PartialChunk[T]) -> None:
        """Batches are finished, in order. The caller must not keep them."""
        ...

    def end(self, error: BaseException | None = None) -> None:
        """All batches were added, or the rest of them cannot be built. Called once."""
        ...


class Builders(Protocol[T]):
    """Build chunks somewhere, most urgent first. Thread-safe."""

    num_builders: int
    """Chunks that are built at a time."""
    copies: Copies | None = None
    """Makes batches that were delivered before; None: all are made here."""

    def build(self, build: Build[T]) -> None:
        """Build a chunk, or go on with one that was suspended. Called under the engine's lock: no waits."""
        ...

    @property
    def needs_consumer(self) -> bool:
        """Return whether nobody but the consumer does what there is to do, in `work`."""
        return False

    def work(self) -> None:
        """Do a part of it. Without the engine's lock."""
        return

    def contexts(self) -> list[str]:
        """Say what is being built now and where."""
        ...

    def stats(self) -> StageStats:
        """Return the work so far."""
        ...

    @property
    def runs_here(self) -> bool:
        """Return whether the caller is itself at work for these builders: it must not wait for them."""
        ...

    def stop(self) -> None:
        """Begin nothing more; does not wait. Idempotent."""
        ...

    def close(self) -> object:
        """Stop, and wait for what runs. Idempotent."""
        ...


@dataclass(eq=False)
class _Progress(Generic[T]):
    """The progress of threads with one chunk."""

    num_parts_left: int = 0
    error: BaseException | None = None
    batches: Generator[PartialChunk[T]] | None = None
    """The batches that are left to finish; None: the parts of the chunk are not done."""


class ThreadBuilders(PriorityPool, Generic[T]):
    """`Builders` that are threads of this process; the parts of a chunk run on several of them.

    Args:
        num_threads: of them; 0: the consumer builds, when it asks for a batch.
        copies: made elsewhere, for chunks that say so.
        initializer: runs first in each.
        about: what there is to say of a thread that is at work, by its innermost frame.
    """

    def __init__(
        self,
        num_threads: int,
        *,
        copies: Copies | None = None,
        initializer: Task | None = None,
        about: Callable[[FrameType], str] = lambda _: "",
    ) -> None:
        super().__init__(num_threads, "dataflow-build", initializer=initializer, about=about)
        self.num_builders, self.copies = num_threads, copies
        self._ahead = 0
        """Chunks that begin before the parts of one: those made while a part takes, and two more."""
        self._counting = threading.Lock()  # guards the parts left and the error of each build

    @property
    def needs_consumer(self) -> bool:
        """See `Builders`."""
        return not self.num_builders and self.has_tasks

    def work(self) -> None:
        """See `Builders`."""
        self.run_next()

    def stats(self) -> StageStats:
        """See `Builders`."""
        stage = super().stats()
        if self.copies is None:
            return stage
        busy_s, num_jobs = self.copies.queue.count()
        threads = stage.threads + self.copies.queue.num_threads
        return replace(
            stage,
            threads=threads,
            busy_s=stage.busy_s + busy_s,
            tasks=stage.tasks + num_jobs,
            cpu_s=stage.cpu_s + busy_s,  # copies wait for nothing
        )

    def stop(self) -> None:
        """See `Builders`."""
        super().stop()
        if self.copies is not None:
            self.copies.queue.stop()

    def close(self, timeout_s: float | None = None) -> bool:
        """See `Builders`."""
        is_closed = super().close(timeout_s)
        if self.copies is not None:
            self.copies.queue.close()
        return is_closed

    def build(self, build: Build[T]) -> None:
        """See `Builders`."""
        begins = build.progress is None
        task = self._begin if begins else self._go_on
        self.submit(build.number - begins * self._ahead, partial(task, build))

    def _go_on(self, build: Build[T]) -> None:
        self.begin()
        self._finish(build)

    def _begin(self, build: Build[T]) -> None:
        self.begin()
        progress: _Progress[T] = _Progress()
        build.progress = progress
        try:
            parts = build.chunk.begin()
        except BaseException as caught:
            progress.error = caught
            self.account()
            build.end(caught)
            return
        if parts:
            self._share(build, progress, parts)
        else:
            self._finish(build)

    def _share(self, build: Build[T], progress: _Progress[T], parts: Sequence[Task]) -> None:
        """Have parts run by all threads that have nothing more urgent; this one is free, too."""
        progress.num_parts_left = len(parts)
        self.account()
        for part in parts:
            self.submit(build.number, partial(self._run_part, build, progress, part))

    def _run_part(self, build: Build[T], progress: _Progress[T], part: Task) -> None:
        error = None
        self.begin()
        try:
            if build.is_cancelled:
                raise EngineClosedError("the loader was closed while the batch was built")
            if progress.error is None:
                part()
        except BaseException as caught:
            error = caught
        with self._counting:
            progress.error = progress.error or error
            progress.num_parts_left -= 1
            is_last = progress.num_parts_left == 0
        if is_last:
            self._finish(build, may_go_on=progress.batches is not None)
        else:
            self.account()

    def _finish(self, build: Build[T], *, may_go_on: bool = False) -> None:
        """Make the batches that are left, unless the engine suspends the build.

        `may_go_on`: whether it let the next batch be made before.
        """
        progress: _Progress[T] = build.progress
        while progress.error is None:
            if not may_go_on and not build.may_go_on():
                self.account()
                return
            may_go_on = False
            try:
                if progress.batches is None:
                    progress.batches = build.chunk.finish()
                finished = next(progress.batches, None)
            except BaseException as caught:
                progress.error = caught
                break
            if finished is None:
                break
            if finished.parts:
                self._ahead = 2 + self.num_builders // len(finished.parts)
                self._share(build, progress, finished.parts)
                return
            build.add(finished)
            del finished  # the consumer may have it now
        if progress.batches is not None:
            progress.batches.close()  # where a part was dropped it is not at its end
        self.account()
        build.end(progress.error)
