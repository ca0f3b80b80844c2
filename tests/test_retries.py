"""What is tried again, after which pause, until when; and how much may be asked twice."""

from __future__ import annotations

import errno
import random
import socket

import pytest

from prefetch import again
from prefetch.again import until_answered
from prefetch.retries import (
    CutBodyError,
    Failure,
    HedgeBudget,
    ReadTimes,
    RetryPolicy,
    StatusError,
    failure_of,
    hedge_due_s,
    is_crawling,
)
from sharding.errors import ShardReadError


class ClientPayloadError(Exception):
    """As aiohttp's, which may not be installed."""


class ClientError(Exception):
    """As botocore's."""

    def __init__(self, status: int) -> None:
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionResetError(), "connection"),
        (ConnectionRefusedError(), "connection"),
        (socket.gaierror(), "connection"),
        (OSError(errno.EHOSTUNREACH, ""), "connection"),
        (OSError(errno.EBUSY, "s3fs says so of SlowDown"), "connection"),
        (TimeoutError(), "timeout"),
        (OSError(errno.ETIMEDOUT, ""), "timeout"),
        (CutBodyError(), "cut"),
        (ClientPayloadError(), "cut"),
        (caused(ClientPayloadError(), StatusError(400)), "cut"),
        *((StatusError(status), "throttled") for status in (429, 503)),
        *((StatusError(status), "server") for status in (500, 502, 504)),
        (StatusError(408), "timeout"),
        *((StatusError(status), "final") for status in (301, 400, 401, 403, 404, 412, 416, 501)),
        (ClientError(503), "throttled"),
        (ClientError(403), "final"),
        (FileNotFoundError(), "final"),
        (caused(FileNotFoundError(), StatusError(404)), "final"),
        (caused(FileNotFoundError(), StatusError(503)), "throttled"),
        (
            caused(ShardReadError("s", "r"), caused(FileNotFoundError(), ConnectionRefusedError())),
            "connection",
        ),
        (PermissionError(), "final"),
        (IsADirectoryError(), "final"),
        (OSError(errno.ENOSPC, ""), "final"),
        (ValueError(), "final"),
        (ImportError(), "final"),
    ],
)
def test_kinds_of_failures(error: Exception, kind: str) -> None:
    assert failure_of(error).kind == kind


def test_a_store_may_say_how_long_to_wait() -> None:
    failure = failure_of(StatusError(503, "Slow Down", 7.0))
    assert failure == Failure("throttled", 7.0)
    assert RetryPolicy().next_attempt("k", 1, failure, 0).delay_s == 7.0


def test_the_cause_of_a_cause_may_be_itself() -> None:
    error = ValueError()
    error.__cause__ = caused(KeyError(), error)
    assert failure_of(error).kind == "final"


CUT = Failure("cut")


@pytest.mark.parametrize(
    ("failures", "longest"), [(1, 0.1), (2, 0.2), (3, 0.4), (7, 6.4), (8, 10.0), (9, 10.0), (10_000, 10.0)]
)
def test_pauses_are_drawn_from_zero_to_a_bound_that_doubles(failures: int, longest: float) -> None:
    delays = [RetryPolicy().next_attempt(str(key), failures, CUT, 0).delay_s for key in range(1000)]
    known = [delay for delay in delays if delay is not None]
    assert len(known) == 1000
    assert 0 <= min(known) < 0.02 * longest
    assert 0.98 * longest < max(known) <= longest
    assert sum(known) / 1000 == pytest.approx(longest / 2, rel=0.1)


def test_the_same_seed_and_read_wait_the_same() -> None:
    def delays(seed: int, key: str) -> list[float | None]:
        return [RetryPolicy(seed=seed).next_attempt(key, n, CUT, 0).delay_s for n in range(1, 6)]

    assert delays(1, "a") == delays(1, "a")
    assert delays(1, "a") != delays(2, "a")
    assert delays(1, "a") != delays(1, "b")


@pytest.mark.parametrize(
    ("failure", "idle_s", "reason"),
    [
        (Failure("final"), 0.0, "another attempt would fail"),
        (CUT, 54.0, "no byte came within the deadline of 60 s"),
        (Failure("throttled", 50.0), 11.0, "deadline"),
    ],
)
def test_when_to_give_up(failure: Failure, idle_s: float, reason: str) -> None:
    decision = RetryPolicy(deadline_s=60).next_attempt("k", 1, failure, idle_s)
    assert decision.delay_s is None
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("failures", "idle_s", "expected"),
    [(0, 0, 5), (1, 6, 10), (2, 17, 20), (9, 0, 60), (0, 58, 2), (3, 60, 0.001)],
)
def test_patience_doubles_and_ends_at_the_deadline(failures: int, idle_s: float, expected: float) -> None:
    assert RetryPolicy(deadline_s=60, stall_s=5).stall_timeout_s(failures, idle_s) == expected


@pytest.mark.parametrize(
    ("long_s", "failures", "expected"),
    [(None, 0, 2.0), (0.01, 0, 0.5), (0.25, 0, 1.0), (0.25, 1, 2.0), (0.25, 3, 8.0), (10.0, 0, 2.0)],
)
def test_silence_is_judged_by_how_long_reads_take(long_s: float, failures: int, expected: float) -> None:
    assert RetryPolicy().stall_timeout_s(failures, 0, long_s) == expected


