"""Ask a store again until it answers: for requests that are small and give all or nothing.

Size and version of a shard, or its headers while it is indexed. Which failures are worth it, and for how
long, `prefetch.retries` decides; reads of ranges, which can be continued, are in `prefetch.store`.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from prefetch.retries import RetryPolicy, failure_of

R = TypeVar("R")

_TELL_S = 3.0
"""After so many seconds without an answer a person is told."""


def until_answered(
    call: Callable[[], R],
    *,
    policy: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
    told: threading.Event | None = None,
    now: Callable[[], float] = time.monotonic,
    wait: Callable[[float], bool] | None = None,
) -> R:
    """What `call` returns, or what it raised last, with a note that counts the attempts. Thread-safe.

    Warns once when there was no success for `_TELL_S`: an address may be mistyped.
    `told`: shared by those who ask at the same time; whether one of them did. `wait` waits so many seconds,
    and says whether to give up. Ctrl-C ends a wait in the main thread.
    """
    told = told or threading.Event()
    pause = wait or threading.Event().wait
    began_s, failures = now(), 0
    while True:
        try:
            return call()
        except Exception as error:
            failures += 1
            decision = policy.next_attempt(repr(call), failures, failure_of(error), now() - began_s)
            if decision.delay_s is None:
                if failures > 1:
                    error.add_note(f"tried {failures} times in {now() - began_s:.1f} s: {decision.reason}")
                raise
            if now() + decision.delay_s - began_s >= _TELL_S and not told.is_set():
                told.set()
                left_s = policy.deadline_s - (now() - began_s)
                warnings.warn(
                    f"a store fails, and is asked again for {left_s:.0f} s (Ctrl-C ends that): {error}",
                    stacklevel=2,
                )
            if pause(decision.delay_s):
                raise


@contextmanager
def asking_pool(num_threads: int, name: str) -> Iterator[tuple[Executor, Callable[[Callable[[], Any]], Any]]]:
    """Threads, and `until_answered` for what runs in them: an error or Ctrl-C in the block ends its waits."""
    ended = threading.Event()
    with ThreadPoolExecutor(num_threads, thread_name_prefix=name) as pool:
        try:
            yield pool, partial(until_answered, wait=ended.wait, told=threading.Event())
        except BaseException:
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


__all__ = ["asking_pool", "until_answered"]
