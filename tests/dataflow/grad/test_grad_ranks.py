"""Two ranks: replays, agreements that are not needed, hooks of strategies, going on with fewer ranks."""

from __future__ import annotations

import gc
import json
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets_kit import make_ints_tar
from elastic_kit import train_from
from forked_kit import RankSet
from grad_kit import Case, Result, as_large_batches, batches_of, plain_values, run_cases, sample_loss, wrapped
from programs_kit import run_script
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dataflow import DataLoader, GradSchedule
from dataflow.grad.step import UnevenRanksError
from dataflow.grad.strategies import Half, Hierarchical, Int8, PowerSGD, TopK
from dataflow.grad.strategies.all_reduce import AllReduce
from dataflow.grad.strategies.strategy import StrategyContext
from dataflow.testing import run_ranks

FAST: Any = {"start_method": "forkserver"}
two = RankSet(2)

CASES = {
    "constant weights": Case((6, 6), normalisers=("microbatches",)),
    "constant weights, uneven": Case((7, 4), normalisers=("microbatches",)),
    "unused, known": Case((6, 6), "unused", normalisers=("microbatches",)),
    "unused, uneven": Case((7, 4), "unused", normalisers=("microbatches",)),
    "infinite, then nothing": Case((6, 1), bad=(1, 0), momentum=0.9),
    "min": Case((7, 4), uneven="min"),
    "min of nothing": Case((7, 0), uneven="min"),
    "drop": Case((7, 4), partial="drop"),
}


@two.add
def cases() -> dict[str, Result]:
    return run_cases(CASES)


