"""One thread of torch in each of ours: its own pool on top would run cores squared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def one_torch_thread() -> None:
    """Let torch's operations in the calling thread run on that thread alone."""
    # torch keeps this setting per thread, and remembers the last one for threads to come; `setting_kept`
    # sets that back. Asking first makes this thread take over the remembered number now, instead of at its
    # first operation, which would undo the setting.
    torch.get_num_threads()
    torch.set_num_threads(1)


@contextmanager
def setting_kept() -> Iterator[None]:
    """Around starting threads that call `one_torch_thread`."""
    number = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(number)


def run_with_one_torch_thread(task: Callable[[], None]) -> None:
    """Run a task in a thread of the user's, as in one of ours."""
    number = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # inside: a Ctrl-C may come right after it
        task()
    finally:
        torch.set_num_threads(number)
