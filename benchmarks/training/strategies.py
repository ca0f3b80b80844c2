"""Whether the strategies that send less train as well: final loss of a small language model, paired by seed.

A byte-level transformer (`dataflow.tools.demo`) is trained on a text by two gloo ranks in plain DDP,
equal steps in every arm; seeds decide initial weights and batches, the arms only how gradients or parameters
travel. An arm is judged by the paired difference of its final loss on held-out text from all-reduce's, with a
95 % t-interval: parity means that the interval reaches 0 or below. Bytes are those that the sockets of rank 0
sent in the whole run (tcp_info), beside those that the strategy counts.

Two arms drop the error feedback; they show that the comparison can fail.

Resumes: runs that are in the results file are not run again, unless the setup changed since.

    python -m benchmarks.training.strategies --text tinyshakespeare.txt --stop-after 240
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.report import save_figures
from dataflow.grad.strategies import (
    Delayed,
    DiLoCo,
    Half,
    Int8,
    LocalSGD,
    PowerSGD,
    TopK,
)
from dataflow.grad.strategies.strategy import Strategy, StrategyContext
from dataflow.testing import run_ranks
from dataflow.tools.demo import ByteTransformer, next_byte_loss, write_corpus
from sharding.topology.topology import Topology

REFERENCE = "all-reduce"
WORLD = 2
BUCKET_MB = 0.25
"""Several buckets, as in a large model."""


@dataclass(frozen=True)
class Setup:
    """Everything that decides the result, but for the arms."""

    steps: int = 800
    batch: int = 8
    """Windows a rank and step."""
    length: int = 32
    width: int = 64
    optimizer: str = "sgd"
    lr: float = 0.1
    """Rises over the first tenth, then decays linearly to a tenth (SGD: momentum 0.9)."""
    held_out: int = 256
    """Windows of the last tenth of the text."""


def _arms(steps: int) -> dict[str, Callable[[], Any]]:
    start = steps // 10
    return {
        REFERENCE: lambda: None,
        "bf16": lambda: Half("bf16"),
        "int8": Int8,
        "top-k 10 %": lambda: TopK(0.1, warmup_steps=start),
        "power-sgd rank 4": lambda: PowerSGD(4, start_step=start),
        "delayed": Delayed,
        "local-sgd 8": lambda: LocalSGD(8),
        "diloco 16": lambda: DiLoCo(16),
        "top-k 10 %, no error feedback": lambda: TopK(0.1, warmup_steps=start, error_feedback=False),
        "int8, no error feedback": lambda: Int8(error_feedback=False),
    }


ARMS = tuple(_arms(Setup.steps))


def lr_at(setup: Setup, step: int) -> float:
    """The learning rate of a step."""
    rise = (step + 1) / (setup.steps / 10)
    return setup.lr * min(1.0, rise, 1 - 0.9 * step / setup.steps)


def windows(text: Tensor, count: int, length: int, key: int) -> Tensor:
    """Random windows, int64 [count, length + 1]."""
    starts = torch.randint(len(text) - length - 1, (count,), generator=torch.Generator().manual_seed(key))
    return torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()


def train(path: str, setup: Setup, todo: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Run some (arm, seed) on this rank."""
    raw = torch.from_numpy(np.frombuffer(Path(path).read_bytes(), np.uint8).copy())
    cut = len(raw) * 9 // 10
    return [_run(raw[:cut], raw[cut:], setup, arm, seed) for arm, seed in todo]


