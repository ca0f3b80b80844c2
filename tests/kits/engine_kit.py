"""An engine over fake windows and chunks, whose gates force every order; and builders that are watched."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prefetch.control.depth import fixed_depth
from prefetch.engine.builders import Build, ThreadBuilders
from prefetch.engine.engine import Engine
from prefetch.engine.ledger import Ledger
from prefetch.engine.stats import EngineOptions
from prefetch.memory.interrupts import Monitor
from prefetch.work import PartialChunk

TIMEOUT_S = 10
Action = Callable[[], None]


def nothing() -> None:
    pass


class Gate:
    """An action that says when it has begun and goes on when it is opened."""

    def __init__(self) -> None:
        self._begun, self._opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self._begun.set()
        assert self._opened.wait(TIMEOUT_S), "nobody opened the gate"

    def open(self) -> None:
        self._opened.set()

    def wait_until_begun(self) -> None:
        assert self._begun.wait(TIMEOUT_S), "nothing came to the gate"


class BoomError(Exception):
    """What a fake stage raises."""


def fail(where: str) -> Action:
    def action() -> None:
        raise BoomError(where)

    return action


class Batch:
    """A batch; a weak reference can watch it."""

    def __init__(self, name: str) -> None:
        self.name = name


class FakeChunk:
    """Batches "a.0", "a.1", ...; `needs` and the ledger's return path are filled in later."""

    def __init__(
        self,
        name: str,
        *,
        nbytes: int = 0,
        num_batches: int = 1,
        leased: int | None = None,
        parts: Sequence[Action] = (),
        on_begin: Action = nothing,
        on_finish: Action = nothing,
        heap: Sequence[int] = (),
        due: Collection[int] = (),
    ) -> None:
        """`heap`: bytes of each batch that show when it is made; batches are then made one by one.

        `due`: those of them that the consumer may have before the chunk is whole.
        """
        self.heap, self.due, self.made = heap, due, 0
        self.name, self.nbytes, self.num_batches = name, nbytes, num_batches
        self.leased = nbytes if leased is None else leased
        self.needs: Sequence[FakeWindow] = ()
        self.closes: Sequence[FakeWindow] = ()
        self.give_back: Callable[[int], None] = lambda _: None
        self._parts, self._on_begin, self._on_finish = parts, on_begin, on_finish
        self.begun = self.finished = self.leased_bytes = 0
        self.reads_windows = False

    def halves(self) -> tuple[FakeChunk, FakeChunk]:
        """Two chunks named after their first batches, which begin as this one would."""
        middle = self.num_batches // 2
        first, last = FakeChunk(f"{self.name}a", num_batches=middle), FakeChunk(f"{self.name}b")
        last.num_batches = self.num_batches - middle
        for half in (first, last):
            half.needs, half.give_back = self.needs, self.give_back
            half._parts, half._on_begin = self._parts, self._on_begin
        last.closes = self.closes
        return first, last

    def begin(self) -> Sequence[Action]:
        self.begun += 1
        assert all(window.is_staged for window in self.needs), "a window is not staged"
        self._on_begin()
        return [*self._parts]

    def finish(self) -> Iterator[PartialChunk[Batch]]:
        self.finished += 1
        self._on_finish()  # which may wake a test that looks at the count
        assert all(window.closed == 0 for window in self.needs), "a window was closed too early"
        batches = [Batch(f"{self.name}.{i}") for i in range(self.num_batches)]
        slot = Batch("the slot that all batches view")
        for batch in batches:
            batch.slot = slot  # type: ignore[attr-defined]
        weakref.finalize(slot, self.give_back, self.leased).atexit = False
        self.leased_bytes = self.leased
        if not self.heap:
            yield PartialChunk(batches)
        for nbytes in self.heap:
            self.made += 1
            yield PartialChunk([batches.pop(0)], heap_bytes=nbytes, flush_now=self.made - 1 in self.due)


READS_AFTER_CLOSE: list[FakeWindow] = []
"""Of the running test. The engine would take an assertion in a read for an error of the dataset."""


class FakeWindow:
    """A window whose reads are the given actions."""

    def __init__(
        self,
        *chunks: FakeChunk,
        nbytes: int = 0,
        reads: Sequence[Action] = (nothing,),
        carried: bool = False,
        also: Sequence[FakeWindow] = (),
        on_admission: Action = nothing,
        on_reads: Action = nothing,
        epoch: int = 0,
    ) -> None:
        """`also`: carried windows that the first chunk needs too."""
        self.nbytes, self.carried, self.epoch = nbytes, carried, epoch
        assert chunks or carried, "nobody would close it"
        self.own_chunks, self.actions = chunks, list(reads)
        self._on_admission, self._on_reads = on_admission, on_reads
        self._lock = threading.Lock()
        self.when_hurried: Action = nothing
        self.admitted = self.closed = self.reads_done = self.hurried = 0
        for i, chunk in enumerate(chunks):
            chunk.needs = (*also, self) if i == 0 else (self,)
            chunk.closes = (
                *(also if i == 0 else ()),
                *((self,) if chunk is chunks[-1] and not carried else ()),
            )

    def largest(self) -> str:
        return f"its largest block has {self.nbytes} bytes"

    @property
    def is_staged(self) -> bool:
        return self.closed == 0 and self.reads_done == len(self.actions)

    def chunks(self) -> Sequence[FakeChunk]:
        self.admitted += 1
        self._on_admission()
        return self.own_chunks

    def reads(self) -> Sequence[Action]:
        self._on_reads()
        return [lambda read=read: self._run(read) for read in self.actions]  # type: ignore[misc]

    def _run(self, read: Action) -> None:
        if self.closed:
            READS_AFTER_CLOSE.append(self)
        read()
        if self.closed:
            READS_AFTER_CLOSE.append(self)
        with self._lock:
            self.reads_done += 1

    def raise_priority(self) -> None:
        self.hurried += 1
        self.when_hurried()

    def close(self) -> None:
        self.closed += 1


