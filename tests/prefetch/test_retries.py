"""What is tried again, after which pause, until when; and how much may be asked twice."""

from __future__ import annotations

import errno
import logging
import pickle
import random
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from prefetch.errors import next_notice_s
from prefetch.retries import (
    CutBodyError,
    Failure,
    HedgeBudget,
    ReadTimes,
    RetryDecision,
    RetryPolicy,
    WrongRangeError,
    failure_of,
    hedge_due_s,
    is_crawling,
)
from prefetch.store.retrier import Hosts, Retrier
from sharding.errors import ShardReadError
from sharding.http_status import StatusError


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
    ("failure", "failures", "idle_s", "longest"),
    [
        (Failure("throttled"), 1, 0, 0.1),
        (Failure("throttled"), 2, 0, 0.2),
        (Failure("throttled"), 7, 0, 6.4),
        (Failure("throttled"), 8, 0, 10.0),
        (Failure("throttled"), 10_000, 0, 10.0),
        (CUT, 1, 50, 0.1),
        (CUT, 3, 0, 0.4),
        (CUT, 9, 0, 1.0),
        (CUT, 9, 16, 2.0),
        (CUT, 9, 90, 10.0),
    ],
)
def test_pauses_are_drawn_from_zero_to_a_bound_that_doubles(
    failure: Failure, failures: int, idle_s: float, longest: float
) -> None:
    delays = [RetryPolicy().next_attempt(str(key), failures, failure, idle_s).delay_s for key in range(1000)]
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
        (Failure("throttled", 50.0), 60.0, "deadline"),
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


@pytest.mark.parametrize("name", ["deadline_s", "connect_s", "base_s", "cap_s", "stall_s", "least_stall_s"])
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


@pytest.mark.parametrize(
    ("waited_s", "due_s"), [(0.0, 3.0), (2.9, 3.0), (3.0, 6.0), (7.0, 12.0), (12.5, 24.0), (100.0, 192.0)]
)
def test_a_wait_is_told_of_after_3_s_and_whenever_it_has_doubled(waited_s: float, due_s: float) -> None:
    assert next_notice_s(waited_s) == due_s


# ---- outages -----------------------------------------------------------------------------------------------

REFUSED = Failure("connection", unreachable=True)


class ClientConnectionError(OSError):
    """As aiohttp's."""


class ClientConnectorError(ClientConnectionError):
    """As aiohttp's, of a host with several addresses: no errno."""


@pytest.mark.parametrize(
    ("error", "unreachable"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, ""), True),
        (OSError(errno.EHOSTUNREACH, ""), True),
        (socket.gaierror(), True),
        (caused(FileNotFoundError(), ClientConnectorError("Multiple exceptions")), True),
        (caused(ConnectionError(), socket.gaierror()), True),
        (ConnectionResetError(errno.ECONNRESET, ""), False),
        (TimeoutError(), False),
        (StatusError(503), False),
    ],
)
def test_a_host_that_refuses_or_has_no_address_cannot_be_reached(error: Exception, unreachable: bool) -> None:
    assert failure_of(error).unreachable is unreachable


def attempts(failure: Failure, *, answered: bool, until_s: float = 1e9) -> list[float]:
    """When a read is tried, until it is given up or the store is back."""
    tried = [0.0]
    while tried[-1] < until_s:
        decision = RetryPolicy().next_attempt("k", len(tried), failure, tried[-1], answered=answered)
        if decision.delay_s is None:
            break
        tried.append(tried[-1] + decision.delay_s)
    return tried


def test_a_host_that_never_answered_and_cannot_be_reached_is_given_up_within_2_s() -> None:
    assert 0.5 < attempts(REFUSED, answered=False)[-1] <= 2.0
    decision = RetryPolicy().next_attempt("k", 1, REFUSED, 2.0, answered=False)
    assert decision.reason == "this host never answered; is it the right one?"


def test_one_that_did_answer_is_tried_until_the_deadline() -> None:
    tried = attempts(REFUSED, answered=True)
    assert 95 < tried[-1] <= 120
    assert len(tried) < 150


@pytest.mark.parametrize("failure", [REFUSED, CUT, Failure("server"), Failure("timeout")])
@pytest.mark.parametrize("outage_s", [1.0, 4.0, 8.0, 40.0])
def test_an_outage_costs_at_most_an_eighth_of_its_length_more_or_a_second(
    failure: Failure, outage_s: float
) -> None:
    back_s = attempts(failure, answered=True, until_s=outage_s)[-1]
    assert outage_s <= back_s <= outage_s + max(1.0, outage_s / 8)


def test_a_server_that_contradicts_itself_is_asked_six_times() -> None:
    assert failure_of(WrongRangeError("bytes 7-9/20")).kind == "wrong"
    assert len(attempts(Failure("wrong"), answered=True)) == 6


def test_attempts_may_be_counted() -> None:
    policy = RetryPolicy(max_attempts=3)
    assert policy.next_attempt("k", 2, CUT, 0.0).delay_s is not None
    assert policy.next_attempt("k", 3, CUT, 0.0) == RetryDecision(None, "max_attempts=3")
    with pytest.raises(ValueError, match="max_attempts must be >= 1, got 0"):
        RetryPolicy(max_attempts=0)


