"""Holding remote reads back: who waits, what ends a hold, and that batches come all the same."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import fsspec
import numpy as np
import pytest
from datasets_kit import Make, rows_of
from loader_kit import session_of

from dataflow import DataLoader, ShardedDataset
from dataflow.staging.reading import ReadWindow
from prefetch.control.pause import PauseStats, ReadPause
from prefetch.memory.arena import Arena

TIMEOUT_S = 10


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SignallingCondition(threading.Condition):
    """Tells when somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.release()
        return super().wait(TIMEOUT_S)


def held(ready: Callable[[], int] = lambda: 9, **options: float) -> tuple[ReadPause, SignallingCondition]:
    hold = ReadPause(**options)  # type: ignore[arg-type]
    changed = hold._changed = SignallingCondition()
    hold.watch(ready)
    hold.begin()
    return hold, changed


def one_read(hold: ReadPause) -> None:
    with hold.read():
        pass


@contextmanager
def waiting_read(hold: ReadPause, changed: SignallingCondition) -> Iterator[threading.Thread]:
    """A read that the hold keeps waiting; at the end it must have begun."""
    read = threading.Thread(target=one_read, args=(hold,))
    read.start()
    assert changed.waits.acquire(timeout=TIMEOUT_S)
    yield read
    read.join(TIMEOUT_S)
    assert not read.is_alive()


def test_without_a_hold_reads_begin_at_once() -> None:
    hold = ReadPause()
    one_read(hold)
    assert hold.stats() == PauseStats()


def test_a_read_waits_until_the_release() -> None:
    hold, changed = held()
    with waiting_read(hold, changed):
        hold.end()
    assert hold.stats() == PauseStats(pauses=1, held_reads=1, broken=0)


@pytest.mark.parametrize("end", [ReadPause.raise_priority, ReadPause.end])
def test_a_wait_of_the_training_code_ends_the_hold(end: Callable[[ReadPause], None]) -> None:
    hold, changed = held()
    with waiting_read(hold, changed):
        end(hold)
    one_read(hold)  # also for reads that come later
    hold.begin()
    with waiting_read(hold, changed):  # but not the next one
        hold.end()


def test_few_batches_ready_end_the_hold() -> None:
    ready = [9]
    hold, changed = held(lambda: ready[0], low_water=2)
    with waiting_read(hold, changed):
        ready[0] = 3
        hold.batches_taken()
        ready[0] = 2
        hold.batches_taken()
    assert hold.stats().broken == 1


def test_a_read_is_not_held_where_few_batches_are_ready() -> None:
    hold, _ = held(lambda: 2, low_water=2)
    one_read(hold)
    assert hold.stats() == PauseStats(pauses=1, held_reads=0, broken=1)


def test_few_batches_ready_leave_the_limit() -> None:
    ready = [9]
    hold, changed = held(lambda: ready[0], low_water=2)
    hold.limit(1)
    ready[0] = 2
    hold.batches_taken()
    with ExitStack() as first:
        first.enter_context(hold.read())
        with waiting_read(hold, changed):
            first.close()
    assert hold.stats().broken == 1


def test_a_limit_lets_so_many_reads_run_at_a_time() -> None:
    hold, changed = held()
    hold.end()
    hold.limit(2)
    with hold.read(), ExitStack() as second:
        second.enter_context(hold.read())
        with waiting_read(hold, changed):
            second.close()
    assert hold.stats().held_reads == 1


@pytest.mark.parametrize("end", [ReadPause.raise_priority, lambda hold: hold.limit(None)])
def test_a_limit_is_over_when_training_waits_or_it_is_lifted(end: Callable[[ReadPause], None]) -> None:
    hold, changed = held()
    hold.end()
    hold.limit(1)
    with hold.read():
        with waiting_read(hold, changed):
            end(hold)
        one_read(hold)


def test_a_read_that_fails_makes_room() -> None:
    hold, _ = held()
    hold.end()
    hold.limit(1)
    with pytest.raises(OSError, match="gone"), hold.read():
        raise OSError("gone")
    one_read(hold)


def test_a_hold_that_nobody_releases_ends() -> None:
    clock = Clock()
    hold = ReadPause(most_s=5.0, now=clock)
    hold.watch(lambda: 9)
    hold.begin()
    clock.now_s = 5.0
    one_read(hold)
    assert hold.stats().broken == 1


