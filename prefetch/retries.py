"""Decide about failed reads, and when to ask twice: decisions only, no clock, no thread.

A failure is sorted into a kind; whether it is worth another attempt depends on the kind alone, and after
which pause on how often the read failed since it last got a byte: exponential backoff with full jitter
(Brooker, "Exponential Backoff And Jitter", 2015), drawn from (seed, key, count), so a run can be repeated. A
read is given up when it got nothing for `deadline_s`; as long as bytes come it may take what it takes. A host
that never answered and cannot be reached is given up after `connect_s`: its address may be mistyped. One that
did answer is out of service; so that this costs little more than it lasts, pauses are short against it.

A read that the consumer waits for may be asked a second time ("The Tail at Scale", Dean & Barroso, 2013) when
it was silent for as long as nearly all reads of its size take, or is several times as old; as long as second
requests stay a small share of all bytes. Age alone would not do: where the store is the limit, the consumer
waits all the time, and reads that are only slow would use up the share before one stalls.
"""

from __future__ import annotations

import errno
import random
import socket
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

Kind = Literal["connection", "timeout", "throttled", "server", "cut", "wrong", "final"]

_BY_STATUS: dict[int, Kind] = {
    408: "timeout",
    **dict.fromkeys((429, 503), "throttled"),
    **dict.fromkeys((500, 502, 504), "server"),
}
_CONNECTION_ERRNOS = {
    errno.EADDRNOTAVAIL,
    errno.EAGAIN,
    errno.EBUSY,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EIO,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.ENOTCONN,
}
"""The errors of connections that are not a `ConnectionError` anyway; s3fs says EBUSY and EIO of a server that
fails."""
_UNREACHABLE_ERRNOS = {
    errno.ECONNREFUSED,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
}
_UNREACHABLE = {"ClientConnectorError", "EndpointConnectionError", "ServiceRequestError"}
"""By name, as below: no connection was made, or the host has no address."""
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
SILENCE = 4.0
"""A request without a byte for so many times the duration of nearly all whole reads is taken for dead."""
_OLD = 3.0
"""A read so many times as old as nearly all others get is late, even if bytes come."""
_CRAWL = 10
"""A request so many times as old as nearly all get, with less than such a part of its bytes, crawls."""
_LAST_START = 0.9
"""Share of the deadline after which no attempt begins: one that gets milliseconds would hide the error."""
_LONGEST_PAUSE_S = 1.0
_PAUSE_SHARE = 1 / 8
"""A pause in an outage is at most such a part of what it took so far, or a second."""
_LONGEST_ASKED_S = 600.0
"""No longer `Retry-After` is added to the deadline. The Hub counts requests in five minutes."""
_WRONG_ANSWERS = 6
"""The number of wrong answers in a row that are no accident."""
# By name, because the clients are optional packages. What is not listed here and is none of Python's own
# errors for a connection is taken for a mistake that would only happen again.
_BY_NAME: dict[str, Kind] = {
    "ClientPayloadError": "cut",
    "IncompleteRead": "cut",
    "IncompleteReadError": "cut",
    "ResponseStreamingError": "cut",
    "ProtocolError": "cut",
    "ClientConnectorCertificateError": "final",
    "ClientConnectionError": "connection",
    "ServerDisconnectedError": "connection",
    "HTTPClientError": "connection",
    "EndpointConnectionError": "connection",
    "ConnectionClosedError": "connection",
    "ServiceRequestError": "connection",
    "ServiceResponseError": "connection",
    "ReadTimeoutError": "timeout",
    "ConnectTimeoutError": "timeout",
    "TooManyRequests": "throttled",
    "ThrottlingException": "throttled",
}


class CutBodyError(ConnectionError):
    """A body ended before its last byte."""


class WrongRangeError(ConnectionError):
    """The server gave another range than was asked for, or did not say which."""


class Failure(Struct, frozen=True):
    """A failed attempt, with its reason."""

    kind: Kind
    """"final" is not tried again; "throttled" says that the store is asked too much."""
    retry_after_s: float = 0.0
    """Seconds that the store asked to be left alone; 0: it did not say."""
    unreachable: bool = False
    """True if the host refused the connection, or has no address."""


