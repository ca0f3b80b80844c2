"""The end of a program: a schedule's DDP gives gloo's threads back, whatever they are doing."""

from __future__ import annotations

import sys
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # or DDP's first import of it keeps the group, as default arguments
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dataflow.grad.wrapper import wrapper_of
from dataflow.testing import run_ranks


def end_while_a_thread_of_gloo_wants_the_interpreter_lock() -> bool:
    """Whether the thread got the lock while the model was let go of."""
    sys.setswitchinterval(1000)  # the lock goes from thread to thread only where it is given away
    model = DistributedDataParallel(nn.Linear(2, 2))
    handle = wrapper_of(model)
    # Of the default store, which outlives the group.
    store = dist.distributed_c10d._get_default_store()
    called, go_on, lock_again = Event(), Event(), Event()

    def in_gloo(_: Any) -> None:
        called.set()
        go_on.wait(30)
        lock_again.set()

    if dist.get_rank() == 1:
        store.get("the other has its callback")
        dist.all_reduce(torch.ones(2))
        dist.destroy_process_group()
        return True
    work = dist.all_reduce(torch.ones(2), async_op=True)
    done = work.get_future().then(in_gloo)
    store.set("the other has its callback", "yes")
    assert called.wait(30)
    go_on.set()
    dist.destroy_process_group()
    del work, done, handle, model  # waits for the thread
    return lock_again.is_set()


def test_letting_go_of_a_ddp_model_does_not_wait_for_a_thread_with_the_lock_held() -> None:
    work = end_while_a_thread_of_gloo_wants_the_interpreter_lock
    assert run_ranks(work, 2, start_method="forkserver") == [True, True]
