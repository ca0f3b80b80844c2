"""Ask a store again until it answers: for requests that are small and give all or nothing.

Size and version of a shard, or its headers while it is indexed. Which failures are worth it, and for how
long, `prefetch.retries` decides; reads of ranges, which can be continued, are in `prefetch.store`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from prefetch.retries import RetryPolicy, failure_of

R = TypeVar("R")


def until_answered(
    call: Callable[[], R],
    *,
    policy: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
    now: Callable[[], float] = time.monotonic,
    wait: Callable[[float], bool] | None = None,
) -> R:
    """What `call` returns, or what it raised last, with a note that counts the attempts. Thread-safe.

    `wait` waits so many seconds, and says whether to give up. Ctrl-C ends a wait in the main thread.
    """
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
            if pause(decision.delay_s):
                raise


@contextmanager
def asking_pool(num_threads: int, name: str) -> Iterator[tuple[Executor, Callable[[Callable[[], Any]], Any]]]:
    """Threads, and `until_answered` for what runs in them: an error or Ctrl-C in the block ends its waits."""
    ended = threading.Event()
    with ThreadPoolExecutor(num_threads, thread_name_prefix=name) as pool:
        try:
            yield pool, partial(until_answered, wait=ended.wait)
        except BaseException:
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


__all__ = ["asking_pool", "until_answered"]