def failure_of(error: BaseException) -> Failure:
    """Sort what a store's client raised: the outermost of its causes that is worth another attempt decides.

    A cause counts because fsspec says `FileNotFoundError` of a server that does not answer, too.
    """
    for cause in _with_causes(error):
        status = _status(cause)
        kind = _kind_of_type(cause) if status is None else _BY_STATUS.get(status)
        if kind not in (None, "final"):
            unreachable = kind == "connection" and any(map(_is_unreachable, _with_causes(cause)))
            return Failure(kind, float(getattr(cause, "retry_after_s", 0.0)), unreachable)
    return Failure("final")


def _is_unreachable(error: BaseException) -> bool:
    if isinstance(error, socket.gaierror) or any(
        base.__name__ in _UNREACHABLE for base in type(error).__mro__
    ):
        return True
    return isinstance(error, OSError) and error.errno in _UNREACHABLE_ERRNOS


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    for name in ("status", "status_code", "code"):  # aiohttp and ours, Azure and requests, gcsfs
        status = getattr(error, name, None)
        if isinstance(status, int) and 300 <= status < 600:
            return status
    return None


def _kind_of_type(error: BaseException) -> Kind | None:
    """None where the type says nothing."""
    if isinstance(error, _FINAL):
        return "final"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, CutBodyError):
        return "cut"
    if isinstance(error, WrongRangeError):
        return "wrong"
    if isinstance(error, (ConnectionError, socket.gaierror)):
        return "connection"
    for base in type(error).__mro__:
        if base.__name__ in _BY_NAME:
            return _BY_NAME[base.__name__]
    if isinstance(error, OSError):
        if error.errno == errno.ETIMEDOUT:
            return "timeout"
        return "connection" if error.errno in _CONNECTION_ERRNOS else None
    return None


def hedge_due_s(began_s: float, heard_s: float, long_s: float) -> float:
    """Return when a read is late enough for a second request: times on one clock.

    Args:
        began_s: when it began.
        heard_s: when its last byte came, or it began.
        long_s: what nearly all reads of its size take.
    """
    return min(heard_s + long_s, began_s + _OLD * long_s)


def is_crawling(age_s: float, got: int, left: int, long_s: float) -> bool:
    """Return whether a request brings so few bytes that it would hold up training for long.

    Its silence says nothing then, as each byte ends it. To ask anew costs a round trip, and no bytes.
    """
    return got > 0 and age_s >= _CRAWL * long_s and got * _CRAWL < got + left


