"""Several loops over one loader at a time: which epochs they have, what they share, and what they leave."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets_kit import MAKERS, Made, Row, by_plan, delivered, make_ints_tar, make_parquet, rows_of
from loader_kit import session_of, stream_of
from threads_kit import our_threads, threads_left

from dataflow import DataLoader, GradSchedule, Mixture, Shuffle
from prefetch.engine.ledger import State
from prefetch.errors import MemoryLimitError

WAIT_S = 10
WINDOW = Shuffle("window", 2)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    if our_threads():
        gc.collect()  # what holds their loop may be garbage; looking for it takes longer than most tests
    assert threads_left() == []


def epochs(loader: DataLoader, made: Made, count: int) -> list[list[list[Row]]]:
    return [by_plan(loader, made.samples, epoch) for epoch in range(count)]


# ---- which epochs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tar", "parquet", "tokens.bin", "jsonl.gz"])
def test_a_loader_zipped_with_itself_gives_two_epochs_side_by_side(tmp_path: Path, name: str) -> None:
    made = MAKERS[name](tmp_path)
    with DataLoader(made.open(), 4, WINDOW) as loader:
        oracle = epochs(loader, made, 5)
        for first in (0, 2):
            pairs = [(rows_of(a), rows_of(b)) for a, b in zip(loader, loader, strict=True)]
            assert [a for a, _ in pairs] == oracle[first]
            assert [b for _, b in pairs] == oracle[first + 1]
        assert delivered(loader) == oracle[4]


def test_inner_loops_run_the_epochs_after_the_outer_one(ints: Made) -> None:
    with DataLoader(ints.open(), 16, WINDOW) as loader:
        oracle, inner, outer = epochs(loader, ints, 5), [], []
        for batch in loader:
            outer.append(rows_of(batch))
            inner.append(delivered(loader))
        assert outer == oracle[0]
        assert inner == oracle[1:4]
        assert delivered(loader) == oracle[4]


def test_the_session_of_inner_loops_reads_on_from_one_to_the_next(ints: Made) -> None:
    with DataLoader(ints.open(), 16, WINDOW) as loader:
        served = []
        for _ in loader:
            list(loader)
            served.append(session_of(loader))
        assert len(served) == 3
        assert len(set(map(id, served))) == 1


def test_first_batches_of_iterators_that_are_dropped_are_those_of_consecutive_epochs(ints: Made) -> None:
    with DataLoader(ints.open(), 4, WINDOW) as loader:
        oracle = epochs(loader, ints, 6)
        assert [rows_of(next(iter(loader))) for _ in range(5)] == [oracle[epoch][0] for epoch in range(5)]
        assert delivered(loader) == oracle[5]


def test_loops_have_their_epochs_in_order_of_iter(ints: Made) -> None:
    with DataLoader(ints.open(), 4, WINDOW) as loader:
        oracle = epochs(loader, ints, 4)
        a, b, c = (iter(loader) for _ in range(3))
        assert rows_of(next(c)) == oracle[2][0]
        assert rows_of(next(a)) == oracle[0][0]
        assert delivered(b) == oracle[1]
        assert delivered(c) == oracle[2][1:]
        assert delivered(loader) == oracle[3]
        assert delivered(a) == oracle[0][1:]


def test_iterators_dropped_without_a_batch_do_not_count(ints: Made) -> None:
    with DataLoader(ints.open(), 4, WINDOW) as loader:
        oracle = epochs(loader, ints, 3)
        for _ in range(3):
            iter(loader)
        again = iter(loader)
        again = iter(loader)  # the first one is still there when this one is asked for
        assert delivered(again) == oracle[0]
        a, b = iter(loader), iter(loader)
        del a
        assert delivered(b) == oracle[1]
        assert delivered(loader) == oracle[2]


def test_a_loop_that_has_begun_keeps_its_epoch_whatever_is_set(ints: Made) -> None:
    with DataLoader(ints.open(), 4, WINDOW) as loader:
        oracle = epochs(loader, ints, 9)
        old = iter(loader)
        assert rows_of(next(old)) == oracle[0][0]
        loader.set_epoch(5)
        assert rows_of(next(old)) == oracle[0][1]
        assert delivered(loader) == oracle[5]
        assert delivered(old) == oracle[0][2:]
        assert delivered(loader) == oracle[6]
        older, newer = iter(loader), iter(loader)
        loader.set_epoch(2)  # of the newest
        assert delivered(older) == oracle[7]
        assert delivered(newer) == oracle[2]
        assert delivered(loader) == oracle[3]


def test_loops_over_an_endless_mixture_begin_where_the_newest_stands(ints: Made) -> None:
    def head(loop: Any, count: int = 3) -> list[list[Row]]:
        return [rows_of(batch) for batch in islice(loop, count)]

    with DataLoader(Mixture({ints.open(): 1}, stop="never"), 4, WINDOW) as loader:
        whole = head(loader, 9)
        loader.set_epoch(0)
        assert head(loader) + head(loader) == whole[:6]
        loader.set_epoch(0)
        a, b = iter(loader), iter(loader)
        assert head(b) == head(a) == whole[:3]
        assert head(loader) == whole[3:6]
        assert head(a) == whole[3:6]
        assert loader.state_dict()["position"] == 24


# ---- state -------------------------------------------------------------------------------------------------


def test_the_state_is_that_of_the_newest_loop(ints: Made) -> None:
    with DataLoader(ints.open(), 4, WINDOW) as loader:
        oracle = epochs(loader, ints, 2)
        outer = iter(loader)
        assert list(islice(outer, 3))
        inner = iter(loader)
        assert list(islice(inner, 2))
        state = loader.state_dict()
        assert (state["epoch"], state["position"]) == (1, 8)
        assert list(islice(outer, 4))
        assert loader.state_dict() == state
        assert delivered(inner) == oracle[1][2:]
        after = loader.state_dict()
        assert (after["epoch"], after["position"]) == (2, 0)
        assert delivered(outer) == oracle[0][7:]
        assert loader.state_dict() == after
    with DataLoader(ints.open(), 4) as resumed:
        resumed.load_state_dict(state)
        assert delivered(resumed) == oracle[1][2:]


def test_loading_a_state_ends_all_loops(ints: Made) -> None:
    with DataLoader(ints.open(), 4, WINDOW) as loader:
        oracle, a, b = epochs(loader, ints, 2), iter(loader), iter(loader)
        next(a)
        next(b)
        loader.load_state_dict(loader.state_dict())
        assert (list(a), list(b)) == ([], [])
        assert delivered(loader) == oracle[1][1:]


# ---- memory ------------------------------------------------------------------------------------------------


def limits(loader: DataLoader) -> list[int]:
    return [session.resources.ledger.limit_bytes for session in stream_of(loader).sessions.open]


def test_loops_share_the_limit_and_the_last_one_has_it_all(ints: Made) -> None:
    with DataLoader(ints.open(), 4, WINDOW, memory_limit=6_000_000) as loader:
        a = iter(loader)
        next(a)
        assert limits(loader) == [6_000_000]
        b = iter(loader)
        next(b)
        assert limits(loader) == [3_000_000] * 2
        c = iter(loader)
        next(c)
        assert limits(loader) == [2_000_000] * 3
        assert len(list(b)) == 11  # an older one ends: its session is of no use
        assert limits(loader) == [3_000_000] * 2
        assert len(list(c)) == 11  # the newest ends: its session reads on
        assert limits(loader) == [3_000_000] * 2
        assert len(list(a)) == 11
        assert limits(loader) == [6_000_000]


def test_a_loop_that_holds_more_than_its_share_goes_on_from_where_it_stands(ints: Made) -> None:
    with DataLoader(ints.open(), 4, WINDOW, memory_limit=6_000_000) as loader:
        oracle, outer = epochs(loader, ints, 3), iter(loader)
        got = [rows_of(batch) for batch in islice(outer, 5)]
        session = session_of(loader)
        assert session is not None
        assert session.resources.ledger.reserve(State.WINDOW, 3_000_000, head_of_order=True)
        assert delivered(loader) == oracle[1]
        assert session not in stream_of(loader).sessions.open
        assert loader.state_dict()["epoch"] == 2
        assert got + delivered(outer) == oracle[0]
        assert delivered(loader) == oracle[2]


@pytest.mark.here
def test_a_waiting_loop_whose_session_another_thread_closes_goes_on(tmp_path: Path) -> None:
    made, gate, begun = make_ints_tar(tmp_path), threading.Event(), threading.Event()

    def transform(sample: Row) -> Row:
        begun.set()
        assert gate.wait(WAIT_S)
        return sample

    dataset = made.open(transform=transform)
    with DataLoader(dataset, 4, WINDOW, memory_limit=6_000_000, workers="thread") as loader:
        oracle, got = epochs(loader, made, 2), []
        outer, inner = iter(loader), iter(loader)
        thread = threading.Thread(target=lambda: got.extend(delivered(outer)))
        thread.start()
        assert begun.wait(WAIT_S)
        session = session_of(loader)
        assert session is not None
        assert session.resources.ledger.reserve(State.WINDOW, 3_000_000, head_of_order=True)
        close, session.close = session.close, lambda: (gate.set(), close())[1]  # type: ignore[method-assign]
        assert delivered(inner) == oracle[1]
        thread.join(WAIT_S)
        assert got == oracle[0]


@pytest.mark.reads_here
def test_what_two_loops_cannot_share_says_so(tmp_path: Path) -> None:
    made = make_parquet(tmp_path, 400)
    with DataLoader(made.open(), 64, Shuffle("window", 4), memory_limit=200_000) as loader:
        assert len(list(loader)) == len(loader)
        with pytest.raises(MemoryLimitError) as caught:
            list(zip(loader, loader, strict=True))
        assert "2 loops over this loader share its memory_limit" in caught.value.__notes__[0]


# ---- ends --------------------------------------------------------------------------------------------------


def test_a_dropped_loop_frees_its_threads_and_memory_while_others_run(ints: Made) -> None:
    with DataLoader(ints.open(), 4, WINDOW) as loader:
        oracle, outer = epochs(loader, ints, 2), iter(loader)
        got = [rows_of(next(outer))]
        outers = set(our_threads())
        inner = iter(loader)
        next(inner)
        session = session_of(loader)
        assert session is not None
        inners = set(our_threads()) - outers
        assert inners
        del inner
        for thread in inners:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        session.close()  # waits for the one who does it
        assert session.resources.arena.num_leased == 0
        assert session.resources.arena.mapped_bytes == 0
        assert got + delivered(outer) == oracle[0]


def test_close_ends_all_loops_and_leaves_their_batches(ints: Made) -> None:
    loader = DataLoader(ints.open(), 4, WINDOW)
    oracle, loops = epochs(loader, ints, 4), [iter(loader) for _ in range(3)]
    batches = [next(loop) for loop in loops]
    loader.close()
    assert our_threads() == []
    assert [list(loop) for loop in loops] == [[], [], []]
    assert [rows_of(batch) for batch in batches] == [oracle[epoch][0] for epoch in range(3)]
    assert delivered(loader) == oracle[3]
    loader.close()


@pytest.mark.here
def test_an_error_ends_its_own_loop(tmp_path: Path) -> None:
    made = make_ints_tar(tmp_path)
    bad: list[int] = []

    def transform(sample: Row) -> Row:
        if int(sample["cls"]) in bad:
            raise ValueError("a bad sample")
        return sample

    with DataLoader(made.open(transform=transform), 4, shuffle=False, workers="thread") as loader:
        outer = iter(loader)
        head = [rows_of(batch) for batch in islice(outer, 12)]
        bad.append(20)
        with pytest.raises(Exception, match="a bad sample"):
            list(loader)
        assert head + delivered(outer) == by_plan(loader, made.samples, 0)


def test_loops_run_in_threads_of_their_own(ints: Made) -> None:
    with DataLoader(ints.open(), 4, WINDOW, memory_limit=3_000_000) as loader:
        oracle, got = epochs(loader, ints, 12), {}
        loops = [iter(loader) for _ in range(3)]
        together = threading.Barrier(3, timeout=WAIT_S)

        def run(number: int) -> None:
            together.wait()
            got[number] = delivered(loops[number])

        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert [got[number] for number in range(3)] == oracle[:3]


def test_grad_schedule_still_refuses(ints: Made) -> None:
    with DataLoader(ints.open(), 4) as loader:
        model = torch.nn.Linear(1, 1)
        schedule = GradSchedule(loader, model, torch.optim.SGD(model.parameters(), 0.1), 1)
        loop = iter(schedule)
        next(loop)
        with pytest.raises(RuntimeError, match="two loops"):
            next(iter(schedule))
        loop.close()  # type: ignore[attr-defined]


def test_stats_count_all_loops(ints: Made) -> None:
    with DataLoader(ints.open(), 4) as loader:
        for _ in zip(loader, loader, strict=True):
            pass
        stats = loader.stats()
        assert (stats.batches, stats.samples) == (24, 2 * len(ints.samples))
        assert stats.delivered_bytes >= 2 * 8 * len(ints.samples)