def test_hosts_that_answered_are_known_by_protocol_and_name_and_in_other_processes() -> None:
    hosts = Hosts()
    hosts.add("http://user:secret@h:80/x/y.tar?sig=1")
    hosts.add("s3://bucket/x.tar")
    there = pickle.loads(pickle.dumps(hosts))
    assert "http://h:80/other.tar" in there
    assert "simplecache::s3://bucket/y" in there
    assert "http://h:81/x/y.tar" not in there
    assert "s3://bucket2/x.tar" not in there


# ---- small requests ----------------------------------------------------------------------------------------

URL = "http://host/x.tar"


class Clock:
    """Waits take no time."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def now(self) -> float:
        return sum(self.waits)

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return False


def fails(*errors: Exception) -> Callable[[], str]:
    """Raises these, the last one for ever if it is an error, and then answers."""
    left = list(errors)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "answer"

    return call


def always(error: Exception) -> Callable[[], str]:
    def call() -> str:
        raise error

    return call


def test_a_request_is_made_until_it_is_answered() -> None:
    clock = Clock()
    with Retrier(now=clock.now, wait=clock.wait) as retrier:
        call = fails(ConnectionResetError(), TimeoutError(), StatusError(503))
        assert retrier(call, URL) == "answer"
    assert len(clock.waits) == 3


def test_a_request_that_stays_unanswered_raises_its_last_error_and_counts() -> None:
    clock = Clock()
    with Retrier(now=clock.now, wait=clock.wait) as retrier, pytest.raises(StatusError) as caught:
        retrier(always(StatusError(503)), URL)
    assert 60 < clock.now() <= 120
    assert f"tried {len(clock.waits) + 1} times" in caught.value.__notes__[0]


@pytest.mark.parametrize("error", [FileNotFoundError(), ShardReadError("s", "given up", stage="read")])
def test_a_request_that_cannot_succeed_is_made_once(error: Exception) -> None:
    error.__cause__ = StatusError(503) if isinstance(error, ShardReadError) else None  # tried again already
    clock = Clock()
    with Retrier(now=clock.now, wait=clock.wait) as retrier, pytest.raises(type(error)) as caught:
        retrier(always(error), URL)
    assert clock.waits == []
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("errors", [[], [StatusError(503)]])
def test_a_refusal_is_an_outage_once_the_host_has_answered(errors: list[Exception]) -> None:
    clock, refused = Clock(), ConnectionRefusedError(errno.ECONNREFUSED, "")
    with Retrier(now=clock.now, wait=clock.wait) as retrier:
        assert retrier(fails(*errors), URL) == "answer"
        with pytest.raises(ConnectionRefusedError):
            retrier(always(refused), URL)
    assert clock.now() > 90


def test_what_is_waited_for_is_told_in_one_line_whether_it_fails_or_is_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = [threading.Event() for _ in range(3)]

    class Tells(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            told[min(len(lines), 3) - 1].set()

    lines: list[str] = []
    handler, log = Tells(), logging.getLogger("dataflow")
    log.addHandler(handler)
    try:
        with Retrier(notice_s=0.01) as retrier, retrier.pool(2, "requests") as pool:
            silent = pool.submit(retrier, lambda: told[1].wait(20), f"{URL}?sig=secret")
            assert told[0].wait(20)
            assert silent.result(20)
            failing = pool.submit(retrier, always(StatusError(503, "Slow Down", 1e9)), URL)
            with pytest.raises(StatusError):
                failing.result(20)
    finally:
        log.removeHandler(handler)
    assert all(re.fullmatch(r"waiting 0 s for http://host/x.tar: no answer yet", line) for line in lines[:2])
    assert not [thread for thread in threading.enumerate() if thread.name == "dataflow-notice"]


def test_leaving_ends_the_waits_of_all_who_ask() -> None:
    asked = threading.Event()

    def refused() -> None:
        asked.set()
        raise StatusError(503, "Slow Down", 30.0)

    with suppress(KeyboardInterrupt), Retrier() as retrier, retrier.pool(2, "requests") as pool:
        waiting = pool.submit(retrier, refused, URL)
        assert asked.wait(20)
        raise KeyboardInterrupt
    assert isinstance(waiting.exception(20), StatusError)


def test_a_host_that_was_given_up_is_not_waited_for_by_each_of_many_requests() -> None:
    clock = Clock()
    with Retrier(now=clock.now, wait=clock.wait) as retrier:
        with pytest.raises(ConnectionRefusedError):
            retrier(always(ConnectionRefusedError(errno.ECONNREFUSED, "")), URL)
        with pytest.raises(ShardReadError, match=r"as http://host was given up before: ConnectionRef"):
            retrier(always(AssertionError()), "http://host/y.tar")
        assert retrier(lambda: 5, "http://other/y.tar") == 5
    assert clock.now() <= 2.0


def test_what_may_ask_nobody_shows_no_host() -> None:
    with Retrier() as retrier:
        assert retrier(lambda: 5, URL, may_ask_nobody=True) == 5
        assert URL not in retrier.hosts


def test_local_files_are_neither_waited_for_nor_asked_again() -> None:
    with Retrier() as retrier:
        assert retrier(lambda: 5, "/data/x.tar") == 5
        with pytest.raises(TimeoutError):
            retrier(always(TimeoutError()), "/data/x.tar")
        assert not [thread for thread in threading.enumerate() if thread.name == "dataflow-notice"]
