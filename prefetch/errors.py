"""Define the errors of reading ahead (those of shards are in `sharding.errors`), and when a wait is one."""

import traceback
from types import CodeType

from sharding.errors import DataflowError, SampleError

FIRST_NOTICE_S = 3.0
"""After so many seconds who waits says for what."""


class MemoryLimitError(DataflowError):
    """The memory limit cannot hold even the next window or batch alone."""


class SampleTooLargeError(SampleError, MemoryLimitError):
    """One sample, decoded, takes more than the memory limit. `on_error=` decides, as about all bad ones."""


class EngineClosedError(RuntimeError):
    """The engine was closed while a batch was awaited."""


class StallError(DataflowError):
    """No batch came within the time-out. Where nothing explains it, all threads' stacks are on stderr."""


class ReaderClosedError(DataflowError):
    """The reader was closed while it read."""


def next_notice_s(waited_s: float, first_s: float = FIRST_NOTICE_S) -> float:
    """Return when who waits says for what: after some seconds, then whenever the wait has doubled."""
    due_s = first_s
    while due_s <= waited_s:
        due_s *= 2
    return due_s


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error that is kept, and of those behind it: their frames hold batches."""
    errors = [error]
    for known in errors:  # which grows
        known.__traceback__ = None
        inner = known.exceptions if isinstance(known, BaseExceptionGroup) else ()
        linked = (cause for cause in (known.__cause__, known.__context__, *inner) if cause is not None)
        errors += [cause for cause in linked if not any(cause is other for other in errors)]


def failed_in(error: BaseException, caller: CodeType) -> str:
    """Return ", in" the function that `caller` has called, and of which object; "" if that is C code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    below = [frame.f_code for frame in frames].index(caller) + 1
    if below == len(frames):
        return ""
    code, kind = frames[below].f_code, type(frames[below].f_locals.get("self"))
    return f", in {code.co_name}" + (
        f" of {kind.__module__}.{kind.__qualname__}" if kind is not type(None) else ""
    )