def _run(text: Tensor, held_out: Tensor, setup: Setup, arm: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = ByteTransformer(setup.length, setup.width)
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    optimizer: torch.optim.Optimizer
    if setup.optimizer == "sgd":
        optimizer = torch.optim.SGD(ddp.parameters(), setup.lr, 0.9)
    else:
        optimizer = torch.optim.AdamW(ddp.parameters(), setup.lr)
    strategy = _arms(setup.steps)[arm]() or Strategy(REFERENCE)
    rank = dist.get_rank()
    parameters = dict(model.named_parameters())
    group = dist.new_group()
    strategy.setup(
        StrategyContext(
            model=ddp,
            optimizer=optimizer,
            parameters=parameters,
            group=group,
            rank=rank,
            world_size=WORLD,
            topology=Topology.detect(),
        )
    )
    if strategy.hooks_gradients:
        ddp.register_comm_hook(None, lambda _, bucket: strategy.reduce(bucket))
    dist.barrier()
    before, began = socket_bytes_sent(), time.perf_counter()
    for step in range(setup.steps):
        _set_lr(optimizer, strategy, lr_at(setup, step))
        batch = windows(text, setup.batch, setup.length, (seed * setup.steps + step) * WORLD + rank)
        with nullcontext() if arm == REFERENCE or strategy.syncs(step) else ddp.no_sync():
            next_byte_loss(ddp, batch).backward()
        strategy.before_step(step)
        optimizer.step()
        optimizer.zero_grad()
        strategy.after_step(step, skipped=False)
    said = strategy.bytes_sent()
    seconds, sent = time.perf_counter() - began, bytes_sent_since(before)
    dist.barrier()
    strategy.close()
    dist.destroy_process_group(group)
    with torch.no_grad():
        tested = windows(held_out, setup.held_out, setup.length, 0)
        loss = next_byte_loss(model, tested).item()
    return {
        "arm": arm,
        "seed": seed,
        "loss": loss if math.isfinite(loss) else None,
        "bytes_a_step": round(sent / setup.steps),
        "counted_bytes_a_step": round(said / setup.steps),
        "ms_a_step": round(1e3 * seconds / setup.steps, 2),
    }


def _set_lr(optimizer: torch.optim.Optimizer, strategy: Any, lr: float) -> None:
    (group,) = optimizer.param_groups
    if lr != group["lr"]:
        strategy.lr_changed(lr / group["lr"])
        group["lr"] = lr


def socket_bytes_sent() -> dict[str, int]:
    """Payload bytes that each of this process's TCP sockets has sent, as Linux counts them (tcp_info(7)).

    Without packet headers, and without what other processes send: nothing else on the machine disturbs it.
    """
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{entry}")
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as one:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed since, or not TCP
            continue
        sent, again = struct.unpack_from("QQ", info, 200)
        found[name] = sent - again
    return found


def bytes_sent_since(before: Mapping[str, int]) -> int:
    """By the sockets that are open now; those of a group that was given back may close at any time."""
    return sum(sent - before.get(name, 0) for name, sent in socket_bytes_sent().items())


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per arm: mean loss, its paired difference from all-reduce with a 95 % t-interval, and bytes a step."""
    from scipy import stats

    by_arm: dict[str, dict[int, dict[str, Any]]] = {arm: {} for arm in ARMS}
    for run in runs:
        by_arm[run["arm"]][run["seed"]] = run
    rows = []
    for arm, found in by_arm.items():
        seeds = sorted(set(found) & set(by_arm[REFERENCE]))
        if len(seeds) < 2:
            continue
        losses = [found[seed]["loss"] for seed in seeds]
        diverged = None in losses
        own = np.array([0.0] * len(seeds) if diverged else losses)
        off = own - np.array([by_arm[REFERENCE][seed]["loss"] for seed in seeds])
        half = float(stats.t.ppf(0.975, len(seeds) - 1) * off.std(ddof=1) / len(seeds) ** 0.5)
        sent, dense = (
            float(np.median([side[seed]["bytes_a_step"] for seed in seeds]))
            for side in (found, by_arm[REFERENCE])
        )
        rows.append(
            {
                "arm": arm,
                "seeds": len(seeds),
                "loss": None if diverged else float(own.mean()),
                "difference": None if diverged else float(off.mean()),
                "half_interval": None if diverged else half,
                "parity": not diverged and bool(off.mean() - half <= 0),
                "bytes_a_step": sent,
                "fewer": dense / sent,
                "ms_a_step": float(np.median([found[seed]["ms_a_step"] for seed in seeds])),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The summary as Markdown."""
    lines = [
        "| strategy | final loss, nats | difference (95 % interval) | parity | kB a step | fewer |",
        "|---|--:|--:|---|--:|--:|",
    ]
    for row in rows:
        loss, off, parity = "diverged", "", "yes" if row["parity"] else "no"
        if row["loss"] is not None:
            loss, off = f"{row['loss']:.4f}", f"{row['difference']:+.4f} ± {row['half_interval']:.4f}"
        if row["arm"] == REFERENCE:
            off = parity = ""
        lines.append(
            f"| {row['arm']} | {loss} | {off} | {parity} "
            f"| {row['bytes_a_step'] / 1e3:,.0f} | {row['fewer']:.1f}x |"
        )
    return "\n".join(lines)


def _text_of(asked: Path | None, folder: Path) -> Path:
    """The given text, or the source of Python's standard library in one file."""
    if asked is not None:
        return asked
    write_corpus(folder)
    text = folder / "text"
    text.write_bytes(b"".join(part.read_bytes() for part in sorted(folder.glob("tokens-*.bin"))))
    return text


def main(arguments: list[str] | None = None, run_ranks: Callable[..., Any] = run_ranks) -> None:
    """Run what is missing, and write the results after each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", type=Path, help="bytes to learn; default: Python's own standard library")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/strategies.json"))
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=6, help="how many")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds; run again to go on")
    parser.add_argument("--arms", default=";".join(ARMS), help="separated by semicolons")
    parser.add_argument("--steps", type=int, default=Setup.steps)
    parser.add_argument("--lr", type=float, default=Setup.lr)
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default=Setup.optimizer)
    asked = parser.parse_args(arguments)
    began = time.monotonic()
    setup = Setup(steps=asked.steps, lr=asked.lr, optimizer=asked.optimizer)
    arms = asked.arms.split(";")
    with TemporaryDirectory() as folder:
        text = _text_of(asked.text, Path(folder))
        source = {
            "name": text.name if asked.text else "Python's standard library",
            "bytes": text.stat().st_size,
            "sha256": hashlib.sha256(text.read_bytes()).hexdigest(),
        }
        known = json.loads(asked.results.read_text()) if asked.results.exists() else {}
        same = (known.get("setup"), known.get("text")) == (asdict(setup), source)
        runs = known["runs"] if same else []
        seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
        for seed in seeds:
            done = {(run["arm"], run["seed"]) for run in runs}
            todo = [(arm, seed) for arm in arms if (arm, seed) not in done]
            if todo and time.monotonic() - began < asked.stop_after:
                settings = {"timeout_s": 280, "start_method": "forkserver"}
                found = run_ranks(train, WORLD, args=(str(text), setup, todo), **settings)
                runs += found[0]
            save_figures(asked.results, setup=asdict(setup), text=source, summary=summary(runs), runs=runs)
    print(table(summary(runs)))
    left = len({(arm, seed) for arm in arms for seed in seeds} - {(r["arm"], r["seed"]) for r in runs})
    if left > 0:
        sys.exit(f"{left} runs are left: run again")


if __name__ == "__main__":
    main()
