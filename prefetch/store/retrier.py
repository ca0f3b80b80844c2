"""Ask a store again until it answers: for requests that are small and give all or nothing.

Size and version of a shard, a listing, whether a catalog is there. Which failures are worth it, and for how
long, `prefetch.retries` decides; reads of ranges, which can be continued, are in
`prefetch.store.reader`. Whoever opens a dataset waits for these requests, so what is waited for is said in
one line after 3 s, and at growing intervals: by a thread of its own, as a request may get no answer at all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from msgspec import Struct

from prefetch.errors import FIRST_NOTICE_S, next_notice_s
from prefetch.memory.interrupts import HiddenThread
from prefetch.retries import RetryPolicy, failure_of
from sharding.errors import ShardError, ShardReadError
from sharding.printable import printable
from sharding.redaction import identity_of, without_secrets
from sharding.urls import is_local, naming_part

if TYPE_CHECKING:
    from prefetch.control.pause import ReadPause

R = TypeVar("R")

_log = logging.getLogger("dataflow")
_DEFAULT = RetryPolicy()


class Hosts:
    """A set of hosts, by any URL of theirs. Thread-safe, and copied into other processes.

    One that has answered, rightly or not, is not mistyped: if it refuses later, it is out of service.
    """

    def __init__(self) -> None:
        self._hosts: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {"_hosts": self._hosts.copy()}  # pickling walks over it, and others may add meanwhile

    def add(self, url: str) -> None:
        """The host of this URL is one of them."""
        self._hosts.add(host_of(url))

    def __contains__(self, url: str) -> bool:
        return host_of(url) in self._hosts


def host_of(url: str) -> str:
    """Protocol and host of a URL, or protocol and bucket."""
    return "/".join(naming_part(identity_of(url)).split("/")[:3])


@dataclass(frozen=True, kw_only=True)
class ReadSettings:
    """The arguments of a `StoreReader`, for what it makes at the first remote read."""

    storage_options: Mapping[str, Any]
    policy: RetryPolicy
    hedge_share: float
    part_bytes: int
    hosts: Hosts
    say: Callable[[str], None] | None
    pause: ReadPause | None
    now: Callable[[], float]
    wait: Callable[[float], bool]
    closed: threading.Event
    """Set when the reader is closed."""
    count: Callable[..., None]
    """Told of faults and second requests, by keywords of `ReadStats`."""


class _Request(Struct):
    url: str
    began_s: float
    state: str = "no answer yet"


class Retrier:
    """Makes requests of a store, and makes those again that failed. Thread-safe.

    Leaving it ends waits for a next attempt with the last error, as does Ctrl-C in the main thread.

    Args:
        policy: which failures are worth another attempt, and for how long.
        hosts: that have answered; told of those that do.
        now: seconds on a clock that only goes forward.
        wait: waits so many seconds, or until this is left; whether it is. None: on a real clock.
        notice_s: seconds after which what is waited for is said.
    """

    def __init__(
        self,
        policy: RetryPolicy = _DEFAULT,
        hosts: Hosts | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
        notice_s: float = FIRST_NOTICE_S,
    ) -> None:
        self._notice_s = notice_s
        self.policy, self._now = policy, now
        self.hosts = Hosts() if hosts is None else hosts
        self._ended = threading.Event()
        self._wait = wait or self._ended.wait
        self._lock = threading.Lock()  # guards what is below
        self._running: dict[int, _Request] = {}
        self._given_up: dict[str, str] = {}
        """Hosts, and why: who was told may have kept it to itself."""
        self._waiting: Callable[[], str] = lambda: ""
        self._notifier: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._notifier is not None:
            self._notifier.join()

    def __call__(self, call: Callable[[], R], url: str, *, may_ask_nobody: bool = False) -> R:
        """Return what `call` returns, or raise what it raised last, with a note that counts the attempts.

        Args:
            call: the request.
            url: of the host that it asks. `ShardReadError` if that was given up before.
            may_ask_nobody: whether it may succeed without an answer of the host.
        """
        if is_local(url):
            return call()
        why = self._given_up.get(host_of(url))
        if why is not None:  # of a thousand shards each would take as long
            raise ShardReadError(url, f"not asked, as {host_of(url)} was given up before: {why}")
        request = _Request(url, self._now())
        with self._lock:
            self._running[id(request)] = request
            if self._notifier is None:
                self._notifier = HiddenThread(target=self._log_waits, name="dataflow-notice")
                self._notifier.start()
        try:
            answer = self._answer(call, request)
        finally:
            with self._lock:
                del self._running[id(request)]
        if not may_ask_nobody:
            self.hosts.add(url)
        return answer

    def watch(self, waiting: Callable[[], str]) -> None:
        """Calls read through something that says by itself what it waits for; "": for nothing."""
        self._waiting = waiting

    @contextmanager
    def pool(self, num_threads: int, name: str) -> Iterator[Executor]:
        """Threads to make requests in: an error or Ctrl-C in the block ends their waits."""
        with ThreadPoolExecutor(num_threads, thread_name_prefix=name) as pool:
            try:
                yield pool
            except BaseException:
                self._ended.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _answer(self, call: Callable[[], R], request: _Request) -> R:
        failures = 0
        while True:
            try:
                return call()
            except Exception as error:
                failures += 1
                delay_s = self._pause_s(error, request, failures)
                if delay_s is None or self._wait(delay_s):
                    raise

    def _pause_s(self, error: Exception, request: _Request, failures: int) -> float | None:
        """Seconds until the next attempt; None: the error is final."""
        if isinstance(error, ShardError) and error.stage == "read":
            return None  # of a `StoreReader`, which has tried again
        failure, past_s = failure_of(error), self._now() - request.began_s
        if failure.kind == "final":
            return None
        if failure.kind not in ("connection", "timeout"):
            self.hosts.add(request.url)
        answered = request.url in self.hosts
        decision = self.policy.next_attempt(request.url, failures, failure, past_s, answered=answered)
        reason = error.reason if isinstance(error, ShardError) else f"{type(error).__name__}: {error}"
        if decision.delay_s is None:
            times = "once" if failures == 1 else f"{failures} times"
            error.add_note(f"tried {times} in {past_s:.1f} s: {decision.reason}")
            self._given_up[host_of(request.url)] = without_secrets(reason)
            return None
        left_s = self.policy.patience_s(failure, answered=answered) - past_s
        request.state = f"{without_secrets(reason)}; asked again for {left_s:.0f} s (Ctrl-C ends that)"
        return decision.delay_s

    def _log_waits(self) -> None:
        due_s = sleep_s = self._notice_s
        while not self._ended.wait(sleep_s):
            with self._lock:
                running = list(self._running.values())
            past_s = self._now() - running[0].began_s if running else 0.0
            if past_s < due_s / 2:  # another one
                due_s = next_notice_s(past_s, self._notice_s)
            if past_s >= due_s:
                state = self._waiting() or running[0].state
                _log.warning("%s", printable(notice_of(running[0].url, state, past_s, len(running) - 1)))
                due_s = next_notice_s(past_s, self._notice_s)
            sleep_s = due_s - past_s


def notice_of(url: str, state: str, past_s: float, others: int) -> str:
    """The line that tells of a request, and of how many others there are."""
    more = f" (and {others} more)" if others else ""
    return f"waiting {past_s:.0f} s for {identity_of(url)}{more}: {state}"
