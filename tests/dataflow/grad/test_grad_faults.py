"""What goes wrong on one rank, as the other ranks see it."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_kit import OLD_TORCH, RankSet
from grad_kit import go_on_in_mode
from parameters_kit import in_full
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dataflow import GradSchedule
from dataflow.grad.agreement import Consensus, DisagreementError, RankLostError
from dataflow.grad.step import UnevenRanksError
from dataflow.grad.strategies import DiLoCo, Hierarchical
from dataflow.grad.strategies.all_reduce import AllReduce
from dataflow.testing import run_ranks

FAST: Any = {"start_method": "forkserver"}
two = RankSet(2)
DYING = 2


def die() -> None:
    """What the others see of a death: every connection of this process is closed."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if connection.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                    connection.shutdown(socket.SHUT_RDWR)


def in_new_groups(function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What the function returns for each case: what dies or hangs in one leaves its group unusable."""
    results = []
    for number, case in enumerate(cases):
        port, rank, world_size = (int(os.environ[name]) for name in ("MASTER_PORT", "RANK", "WORLD_SIZE"))
        store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
        own = dist.PrefixStore(f"case {number}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)
        results.append(function(*case))
        dist.destroy_process_group()
    return results


@cache
def results_of_cases(
    world_size: int, function: Callable[..., Any], *cases: tuple[Any, ...]
) -> dict[tuple[Any, ...], list[Any]]:
    """What each rank returned for each case; all in the same processes."""
    ranks = run_ranks(in_new_groups, world_size, args=(function, cases), backend=None, timeout_s=100, **FAST)
    return dict(zip(cases, zip(*ranks, strict=True), strict=True))  # type: ignore[arg-type]


def train_until(place: str, kind: str, known: bool) -> tuple[str, tuple[int, ...], float]:
    """Train; one rank dies in the second window. Returns the error's name, the ranks it names, seconds."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped: nn.Module = fully_shard(model) if kind == "fsdp" else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.ones(2, 4)] * 12
    weights: Any = {} if known else {"samples": len}
    began = time.monotonic()
    try:
        with GradSchedule(data, wrapped, optimizer, 3, weights=weights, timeout_s=30) as sched:
            for number, batch in enumerate(sched):
                dying = rank == DYING and number == {"compute": 3, "sync": 5}[place]
                if dying and place == "compute":
                    die()
                out = wrapped(batch)
                if dying:
                    out.register_hook(lambda gradient: (die(), gradient)[1])
                sched.backward(out.sum() * sched.scale())
                sched.step()
    except Exception as error:
        return type(error).__name__, getattr(error, "ranks", ()), time.monotonic() - began
    return "nothing", (), 0.0


DEATHS = (("compute", "ddp", False), ("sync", "fsdp", True))
MORE_DEATHS = (("sync", "ddp", False), ("sync", "ddp", True), ("compute", "fsdp", False))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", [*DEATHS, *in_full(*MORE_DEATHS)])
def test_the_others_name_a_rank_that_died(case: tuple[str, str, bool]) -> None:
    cases = DEATHS if case in DEATHS else MORE_DEATHS
    results = results_of_cases(4, train_until, *cases)[case]
    for rank, (name, ranks, seconds) in enumerate(results):
        if rank != DYING:
            assert (name, ranks) == ("RankLostError", (DYING,))
            assert seconds < 20  # groups would wait for 30 s and for 30 minutes


def lose_a_rank_while_a_window_is_decided() -> str:
    """Parameters that have drifted apart are averaged there, and microbatches merged, as here."""

    def merge(batches: list[torch.Tensor]) -> torch.Tensor:
        if dist.get_rank() == 1:
            die()
            raise RuntimeError("dead")  # it would wait for connections that were not there yet
        dist.all_reduce(torch.ones(1))
        return torch.cat(batches)

    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adapt: Any = {"accumulate": [1], "merge": merge}
    sched = GradSchedule([torch.ones(1, 1)] * 2, model, optimizer, 2, adapt=adapt, timeout_s=30)
    go_on_in_mode(sched, 1)
    try:
        next(iter(sched))
    except (RuntimeError, RankLostError) as error:
        return str(error)
    return "nothing"


def test_a_rank_lost_while_a_window_is_decided_is_named() -> None:
    assert run_ranks(lose_a_rank_while_a_window_is_decided, 2, **FAST)[0].startswith("rank 1 died")


def close_after_a_loss() -> bool:
    agreement = Consensus(range(2), timeout_s=30)
    group = agreement.group
    agreement.gathered(0)  # all connections are there
    if dist.get_rank() == 1:
        die()
        return True
    with pytest.raises(RankLostError):
        agreement.gathered(1)
    agreement.close()
    return dist.get_backend(group) == "gloo"  # `ValueError` for one that was destroyed


def test_a_group_is_not_destroyed_after_a_loss_as_its_end_would_wait_for_what_is_in_flight() -> None:
    assert all(run_ranks(close_after_a_loss, 2, **FAST))


def wait_for_a_rank_that_does_not_come() -> str:
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sched = GradSchedule([torch.ones(1, 1)] * 2, model, optimizer, 1, weights={"n": len}, timeout_s=0.5)
    if rank == 1:
        store.wait(["seen/0", "seen/2"], timedelta(seconds=20))
        return ""
    with pytest.raises(RankLostError) as caught:
        next(iter(sched))
    assert caught.value.ranks == (1,), str(caught.value)
    store.set(f"seen/{rank}", "")
    return str(caught.value)


def test_a_rank_that_does_not_come_in_time_is_named() -> None:
    said = run_ranks(wait_for_a_rank_that_does_not_come, 3, **FAST)
    assert "rank 1 did not come in time" in said[0] + said[2]


ALONE: dict[str, dict[str, Any]] = {
    "a collective after another's time-out": {"weights": {"n": len}},  # the offer for the next window
    "nothing before the end": {"skip_nonfinite": False},
}
"""Schedules of ranks that step alone, by what the others wait in."""


def wait_for_gradients_of_a_rank_that_hangs(kind: str) -> tuple[str, tuple[int, ...], float]:
    """Rank 1 hangs in its first forward pass; lengths are known, so nobody agrees on anything there.

    But where ranks step alone.
    """
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped: nn.Module = fully_shard(model) if kind == "fsdp" else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy: Any = DiLoCo() if kind in ALONE else Hierarchical() if kind == "by node" else AllReduce()
    data, more = [torch.ones(2, 4)] * (4 if kind in ALONE else 2), ALONE.get(kind, {})
    began = time.monotonic()
    try:
        with GradSchedule(data, wrapped, optimizer, 2, strategy=strategy, timeout_s=0.5, **more) as sched:
            for batch in sched:
                if rank == 1:
                    store.wait(["seen/0", "seen/2"], timedelta(seconds=20))
                    return "", (), 0.0
                sched.backward(wrapped(batch).sum())
                sched.step()
    except RankLostError as error:
        store.set(f"seen/{rank}", "")
        return str(error), error.ranks, time.monotonic() - began
    return "nothing", (), 0.0


HANGS = (("ddp",), ("fsdp",), ("by node",), *((kind,) for kind in ALONE))[OLD_TORCH:]
"""DDP of an older torch does not ask for the time-out that the group has now."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", HANGS)
def test_a_rank_that_hangs_while_it_computes_is_named_within_the_deadline(case: tuple[str]) -> None:
    said = results_of_cases(3, wait_for_gradients_of_a_rank_that_hangs, *HANGS)[case]
    for text, ranks, seconds in (said[0], said[2]):
        assert ranks == (1,)
        assert "did not come in time" in text
        assert seconds < 15  # the group would wait for 30 minutes


@two.add
def time_out_of_the_group() -> list[float]:
    """In a forward pass, after a backward pass, and after a loop that is left."""
    model = DistributedDataParallel(nn.Linear(1, 1))
    seen = []
    with GradSchedule(
        [torch.ones(1, 1)] * 2, model, torch.optim.SGD(model.parameters(), 0.1), timeout_s=7
    ) as sched:
        for batch in sched:
            seen.append(time_out_s(model))
            if sched.position.window == 1:
                break
            sched.backward(model(batch).sum())
            seen.append(time_out_s(model))
            sched.step()
        del batch
        seen.append(time_out_s(model))
    return seen


def time_out_s(model: DistributedDataParallel) -> float:
    return float(model.process_group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def test_only_a_microbatch_lowers_the_time_out_of_the_programs_group() -> None:
    assert two.results(time_out_of_the_group) == [[7, 1800, 7, 1800]] * 2


class Other(AllReduce):
    key = "other"


@two.add
def disagree() -> dict[str, str]:
    """Several disagreements, one after the other: each leaves the ranks as they were."""
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.ones(1, 1)] * (4 if rank else 3)

    def made(**arguments: Any) -> GradSchedule:
        return GradSchedule(data, model, optimizer, **{"accumulate": 2, **arguments})

    def train(sched: GradSchedule) -> None:
        for batch in sched:
            sched.backward(model(batch).sum() * sched.scale())
            sched.step()

    def loaded() -> None:
        sched = made(weights={"n": len})
        state = {**sched.state_dict(), "window": 5 + rank}
        sched.load_state_dict(state)
        train(sched)

    tried: dict[str, Any] = {
        "accumulate": lambda: made(accumulate=2 + rank),
        "strategy": lambda: made(strategy=Other() if rank else None),
        "weights": lambda: made(weights={"n": 1 + rank}),
        "window": loaded,
        "uneven": lambda: train(made(uneven="error")),
    }
    said = {}
    for name, attempt in tried.items():
        with pytest.raises((DisagreementError, UnevenRanksError)) as caught:
            attempt()
        said[name] = str(caught.value)
    return said


def test_ranks_that_do_different_things_are_told_so_with_their_values() -> None:
    expected = {
        "accumulate": "ranks disagree on accumulate: 2 on rank 0; 3 on rank 1",
        "strategy": "ranks disagree on strategy: 'all-reduce' on rank 0; 'other' on rank 1",
        "weights": "ranks disagree on weights: {'n': 1.0} on rank 0; {'n': 2.0} on rank 1",
        "window": "ranks disagree on window: 5 on rank 0; 6 on rank 1",
    }
    for said in two.results(disagree):
        assert "rank 0 has 1, rank 1 has 2" in said.pop("uneven")
        assert said == expected


def lie_about_length() -> str:
    class Loader(list[Any]):
        def __len__(self) -> int:
            return 5

    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = Loader([torch.ones(1, 1)] * (5 - rank))
    try:
        with ExitStack() as stack:
            sched = stack.enter_context(GradSchedule(loader, model, optimizer, 2))
            for batch in sched:
                sched.backward(model(batch).sum() * sched.scale())
                sched.step()
    except RuntimeError as error:
        die()
        return str(error)
    except RankLostError as error:
        return str(error)
    return ""


def test_a_loader_with_a_wrong_length_is_named_and_hangs_nobody() -> None:
    first, second = run_ranks(lie_about_length, 2, **FAST)
    assert "the loader said 5 batches in this epoch and gave 4" in second
    assert "rank 1 died" in first
