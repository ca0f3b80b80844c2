"""Every strategy inside `GradSchedule`: replicas agree, resumed runs are the uninterrupted ones."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_kit import RankSet
from strategies_kit import BUCKET_MB, apart, mlp, spread
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dataflow import GradSchedule
from dataflow.grad import strategies

WINDOWS, ACCUMULATE = 6, 2
two = RankSet(2)
MAKERS: dict[str, Any] = {
    "all-reduce": strategies.AllReduce,
    "fp16": lambda: strategies.Half("fp16"),
    "bf16": lambda: strategies.Half("bf16"),
    "power-sgd": lambda: strategies.PowerSGD(2, start_step=2),
    "hierarchical": lambda: strategies.Hierarchical("leaders"),
    "top-k": lambda: strategies.TopK(0.1, warmup_steps=2),
    "int8": strategies.Int8,
    "delayed": strategies.Delayed,
    "local-sgd": lambda: strategies.LocalSGD(2),
    "diloco": lambda: strategies.DiLoCo(2),
    "post-local-sgd": lambda: strategies.PostLocalSGD(2, start_step=1),
}
EXACT = ("hierarchical",)
"""What gives the all-reduce's numbers to rounding."""


def batches_of(rank: int, *, poisoned: bool = False) -> list[tuple[Tensor, Tensor]]:
    """`poisoned`: one window more, so that as many steps are taken although the second is skipped."""
    draw = torch.Generator().manual_seed(rank)
    made = [
        (torch.randn(3, 12, generator=draw).double(), torch.randn(3, 4, generator=draw).double())
        for _ in range((WINDOWS + poisoned) * ACCUMULATE)
    ]
    if poisoned and rank == 1:
        made[3][0][0, 0] = math.inf
    return made


def trained(
    name: str,
    batches: Any,
    saved: Any = None,
    *,
    until: int = WINDOWS,
    scaler: Any = None,
    buffers: bool = False,
) -> tuple[Any, Any, list[bool]]:
    """Parameters and what to resume with after so many windows in all, and which were skipped.

    `buffers`: the model has some that differ between ranks, and each rank loads its own.
    """
    torch.manual_seed(3)
    model = nn.Sequential(nn.BatchNorm1d(12).double(), mlp()) if buffers else mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    if saved is not None and buffers:
        model.load_state_dict(saved["model"])
    skipped = []
    with GradSchedule(batches, ddp, optimizer, ACCUMULATE, strategy=MAKERS[name](), scaler=scaler) as sched:
        if saved is not None:
            sched.load_state_dict(saved["sched"])
        for inputs, wanted in sched:
            sched.backward((ddp(inputs) - wanted).square().mean() * sched.scale())
            if info := sched.step():
                skipped.append(info.skipped)
                if sched.position.window == until:
                    break
        kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sched": sched.state_dict()}
        kept = copy.deepcopy(kept)
    return [parameter.detach().clone() for parameter in model.parameters()], kept, skipped


@two.add
def every_strategy() -> dict[str, dict[str, float]]:
    rank, found = dist.get_rank(), {}
    whole = {name: trained(name, batches_of(rank))[0] for name in MAKERS}
    for name, parameters in whole.items():
        _, half, _ = trained(name, batches_of(rank), until=3)
        resumed, _, _ = trained(name, batches_of(rank)[3 * ACCUMULATE :], half)
        poisoned, _, skipped = trained(name, batches_of(rank, poisoned=True), until=WINDOWS + 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
        scaled, _, _ = trained(name, batches_of(rank), scaler=scaler)
        found[name] = {
            "from scaled": apart(parameters, scaled),
            "scale": scaler.get_scale(),
            "between ranks": spread(parameters),
            "resumed": apart(resumed, parameters),
            "from all-reduce": apart(parameters, whole["all-reduce"]),
            "between ranks after a skipped step": spread(poisoned),
            "skipped": sum(skipped),
            "finite": all(bool(torch.isfinite(each).all()) for each in poisoned),
        }
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, dict[str, float]]]:
    return two.results(every_strategy)


@pytest.mark.parametrize("name", MAKERS)
def test_replicas_are_equal_at_the_end(found: Any, name: str) -> None:
    assert [rank[name]["between ranks"] for rank in found] == [0, 0]


@pytest.mark.parametrize("name", MAKERS)
def test_a_resumed_run_is_the_uninterrupted_one(found: Any, name: str) -> None:
    assert [rank[name]["resumed"] for rank in found] == [0, 0]


@two.add
def states_with_buffers() -> dict[str, tuple[bool, list[float]]]:
    """Whether a resumed run ends with the whole one's model, buffers included; its running mean."""
    rank, found = dist.get_rank(), {}
    for name in ("all-reduce", "delayed", "local-sgd", "post-local-sgd"):
        _, whole, _ = trained(name, batches_of(rank), buffers=True)
        _, half, _ = trained(name, batches_of(rank), until=3, buffers=True)
        _, resumed, _ = trained(name, batches_of(rank)[3 * ACCUMULATE :], half, buffers=True)
        pairs = zip(resumed["model"].values(), whole["model"].values(), strict=True)
        same = all(bool((a == b).all()) for a, b in pairs)
        found[name] = same, whole["model"]["0.running_mean"].tolist()
    return found


def test_buffers_of_a_resumed_run_are_those_of_the_uninterrupted_one_on_every_rank() -> None:
    first, second = two.results(states_with_buffers)
    for name in first:
        assert (first[name][0], second[name][0]) == (True, True), name
        assert first[name][1] != second[name][1]


@pytest.mark.parametrize("name", MAKERS)
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(found: Any, name: str) -> None:
    for rank in found:
        assert rank[name]["finite"]
        assert rank[name]["skipped"] == 1
        assert rank[name]["between ranks after a skipped step"] == 0


@pytest.mark.parametrize("name", MAKERS)
def test_a_scale_that_doubles_each_step_changes_nothing(found: Any, name: str) -> None:
    for rank in found:
        assert rank[name]["scale"] == 2.0 ** (1 + WINDOWS)
        assert rank[name]["from scaled"] < 1e-6  # fp16 rounds small values less, PowerSGD has an epsilon


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_strategy_gives_what_the_all_reduce_gives(found: Any, name: str) -> None:
    assert [rank[name]["from all-reduce"] for rank in found] == pytest.approx([0, 0], abs=1e-12)


def test_lossy_strategies_do_change_the_numbers(found: Any) -> None:
    assert all(found[0][name]["from all-reduce"] > 1e-6 for name in ("top-k", "int8", "local-sgd", "delayed"))