# ---- what runs ---------------------------------------------------------------------------------------------


def test_listeners_hear_of_holds_and_their_ends_whatever_ends_them() -> None:
    told: list[float | None] = []
    hold = ReadPause(most_s=5.0, now=Clock())
    hold.watch(lambda: 9)
    with hold.follow(told.append):
        for end in (ReadPause.end, ReadPause.raise_priority, ReadPause.begin):
            hold.begin()
            end(hold)
        hold.watch(lambda: 2)
        hold.batches_taken()
        hold.begin()  # few batches are ready: none
        hold.end()
    hold.watch(lambda: 9)
    hold.begin()  # nobody listens any more
    assert told == [5.0, None] * 4


def test_who_begins_to_listen_in_a_hold_hears_of_it_while_it_lasts() -> None:
    told: list[float | None] = []
    clock = Clock()
    hold = ReadPause(most_s=5.0, now=clock)
    hold.watch(lambda: 9)
    hold.begin()
    clock.now_s = 4.0
    with hold.follow(told.append):
        assert told == [1.0]
    clock.now_s = 5.0
    with hold.follow(told.append):
        assert told == [1.0]


def test_time_stands_still_while_something_does_but_not_longer_than_a_hold_may_last() -> None:
    clock = Clock()
    hold = ReadPause(most_s=5.0, now=clock)
    hold.watch(lambda: 9)
    seen = []
    for now_s, act in (
        (1.0, hold.begin),
        (2.0, hold.stand_still),
        (3.0, hold.stand_still),
        (4.0, hold.end),
        (6.0, hold.begin),
        (7.0, hold.stand_still),
        (20.0, hold.stand_still),
    ):
        clock.now_s = now_s
        seen.append(hold.running_s())
        act()
    assert seen == [1.0, 2.0, 2.0, 2.0, 4.0, 5.0, 14.0]
    one_read(hold)  # notices that the hold is over
    assert hold.running_s() == 14.0


def test_time_goes_on_in_a_hold_in_which_nothing_stands_still() -> None:
    clock = Clock()
    hold = ReadPause(now=clock)
    hold.watch(lambda: 9)
    hold.stand_still()  # too early: there is no hold
    hold.begin()
    clock.now_s = 3.0
    assert hold.running_s() == 3.0
    hold.end()
    assert hold.running_s() == 3.0


def test_each_wait_of_the_training_code_ends_the_hold_not_only_the_first_for_a_window(made: Make) -> None:
    hold, _ = held()
    source = replace(made("tar").open().source(1 << 20), pause=hold)
    window = ReadWindow(source, Arena(limit_bytes=1 << 20), np.arange(1), np.arange(1))
    window.raise_priority()
    hold.begin()
    window.raise_priority()
    assert hold.stats().broken == 2


def test_reads_that_run_when_a_hold_begins_count_as_held() -> None:
    hold = ReadPause()
    hold.watch(lambda: 9)
    with hold.read():
        hold.begin()
        hold.end()
    hold.begin()
    assert hold.stats() == PauseStats(pauses=2, held_reads=1)


def test_a_loop_under_a_hold_that_is_never_released_delivers_everything(made: Make) -> None:
    dataset = made("tar")
    memory = fsspec.filesystem("memory")
    for path in dataset.shards:
        memory.pipe_file(f"/hold/{path.name}", path.read_bytes())
    remote = {**dataset.kwargs, "source": "memory://hold/*"}
    with DataLoader(ShardedDataset(**remote), batch_size=2, shuffle=True) as loader:
        assert loader.read_pause is not None
        loader.read_pause.begin()
        assert len([row for batch in loader for row in rows_of(batch)]) == len(dataset.samples)
        assert loader.read_pause.stats().pauses == 1
        gate = session_of(loader).resources.sources.gate
        assert gate is not None
        assert gate._now == loader.read_pause.running_s
        copy = pickle.loads(pickle.dumps(loader))
        assert copy.read_pause is not loader.read_pause


def test_only_loaders_over_remote_shards_have_a_hold(made: Make) -> None:
    assert DataLoader([1, 2, 3]).read_pause is None
    with DataLoader(ShardedDataset(**made("tar").kwargs)) as local:
        assert local.read_pause is None
