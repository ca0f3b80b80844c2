"""Claims: one holder at a time, and none that outlives its process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest
from forked_kit import forked, on_file_events

from prefetch.cache.claims import Claim, Claims

WAIT_S = 20.0


def taken(claims: Claims, name: str, patience_s: float = 0) -> Claim:
    claim = claims.take(name, patience_s=patience_s)
    assert claim is not None
    return claim


@pytest.fixture
def claims(tmp_path: Path) -> Iterator[Claims]:
    claims = Claims(str(tmp_path))
    yield claims
    claims.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def test_a_claim_that_is_held_cannot_be_taken(claims: Claims) -> None:
    with claims.taken("a", patience_s=0):
        assert claims.take("a", patience_s=0) is None
        assert claims.take("a", patience_s=0.01) is None
    with claims.taken("a", patience_s=0) as claim:
        assert claim


def test_claims_of_other_names_are_free(claims: Claims) -> None:
    with claims.taken("a", patience_s=0) as a, claims.taken("b", patience_s=0) as b:
        assert a
        assert b


def test_nothing_is_left_of_a_claim(claims: Claims, tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with claims.taken("a", patience_s=0):
        claims.take("a", patience_s=0.01)
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == before


def test_who_waits_gets_the_claim_when_it_is_given_up(claims: Claims, threads: ThreadPoolExecutor) -> None:
    held = taken(claims, "a")
    waiting = [threads.submit(taken, claims, "a", WAIT_S) for _ in range(4)]
    held.release()
    for done in as_completed(waiting, WAIT_S):  # one after the other
        done.result().release()


def test_one_holder_at_a_time_among_many_threads(claims: Claims, threads: ThreadPoolExecutor) -> None:
    inside, most, turns = [0], [0], [0]

    def take_turns() -> None:
        for _ in range(20):
            with claims.taken("a", patience_s=WAIT_S) as claim:
                assert claim
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                turns[0] += 1
                inside[0] -= 1

    for done in [threads.submit(take_turns) for _ in range(8)]:
        done.result(WAIT_S)
    assert most == [1]
    assert turns == [160]


def test_the_claim_of_a_killed_process_is_free(claims: Claims, threads: ThreadPoolExecutor) -> None:
    def hold(stop: Callable[[], None]) -> None:
        assert claims.take("a", patience_s=0)
        stop()

    with forked(hold) as child:
        child.reached()
        assert claims.take("a", patience_s=0) is None
        waiting = threads.submit(taken, claims, "a", WAIT_S)
        child.kill()
        waiting.result(WAIT_S).release()


def test_a_forked_child_does_not_keep_a_claim(claims: Claims, threads: ThreadPoolExecutor) -> None:
    held = taken(claims, "a")
    with forked(lambda stop: stop()) as child:
        child.reached()
        waiting = threads.submit(taken, claims, "a", WAIT_S)
        held.release()
        waiting.result(WAIT_S).release()


def test_a_child_that_outlives_its_killed_parent_does_not_keep_a_claim(
    claims: Claims, tmp_path: Path
) -> None:
    def hold(stop: Callable[[], None]) -> None:
        claim = taken(claims, "a")
        with forked(lambda stop: stop()) as grandchild:
            grandchild.reached()
            (tmp_path / "pid").write_text(str(grandchild.pid))
            stop()
        claim.release()

    with forked(hold) as child:
        child.reached()
        assert claims.take("a", patience_s=0) is None
        child.kill()
        try:
            taken(claims, "a", WAIT_S).release()
        finally:
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_ending_ends_waits(claims: Claims, threads: ThreadPoolExecutor) -> None:
    with claims.taken("a", patience_s=0):
        waiting = [threads.submit(claims.take, "a", patience_s=10) for _ in range(3)]
        claims.end()
        assert [w.result(timeout=5) for w in waiting] == [None, None, None]


def test_a_folder_that_is_gone_is_an_error(claims: Claims, tmp_path: Path) -> None:
    tmp_path.rmdir()
    with pytest.raises(FileNotFoundError):
        claims.take("a", patience_s=0)


def test_the_lock_of_a_pipe_that_its_holder_has_removed_is_no_claim(claims: Claims, tmp_path: Path) -> None:
    def take_late(stop: Callable[[], None]) -> None:
        locks = []

        def stop_before_the_first(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "fcntl.flock":
                locks.append(arguments)
                if len(locks) == 1:
                    stop()

        on_file_events(stop_before_the_first)
        assert Claims(str(tmp_path)).take("a", patience_s=0.01) is None
        assert len(locks) == 2

    first = taken(claims, "a")
    with forked(take_late) as late:
        late.reached()
        first.release()
        with claims.taken("a", patience_s=0):
            assert late.go_on() == 0


def test_a_file_that_is_no_claim_is_left_alone(claims: Claims, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="another kind"):
        claims.take("a", patience_s=0)
    assert (tmp_path / "a").read_bytes() == b"precious"
