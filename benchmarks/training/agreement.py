"""What a step of `GradSchedule` costs beside the same step written by hand.

    python -m benchmarks.training.agreement --json benchmarks/results/agreement.json

Two gloo ranks on this machine train a small model with DDP, two microbatches a step. Computing is a sleep of
20 ms a step, as a GPU's would be: what a step takes beyond that of the hand-written loop is the schedule's.
Arms take turns of some steps, each with one thing more than the one before: the loop by hand; a schedule
whose lengths and weights are known, so that ranks tell each other nothing; one with a weight that depends on
the batch, so that every window is agreed on in a reduction that travels while the window before computes;
and that with a controller (`adapt=`), too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.report import save_figures
from dataflow import GradSchedule
from dataflow.grad.strategies import Half
from dataflow.testing import run_ranks

STEP_S = 0.020
ACCUMULATE = 2
STEPS = 60
"""Of a turn; the first `WARM_UP` are left out."""
WARM_UP = 10
ARMS: dict[str, dict[str, Any] | None] = {
    "by hand": None,
    "nothing to agree on": {},
    "agreed weights": {"weights": {"samples": len}},
    "agreed weights and a controller": {
        "weights": {"samples": len},
        "adapt": {"compression": [Half("bf16")]},
    },
}


class Batches:
    """So many equal batches, known beforehand."""

    def __init__(self, count: int) -> None:
        self._count, self._batch = count, torch.ones(8, 64)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self._batch] * self._count)


def by_hand(ddp: Any, optimizer: torch.optim.Optimizer, ended: Callable[[], None]) -> None:
    for number, batch in enumerate(Batches(STEPS * ACCUMULATE), 1):
        boundary = number % ACCUMULATE == 0
        with nullcontext() if boundary else ddp.no_sync():
            loss = ddp(batch).square().mean() / ACCUMULATE
            time.sleep(STEP_S / ACCUMULATE)
            loss.backward()
        if boundary:
            norm = torch.nn.utils.get_total_norm([p.grad for p in ddp.parameters()])
            if torch.isfinite(norm):  # as GradSchedule by default
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            ended()


def scheduled(
    ddp: Any, optimizer: torch.optim.Optimizer, options: dict[str, Any], ended: Callable[[], None]
) -> None:
    with GradSchedule(Batches(STEPS * ACCUMULATE), ddp, optimizer, ACCUMULATE, **options) as sched:
        name = next(iter(sched.position.totals))
        for batch in sched:
            loss = ddp(batch).square().mean(1).sum() * sched.scale(name)
            time.sleep(STEP_S / ACCUMULATE)
            sched.backward(loss)
            if sched.step():
                ended()


def rank(repeats: int) -> dict[str, list[float]]:
    """Mean seconds of a step in each turn, by arm."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(repeats):
        for arm, options in ARMS.items():
            torch.manual_seed(0)
            ddp = DistributedDataParallel(
                torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
            )
            optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
            times: list[float] = []
            ended = lambda: times.append(time.perf_counter())  # noqa: B023, E731 - called within the turn
            dist.barrier()
            if options is None:
                by_hand(ddp, optimizer, ended)
            else:
                scheduled(ddp, optimizer, options, ended)
            kept = times[WARM_UP:]
            found[arm].append((kept[-1] - kept[0]) / (len(kept) - 1))
    return found


def t_interval(values: Sequence[float]) -> list[float]:
    """Mean with its 95 % interval (Student's t)."""
    from scipy import stats

    mean = statistics.fmean(values)
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return [round(number, 3) for number in (mean, mean - half, mean + half)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15, help="turns of each arm")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    turns = run_ranks(rank, 2, args=(asked.repeats,), timeout_s=300)[0]
    rows, before = [], turns["by hand"]
    for arm, seconds in turns.items():
        added = [1e3 * (one - other) for one, other in zip(seconds, before, strict=True)]
        step_ms, added_ms = statistics.median(seconds) * 1e3, statistics.median(added)
        interval = t_interval(added)
        print(f"{arm:32s} {step_ms:7.2f} ms; more than the one before: {added_ms:5.2f} ms, mean {interval}")
        rows.append({"arm": arm, "step_ms": step_ms, "added_ms": added_ms, "added_mean_ms": interval})
        before = seconds
    if asked.json:
        save_figures(asked.json, step_s=STEP_S, accumulate=ACCUMULATE, rows=rows, turns=turns)


if __name__ == "__main__":
    main()
