"""Claims on names in a folder, of which one process holds each and that die with it.

A claim is an exclusive `flock` on a named pipe. The kernel drops the lock when the holder closes the pipe or
dies, whichever way, so nothing has to be judged by age. A pipe and not a file, because waiting for a `flock`
can be neither bounded nor ended: a pipe tells those who have it open for reading that its last writer is
gone, which `poll` waits for beside the end of the loader. Forked children close their copies.

The pipe is removed with the claim; a lock on a removed pipe is no claim, so the path is looked at again once
the lock is held. What a killed process leaves is an empty pipe that the next one uses.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EEXIST
from functools import partial

from prefetch.memory.lifetimes import close_private, only_ours, open_private


class Claim:
    """Held until `release`."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    def release(self) -> None:
        """Let the next one have it. Idempotent."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.unlink(self._path)
        self.close()

    def close(self) -> None:
        """Close the descriptor; where it is the last copy, that gives the claim up."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            close_private(descriptor)


class Claims:
    """Takes claims in one folder. Thread-safe; two threads of one process exclude each other as well.

    Args:
        folder: exists; on a filesystem of this machine, shared by all who are to exclude each other.
        now: seconds on a clock that only goes forward.
    """

    def __init__(self, folder: str, *, now: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._now = folder, now
        self._closing = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @contextmanager
    def taken(self, name: str, *, patience_s: float) -> Iterator[Claim | None]:
        """Take a claim as `take` does, until the block is left."""
        claim = self.take(name, patience_s=patience_s)
        try:
            yield claim
        finally:
            if claim is not None:
                claim.release()

    def take(self, name: str, *, patience_s: float) -> Claim | None:
        """The claim on a file name, when its holder gives it up or dies.

        None: the holder, which may have been stopped, kept it for longer than `patience_s`, or `end` was
        called. Raises `OSError` where the filesystem has no named pipes or may not be written.
        """
        path = os.path.join(self._folder, name)
        until_s = self._now() + patience_s
        while True:
            descriptor = open_private(partial(_open_pipe, path))
            if _locked(descriptor):
                if _is_at(descriptor, path):
                    return only_ours(Claim(path, descriptor))
                close_private(descriptor)
                continue
            close_private(descriptor)  # while it is open, the holder's end would not show
            if not self._wait(path, until_s - self._now()):
                return None

    def _wait(self, path: str, patience_s: float) -> bool:
        """Until the claim may be free; False when patience is over."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return patience_s > 0
        try:
            with suppress(BlockingIOError):
                os.read(descriptor, 1)  # the end, as nobody writes: free
                return patience_s > 0
            waiting = select.poll()
            waiting.register(descriptor, select.POLLIN)
            waiting.register(self._closing, select.POLLIN)
            ready = waiting.poll(max(0.0, patience_s * 1000))
        finally:
            os.close(descriptor)
        return bool(ready) and all(number != self._closing for number, _ in ready)

    def end(self) -> None:
        """End all waits, now and later. Any thread; what is held stays held. Before `close`."""
        os.eventfd_write(self._closing, 1)

    def close(self) -> None:
        """Let go of all claims, when no thread takes any more."""
        os.close(self._closing)


def _open_pipe(path: str) -> int:
    while True:
        with suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # Open for both, so that it neither waits for a reader nor shows an end.
        with suppress(FileNotFoundError):  # its holder has just removed it
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
            raise FileExistsError(EEXIST, "there is a file of another kind", path)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        close_private(descriptor)
        raise
    return True


def _is_at(descriptor: int, path: str) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)