def one_chunk_windows(count: int, **settings: Any) -> list[FakeWindow]:
    return [FakeWindow(FakeChunk(str(i)), **settings) for i in range(count)]


class ConsumerMonitor(Monitor):
    """The engine's lock; does something first, under the lock, when the consumer begins to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.before_wait: Action = nothing

    def wait(self, timeout_s: float | None = None) -> bool:
        action, self.before_wait = self.before_wait, nothing
        action()
        return super().wait(timeout_s)


class WatchedBuild:
    """A build whose builder thread tells when it was laid aside, and stands still when it has ended."""

    def __init__(self, build: Build[Batch], when_aside: Action, when_ended: Action) -> None:
        self._build, self._when_aside, self._when_ended = build, when_aside, when_ended
        self.chunk, self.number, self.add = build.chunk, build.number, build.add

    @property
    def progress(self) -> Any:
        return self._build.progress

    @progress.setter
    def progress(self, value: Any) -> None:
        self._build.progress = value

    @property
    def is_cancelled(self) -> bool:
        return self._build.is_cancelled

    def may_go_on(self) -> bool:
        answer = self._build.may_go_on()
        if not answer:
            self._when_aside()
        return answer

    def end(self, error: BaseException | None = None) -> None:
        self._build.end(error)
        self._when_ended()


class WatchedBuilders(ThreadBuilders[Batch]):
    """Threads, with `WatchedBuild`s."""

    def __init__(
        self,
        num_threads: int,
        *,
        when_aside: Action = nothing,
        when_ended: Action = nothing,
        when_closed: Action = nothing,
    ) -> None:
        super().__init__(num_threads)
        self._hooks, self._when_closed = (when_aside, when_ended), when_closed

    def build(self, build: Build[Batch]) -> None:
        super().build(WatchedBuild(build, *self._hooks))

    def close(self, timeout_s: float | None = None) -> bool:
        is_closed = super().close(timeout_s)
        self._when_closed()
        return is_closed


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """No thread of an engine outlives the block, and no read its window."""
    READS_AFTER_CLOSE.clear()
    yield
    assert not READS_AFTER_CLOSE
    left = [t.name for t in threading.enumerate() if t.name.startswith("dataflow-")]
    assert not left


@contextmanager
def running(
    windows: Iterable[FakeWindow],
    *,
    limit: int = 1000,
    depth: Any = 100,
    num_readers: int = 2,
    num_workers: int = 2,
    builders: Any = None,
    **options: Any,
) -> Iterator[Engine[Batch]]:
    """An engine over windows; `engine.ledger` is its ledger, `engine.options` are its options."""
    ledger = Ledger(limit)

    def connected() -> Iterator[FakeWindow]:
        for window in windows:
            for chunk in window.own_chunks:
                chunk.give_back = ledger.give_back
            yield window

    policy = fixed_depth(depth) if isinstance(depth, int) else depth
    settings = {"timeout_s": TIMEOUT_S, **options}
    all_options = EngineOptions(num_readers=num_readers, depth=policy, monitor=ConsumerMonitor(), **settings)
    threads: ThreadBuilders[Batch] = builders or ThreadBuilders(
        num_workers, initializer=all_options.initializer
    )
    engine: Engine[Batch] = Engine(connected(), ledger=ledger, builders=threads, options=all_options)
    engine.ledger, engine.options = ledger, all_options  # type: ignore[attr-defined]
    try:
        yield engine
    finally:
        engine.close()


def ledger_of(engine: Engine[Batch]) -> Ledger:
    ledger = engine.ledger  # type: ignore[attr-defined]
    assert isinstance(ledger, Ledger)
    return ledger


def options_of(engine: Engine[Batch]) -> EngineOptions:
    options = engine.options  # type: ignore[attr-defined]
    assert isinstance(options, EngineOptions)
    return options


def names(batches: Sequence[Batch]) -> list[str]:
    return [batch.name for batch in batches]


def next_names(engine: Engine[Batch]) -> list[str]:
    return names(engine.next_batches())


def outcomes(engine: Engine[Batch]) -> list[str]:
    """Names of all batches and texts of all errors, in the order the consumer sees them."""
    seen: list[str] = []
    while True:
        try:
            batches = engine.next_batches()
        except BoomError as error:
            seen.append(f"error {error}")
            continue
        if not batches:
            return seen
        seen += names(batches)


def when_the_consumer_waits(engine: Engine[Batch], action: Action) -> None:
    """Run `action` once the consumer found nothing to take; until it really waits it holds the lock."""
    options_of(engine).monitor.before_wait = action  # type: ignore[attr-defined]


def assert_nothing_held(engine: Engine[Batch]) -> None:
    held = ledger_of(engine).snapshot()
    assert (held.window_bytes, held.building_bytes, held.ready_bytes, held.in_use_bytes) == (0, 0, 0, 0)


def after(first: Action, then: Action) -> Action:
    def both() -> None:
        first()
        then()

    return both