def worst(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def test_windows_of_known_lengths_need_no_agreement() -> None:
    for rank in two.results(cases):
        assert rank["constant weights"].exchanges == 1  # as the epoch begins
        assert rank["constant weights, uneven"].exchanges == 1 + 3
        assert rank["drop"].exchanges == 3


def test_only_windows_with_a_replay_ask_which_parameters_were_reached() -> None:
    for rank in two.results(cases):
        assert rank["unused, known"].exchanges == 1
        assert rank["unused, uneven"].exchanges == 1 + 3 + 1


def test_a_batch_that_was_not_finite_is_never_replayed() -> None:
    expected = as_large_batches(CASES["infinite, then nothing"])
    assert expected.skipped == [True, False]
    for rank, result in enumerate(two.results(cases)):
        found = result["infinite, then nothing"]
        assert (found.skipped, found.replays) == ([True, False], rank)
        assert worst(found.parameters, expected.parameters) < 1e-12


@pytest.mark.parametrize(
    ("name", "same", "left_out"),
    [
        ("min", Case((4, 4)), (2, 0)),  # the last batch of rank 0 was never taken
        ("min of nothing", Case((0, 0)), (3, 0)),
        ("drop", Case((6, 4)), (1, 0)),
    ],
)
def test_what_is_left_out_changes_nothing_else(name: str, same: Case, left_out: tuple[int, ...]) -> None:
    expected = as_large_batches(same)
    for rank, result in enumerate(two.results(cases)):
        assert result[name].left_out == left_out[rank]
        assert result[name].totals == expected.totals
        assert worst(result[name].parameters, expected.parameters) < 1e-12


class Uneven:
    """A run whose epochs end with the shortest rank, over a sampler with a generator of its own."""

    def __init__(self, samples: tuple[int, ...]) -> None:
        data = torch.utils.data.TensorDataset(torch.arange(float(samples[dist.get_rank()])))
        self.model = DistributedDataParallel(nn.Linear(1, 1))
        loader = DataLoader(data, batch_size=1, shuffle=True, generator=torch.Generator().manual_seed(1))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.sched = GradSchedule(loader, self.model, optimizer, 2, uneven="min", timeout_s=10)
        self.windows: list[list[float]] = []
        self.states: list[tuple[int, str]] = []
        """With the windows before each."""

    def epoch(self) -> None:
        window: list[float] = []
        for [batch] in self.sched:
            window += batch.tolist()
            self.sched.backward(self.model(batch[:, None]).sum() * self.sched.scale())
            if self.sched.step():
                self.windows.append(window)
                self.save()
                window = []
        self.save()

    def save(self) -> None:
        self.states.append((len(self.windows), json.dumps(self.sched.state_dict())))


@two.add
def resumed_everywhere() -> list[str]:
    """Differences between runs and those resumed from each of their states, in loops and between them."""
    found = []
    for samples in [(7, 5), (6, 5), (7, 4), (6, 4)]:
        whole = Uneven(samples)
        whole.epoch()
        states = list(whole.states)
        whole.epoch()
        for cut, state in states:
            resumed = Uneven(samples)
            resumed.sched.load_state_dict(json.loads(state))
            while resumed.sched.position.window < whole.sched.position.window:
                resumed.epoch()
            if resumed.windows != whole.windows[cut:]:
                found.append(f"{samples} after window {cut}: {resumed.windows}, not {whole.windows[cut:]}")
            if resumed.sched.position != whole.sched.position:
                found.append(f"{samples} after window {cut}: {resumed.sched.position}")
            resumed.sched.close()
        whole.sched.close()
    return found


def test_a_run_resumed_around_an_epoch_that_ends_early_equals_one_that_was_not() -> None:
    assert two.results(resumed_everywhere) == [[], []]


# ---- replays and what must not notice them --------------------------------------------------------------


@two.add
def averages_of_batch_norm() -> tuple[list[float], int]:
    """Rank 0 runs four batches, rank 1 one; every window ends on both."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).double()
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    data = [torch.tensor([[1.0], [3.0 + i]], dtype=torch.float64) for i in range((4, 1)[rank])]
    sched = GradSchedule(data, ddp, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    for batch in sched:
        sched.backward(ddp(batch).sum() * sched.scale())
        sched.step()
    return model[0].running_mean.tolist(), int(model[0].num_batches_tracked)  # type: ignore[union-attr,operator]


def test_replays_move_no_running_statistics() -> None:
    first, second = two.results(averages_of_batch_norm)
    assert first[1] == 4
    assert second == ([0.1 * 2.0], 1)


# ---- strategies -----------------------------------------------------------------------------------------


class Hooked(AllReduce):
    """Averages by hand, over the private group, and notes what it is told."""

    name = key = "hooked"
    hooks_gradients = True

    def setup(self, context: StrategyContext) -> None:
        self.context, self.told = context, list[Any]()

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        self.told.append("reduce")
        assert self.context.group is not None
        work = dist.all_reduce(bucket.buffer(), group=self.context.group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / self.context.world_size)

    def before_step(self, step: int) -> None:
        self.told.append(("before", step))

    def after_step(self, step: int, *, skipped: bool) -> None:
        self.told.append(("after", step, skipped))

    def lr_changed(self, ratio: float) -> None:
        self.told.append(("lr", round(ratio, 12)))


@two.add
def run_hooked() -> tuple[list[Any], list[Tensor], bool]:
    from grad_kit import batches_of, plain_values, token_loss

    case = Case((3, 2), accumulate=2)
    model, optimizer, lr = wrapped(case)
    weights = {"tokens": lambda b: b["tokens"].sum()}
    strategy = Hooked()
    data = batches_of(dist.get_rank(), case)
    sched = GradSchedule(data, model, optimizer, 2, weights=weights, lr=lr, strategy=strategy)
    for batch in sched:
        sched.backward(token_loss(model(batch["x"]), batch) * sched.scale("tokens"))
        sched.step()
    told = list(strategy.told)
    for batch in sched:
        model(batch["x"])
        assert isinstance(model, DistributedDataParallel)
        off = not model.require_backward_grad_sync
        break
    del batch
    restored = off and model.require_backward_grad_sync
    return told, plain_values(model.parameters()), restored


def test_a_strategy_is_called_in_order_and_switches_are_set_back_when_a_loop_is_left() -> None:
    expected = as_large_batches(Case((3, 2), accumulate=2))
    for told, parameters, restored in two.results(run_hooked):
        calls = [call for call in told if call != "reduce"]
        assert told[0] == "reduce"
        assert calls == [
            ("before", 0),
            ("after", 0, False),
            ("lr", 0.9),
            ("before", 1),
            ("after", 1, False),
        ]
        assert worst(parameters, expected.parameters) < 1e-12
        assert restored


def counting_alone(wrap: str) -> float:
    """Three batches in windows of two, in a loop that counts itself: how far it is from large batches."""
    case = Case((3, 3), wrap, accumulate=2, normalisers=("samples",))
    model, optimizer, lr = wrapped(case)
    batches = [batch["x"] for batch in batches_of(dist.get_rank(), case)]
    with GradSchedule(batches, model, optimizer, 2, weights={"samples": len}, lr=lr) as sched:
        for number, x in enumerate(sched, 1):
            waits = number % 2 != 0  # wrong for the third, which is the last of its window
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(not waits)
            with model.no_sync() if waits and wrap == "ddp" else nullcontext():  # type: ignore[operator]
                sched.backward(sample_loss(model(x)) * sched.scale("samples"))
            sched.step()
    return worst(plain_values(model.parameters()), as_large_batches(case).parameters)


@two.add
def loops_that_count_alone() -> tuple[str, float]:
    with pytest.raises(RuntimeError) as caught:
        counting_alone("ddp")
    return str(caught.value), counting_alone("fsdp")


def test_a_loop_that_switches_reductions_itself_is_told_or_has_no_say() -> None:
    for said, apart in two.results(loops_that_count_alone):
        assert "leave no_sync out of the loop" in said
        assert apart < 1e-12


# ---- what is refused ------------------------------------------------------------------------------------


@two.add
def refusals() -> dict[str, str]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked = DistributedDataParallel(nn.Linear(1, 1))
    hooked.register_comm_hook(None, lambda _, bucket: bucket.buffer())
    mixed = DistributedDataParallel(nn.Linear(1, 1))
    mixed.module.add_module("late", nn.SyncBatchNorm(1))  # DDP refuses one on the CPU
    of_mixed = torch.optim.SGD(mixed.parameters(), lr=0.1)
    earlier = DistributedDataParallel(nn.Linear(1, 1))
    of_earlier = torch.optim.SGD(earlier.parameters(), lr=0.1)
    GradSchedule([], earlier, of_earlier, strategy=Half("bf16")).close()
    sharded = nn.Linear(1, 1)
    before = torch.optim.SGD(sharded.parameters(), lr=0.1)
    fully_shard(sharded)
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    besides = torch.optim.SGD([*ddp.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)
    ignoring = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    fully_shard(ignoring, ignored_params=set(ignoring[0].parameters()))
    scalar = DistributedDataParallel(nn.ParameterList([torch.ones(())]))
    of_scalar = torch.optim.SGD(scalar.parameters(), lr=0.1)
    rows = DistributedDataParallel(nn.Sequential(nn.Embedding(2, 1, sparse=True)))
    turned = DistributedDataParallel(nn.Linear(1, 1, dtype=torch.complex64))
    of_turned = torch.optim.SGD(turned.parameters(), lr=0.1)
    said = {}
    tried: dict[str, Any] = {
        "plain": lambda: GradSchedule([], model, optimizer),
        "hook": lambda: GradSchedule([], hooked, optimizer),
        "inner": lambda: GradSchedule([], nn.Sequential(hooked), optimizer),
        "fsdp1": lambda: GradSchedule(
            [], FullyShardedDataParallel(nn.Linear(1, 1), device_id=torch.device("cpu")), optimizer
        ),
        "strategy": lambda: GradSchedule([], *wrapped(Case((1, 1), "fsdp"))[:2], strategy=Hooked()),
        "earlier": lambda: GradSchedule([], earlier, of_earlier),
        "before": lambda: GradSchedule([], sharded, before),
        "besides": lambda: GradSchedule([], ddp, besides),
        "ignored": lambda: GradSchedule([], ignoring, torch.optim.SGD(ignoring.parameters(), lr=0.1)),
        "sparse": lambda: GradSchedule([], rows, torch.optim.SGD(rows.parameters(), lr=0.1), strategy=Int8()),
        "no matrix": lambda: GradSchedule([], scalar, of_scalar, strategy=PowerSGD()),
        "complex": lambda: GradSchedule([], turned, of_turned, strategy=TopK()),
        "complex, by factors": lambda: GradSchedule([], turned, of_turned, strategy=PowerSGD()),
        "sync-bn": lambda: next(
            iter(GradSchedule([torch.ones(1, 1)] * (1 - dist.get_rank()), mixed, of_mixed, 1))
        ),
    }
    for name, attempt in tried.items():
        with pytest.raises((ValueError, UnevenRanksError)) as caught:
            attempt()
        said[name] = str(caught.value)
    return said


def test_combinations_that_cannot_be_exact_are_refused() -> None:
    expected = {
        "plain": "there are 2 ranks",
        "hook": "DDP has a communication hook already",
        "inner": "give that module",
        "fsdp1": "use fully_shard",
        "strategy": "needs DistributedDataParallel's hook, got a FSDP2 model",
        "earlier": "in a new DistributedDataParallel",
        "before": "after fully_shard, which replaces them",
        "besides": "parameter of shape (3,) whose gradients nobody averages",
        "ignored": "parameter of shape (2, 1) whose gradients nobody averages",
        "sparse": "int8 needs dense gradients, and '0' makes sparse ones",
        "no matrix": "'0' of shape () cannot be",
        "complex": "top-k needs real gradients, and 'weight' is complex",
        "complex, by factors": "power-sgd needs real gradients, and 'weight' is complex",
        "sync-bn": "SyncBatchNorm would mix",
    }
    for said in two.results(refusals):
        assert {name: text in said[name] for name, text in expected.items()} == dict.fromkeys(expected, True)


def is_kept(strategy: Any) -> bool:
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradSchedule([torch.ones(1, 1)], model, optimizer, strategy=strategy) as sched:
        for batch in sched:
            sched.backward(model(batch).sum())
            sched.step()
    kept = weakref.ref(model)
    del model, optimizer, sched, strategy
    gc.collect()
    return kept() is not None


@two.add
def models_kept() -> list[bool]:
    return [is_kept(AllReduce()), is_kept(Half("bf16")), is_kept(Int8())]


def test_a_closed_schedule_with_a_hook_keeps_no_model() -> None:
    assert two.results(models_kept) == [[False] * 3] * 2


def schedules_on_a_part_of_the_ranks() -> list[float]:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half, totals = halves[dist.get_rank() // 2], []
    for strategy in (AllReduce(), AllReduce(), Int8(), AllReduce()):
        model = DistributedDataParallel(nn.Linear(1, 1), process_group=half)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = [torch.ones(1 + dist.get_rank(), 1)]
        with GradSchedule(
            data, model, optimizer, weights={"n": len}, strategy=strategy, timeout_s=10
        ) as sched:
            for batch in sched:
                sched.backward(model(batch).sum() * sched.scale("n"))
                totals.append(sched.step().totals["n"])  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="reducing by node needs a model on all ranks"):
        GradSchedule([], model, optimizer, strategy=Hierarchical(), timeout_s=10)
    return totals


def test_schedules_follow_one_another_on_a_part_of_the_ranks() -> None:
    first, *_, last = run_ranks(schedules_on_a_part_of_the_ranks, 4, **FAST)
    assert (first, last) == ([3.0] * 4, [7.0] * 4)


# ---- going on with another number of ranks --------------------------------------------------------------


def test_a_run_goes_on_with_fewer_ranks_over_the_same_windows(tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        make_ints_tar(tmp_path / name)
    expected, parameters = train_from(tmp_path / "whole", 4)
    before = run_ranks(train_from, 2, args=(tmp_path / "cut", 2), **FAST)
    windows = [sorted(a + b) for a, b in zip(before[0][0], before[1][0], strict=True)]
    after, resumed = train_from(tmp_path / "cut", 4)
    assert windows + [sorted(window) for window in after] == [sorted(window) for window in expected]
    assert worst(resumed, parameters) < 1e-12


RESTARTED = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from elastic_kit import train_from
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def train(folder):
    dist.init_process_group("gloo")
    torch.save(train_from(folder, 4, die_at=2), folder / f"rank-{dist.get_rank()}.pt")
    dist.destroy_process_group()

rendezvous = {"run_id": "restarted", "rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0"}
elastic_launch(
    LaunchConfig(1, 1, 2, max_restarts=1, monitor_interval=0.1, start_method="fork", **rendezvous), train
)(Path(sys.argv[1]))
"""
"""What torchrun does, with ranks that are forked from where torch is imported."""


@pytest.mark.full  # an example restarts on fewer ranks
def test_torchrun_restarts_a_run_whose_rank_was_killed_over_the_same_windows(tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        make_ints_tar(tmp_path / name)
    expected, parameters = train_from(tmp_path / "whole", 4)
    code, _, errors = run_script(
        RESTARTED,
        tmp_path / "cut",
        how="forked",
        folder=tmp_path,
        imported=("torch._dynamo", "elastic_kit", "torch.distributed.launcher.api"),
        variables={
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
    )
    assert code == 0, errors
    (first, ours), (second, _) = (torch.load(tmp_path / "cut" / f"rank-{rank}.pt") for rank in (0, 1))
    after = [sorted(a + b) for a, b in zip(first, second, strict=True)]
    assert 2 <= len(after) < 4
    assert after == [sorted(window) for window in expected[-len(after) :]]
    assert worst(ours, parameters) < 1e-12