class RetryDecision(Struct, frozen=True):
    """A decision to try again, or not, with its reason."""

    delay_s: float | None
    """Seconds to wait before the next attempt; None: give up."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Says when a store that fails is asked again, and when it is given up. All times are seconds.

    Args:
        deadline_s: a read without one new byte for so long is given up.
        max_attempts: the number of attempts in a row without a byte after which a read is given up; None: any
            number.
        connect_s: the time after which a host is given up that never answered, and refuses connections or has
            no address.
        base_s: longest pause after the first failure; it doubles with each failure that follows it, up to a
            second or an eighth of the time since the last byte. Where a store is asked too much, up to
            `cap_s`.
        cap_s: longest pause of all, but for a `Retry-After`.
        stall_s: longest silence, in seconds, before a request is given up and asked again from where it
            stood. Where reads of its size are known to be quick, it is `SILENCE` times what nearly all of
            them take. It doubles with each one in a row, so that a store that is merely slow gets the time it
            needs.
        least_stall_s: no silence shorter than this is given up, however quick reads are.
        seed: decides the random part of each pause.

    Raises:
        ValueError: a setting is out of range.

    Examples:
        >>> retry = RetryPolicy(deadline_s=600)  # ride out ten minutes without an answer
        >>> dataset = ShardedDataset("s3://bucket/*.parquet", retry=retry)
    """

    deadline_s: float = 120.0
    max_attempts: int | None = None
    connect_s: float = 2.0
    base_s: float = 0.1
    cap_s: float = 10.0
    stall_s: float = 2.0
    least_stall_s: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("deadline_s", "connect_s", "base_s", "cap_s", "stall_s", "least_stall_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.max_attempts is not None and self.max_attempts < 1:
            raise ValueError(f"max_attempts must be >= 1, got {self.max_attempts}")

    def next_attempt(
        self, key: str, failures: int, failure: Failure, idle_s: float, *, answered: bool = True
    ) -> RetryDecision:
        """Decide after a failure.

        Args:
            key: names the read; reads with different keys wait differently.
            failures: how many in a row, this one included, since the read last got a byte.
            failure: this one.
            idle_s: seconds since the read last got a byte, or began.
            answered: whether the host has ever answered.
        """
        if failure.kind == "final":
            return RetryDecision(None, "another attempt would fail, too")
        if self.max_attempts is not None and failures >= self.max_attempts:
            return RetryDecision(None, f"max_attempts={self.max_attempts}")
        if failure.kind == "wrong" and failures >= _WRONG_ANSWERS:
            return RetryDecision(None, f"{failures} answers in a row were not what was asked for")
        longest = min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, 60))
        if failure.kind != "throttled":
            longest = min(longest, max(_LONGEST_PAUSE_S, _PAUSE_SHARE * idle_s))
        drawn = random.Random(f"{self.seed}/{key}/{failures}").random()
        delay_s = max(longest * drawn, failure.retry_after_s)
        if idle_s + delay_s > _LAST_START * self.patience_s(failure, answered=answered):
            if failure.unreachable and not answered:
                return RetryDecision(None, "this host never answered; is it the right one?")
            return RetryDecision(None, f"no byte came within the deadline of {self.deadline_s:g} s")
        return RetryDecision(delay_s, f"{failure.kind}, failure {failures} in a row")

    def patience_s(self, failure: Failure, *, answered: bool) -> float:
        """Seconds without a byte until a read that fails like this is given up.

        A store that names a time to come back at is no outage, so that time comes on top.
        """
        if failure.unreachable and not answered:
            return self.connect_s
        return self.deadline_s + min(failure.retry_after_s / _LAST_START, _LONGEST_ASKED_S)

    def stall_timeout_s(self, stalls: int, idle_s: float, long_s: float | None = None) -> float:
        """Seconds without a byte after which the next request is given up; never beyond the deadline.

        `stalls`: how many in a row were. `long_s`: what nearly all reads of this size take, whole; None where
        it is not known.
        """
        usual_s = self.stall_s if long_s is None else max(self.least_stall_s, SILENCE * long_s)
        patient_s = min(self.stall_s, usual_s) * 2.0 ** min(stalls, 60)
        return max(min(patient_s, self.deadline_s - idle_s), 1e-3)

    def awaited_stall_s(self, stalls: int, long_s: float) -> float:
        """Seconds without a byte after which a request that the consumer waits for is asked anew.

        `stalls`: how many in a row were. `long_s`: what nearly all reads of this size take, whole.
        """
        return max(long_s, self.least_stall_s) * 2.0 ** min(stalls, 60)


class ReadTimes:
    """The times that reads took lately, by size class. Not thread-safe."""

    def __init__(self, *, quantile: float = 0.95, at_least: int = 20, keep: int = 256) -> None:
        self._quantile, self._at_least, self._keep = quantile, at_least, keep
        self._seen: dict[int, deque[float]] = defaultdict(deque)
        self._ascending: dict[int, list[float]] = defaultdict(list)
        """The same; kept in order, as every read asks."""

    def add(self, nbytes: int, seconds: float) -> None:
        """Count a read that succeeded."""
        size = _size_class(nbytes)
        seen, ascending = self._seen[size], self._ascending[size]
        if len(seen) == self._keep:
            del ascending[bisect_left(ascending, seen.popleft())]
        seen.append(seconds)
        insort(ascending, seconds)

    def long_s(self, nbytes: int) -> float | None:
        """Longer than nearly all reads of this size; None before enough were seen."""
        ascending = self._ascending.get(_size_class(nbytes), ())
        if len(ascending) < self._at_least:
            return None
        return ascending[int(self._quantile * len(ascending))]


def _size_class(nbytes: int) -> int:
    """Return the class of a size: 3/4 to 3/2 of a power of two, as blocks are cut near these, some below."""
    return (4 * nbytes // 3).bit_length()


class HedgeBudget:
    """Bytes that second requests may take: at most a share of all bytes that were read. Not thread-safe."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._read_bytes = self._taken_bytes = 0

    def read(self, nbytes: int) -> None:
        """Count bytes that a read delivered."""
        self._read_bytes += nbytes

    def take(self, nbytes: int) -> bool:
        """Reserve bytes for a second request, all that it may cost; False: it would be too many."""
        if self._taken_bytes + nbytes > self._share * self._read_bytes:
            return False
        self._taken_bytes += nbytes
        return True