@pytest.mark.parametrize(("long_s", "failures", "expected"), [(0.01, 0, 0.5), (0.8, 0, 0.8), (0.8, 3, 6.4)])
def test_what_is_waited_for_is_given_less_time(long_s: float, failures: int, expected: float) -> None:
    assert RetryPolicy().awaited_stall_s(failures, long_s) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("heard_s", "due_s"), [(100.0, 102.0), (101.0, 103.0), (103.9, 105.9), (105.0, 106.0), (110.0, 106.0)]
)
def test_a_second_request_is_due_after_silence_or_great_age(heard_s: float, due_s: float) -> None:
    assert hedge_due_s(100.0, heard_s, 2.0) == due_s


@pytest.mark.parametrize("name", ["deadline_s", "base_s", "cap_s", "stall_s", "least_stall_s"])
def test_times_are_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be > 0, got 0"):
        RetryPolicy(**{name: 0})


# ---- second requests ---------------------------------------------------------------------------------------


def test_nothing_is_known_to_be_long_before_twenty_reads() -> None:
    times = ReadTimes()
    for _ in range(19):
        times.add(1000, 1.0)
    assert times.long_s(1000) is None
    times.add(1000, 1.0)
    assert times.long_s(1000) == 1.0


def test_long_is_the_95th_percentile_of_reads_of_about_the_size() -> None:
    times = ReadTimes()
    for i in range(100):
        times.add(1000, float(i))
        times.add(100_000, 1000.0)
    assert times.long_s(800) == times.long_s(1500) == 95.0
    assert times.long_s(100_000) == 1000.0
    assert times.long_s(1 << 30) is None


def test_blocks_a_little_below_and_above_a_power_of_two_are_of_about_a_size() -> None:
    times = ReadTimes(at_least=1)
    times.add((2 << 20) - 8188, 1.0)
    assert times.long_s((2 << 20) + 4) == 1.0


def test_only_late_reads_count() -> None:
    times = ReadTimes(keep=50)
    for seconds in [9.0] * 100 + [1.0] * 50:
        times.add(10, seconds)
    assert times.long_s(10) == 1.0


def test_long_is_that_of_the_reads_kept_whatever_their_order() -> None:
    times, drawn = ReadTimes(keep=30), random.Random(1)
    seen = [float(drawn.randrange(40)) for _ in range(200)]  # with equal ones
    for count, seconds in enumerate(seen, 1):
        times.add(10, seconds)
        if count >= 20:
            kept = sorted(seen[max(0, count - 30) : count])
            assert times.long_s(10) == kept[int(0.95 * len(kept))]


def test_second_requests_stay_below_their_share() -> None:
    budget, asked, read = HedgeBudget(0.02), 0, 0
    assert not budget.take(1)
    for _ in range(1000):
        budget.read(1000)
        read += 1000
        if budget.take(1000):
            asked += 1000
        assert asked <= 0.02 * read
    assert asked == 20_000


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="share must be in"):
        HedgeBudget(share)


@pytest.mark.parametrize(
    ("age_s", "got", "left", "crawls"),
    [
        (10.0, 1, 99, True),
        (9.9, 1, 99, False),
        (10.0, 10, 90, False),
        (99.0, 9, 91, True),
        (99.0, 0, 100, False),
    ],
)
def test_a_request_crawls_that_is_ten_times_as_old_with_less_than_a_tenth_of_its_bytes(
    age_s: float, got: int, left: int, crawls: bool
) -> None:
    assert is_crawling(age_s, got, left, 1.0) is crawls


# ---- small requests ----------------------------------------------------------------------------------------


def test_a_request_is_asked_until_it_is_answered() -> None:
    failures, waits = [StatusError(503), TimeoutError(), ConnectionResetError()], list[float]()

    def call() -> str:
        if failures:
            raise failures.pop()
        return "answer"

    assert until_answered(call, now=lambda: sum(waits), wait=lambda s: bool(waits.append(s))) == "answer"
    assert len(waits) == 3


def test_a_request_that_stays_unanswered_raises_its_last_error_and_counts() -> None:
    waits = list[float]()

    def call() -> None:
        raise StatusError(503)

    with (
        pytest.warns(UserWarning, match="asked again for 1.. s.*503") as told,
        pytest.raises(StatusError) as caught,
    ):
        until_answered(call, now=lambda: sum(waits), wait=lambda s: bool(waits.append(s)))
    assert sum(waits) <= 120
    assert len(told) == 1
    assert f"tried {len(waits) + 1} times" in caught.value.__notes__[0]


def test_a_request_that_cannot_succeed_is_asked_once() -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        until_answered(call)
    assert len(calls) == 1


def test_of_those_who_ask_at_the_same_time_one_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "_TELL_S", 0.0)
    answers = iter([False, True, False, True])  # of two requests, each of which fails once

    def call() -> None:
        if not next(answers):
            raise StatusError(503)

    with again.asking_pool(2, "asking") as (pool, ask):
        with pytest.warns(UserWarning, match="a store fails") as told:
            pool.submit(ask, call).result()
        pool.submit(ask, call).result()
    assert len(told) == 1
    assert next(answers, None) is None
