"""Whether the default shuffle trains like a full shuffle where shuffle buffer and shard shuffle do not.

The data is sorted by label, the worst case: scikit-learn's bundled digits (real scans of 8 x 8), each
training image in 9 shifts, written by `ShardWriter` as tars of one label or two. A small network is trained
on it through the real `DataLoader`, equal steps in every arm; only the order differs. An arm is judged by its
paired difference from the full shuffle (same seed and initial weights) in the final loss on held-out images.

Block and memory limit are scaled down together, so that a window holds the 32 blocks that it holds at full
scale (64 MiB of blocks of 2 MiB) and the epoch holds many windows. Arms:

    full         every sample anywhere
    full again   the same with other order seeds: what pure noise looks like
    default      `shuffle=True`
    buffer 2     shards in random order, through WebDataset's own shuffle buffer of 2 shards
    buffer 4     the same with a buffer of 4 shards: the bytes of one default window
    shard        shards in random order, samples mixed inside their shard

Resumes: runs that are in the results file are not run again, unless setup or order changed since.

    python -m benchmarks.order.convergence --results benchmarks/results/convergence.json --stop-after 80
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from torch import Tensor, nn

from benchmarks.report import save_figures, versions
from dataflow import DataLoader, ShardedDataset, ShardWriter, Shuffle
from dataflow.tools.inspect.command import inspect_dataset
from dataflow.tools.inspect.settings import InspectSettings
from sharding.order.order import Order
from sharding.order.permutations import mix_key

ARMS = ("full", "full again", "default", "buffer 2", "buffer 4", "shard")


@dataclass(frozen=True)
class Setup:
    """Everything that decides the result."""

    samples_per_block: int = 32
    blocks_per_shard: int = 8
    window_blocks: int = 32
    """What the memory limit is set to give."""
    batch_size: int = 64
    epochs: int = 4
    lr: float = 0.1
    """Decays linearly to 0 (SGD, momentum 0.9)."""
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises linearly to `lr`, as training recipes have it."""
    hidden: int = 64
    max_samples: int | None = None
    """For tests."""

    @property
    def block_bytes(self) -> int:
        """A sample of two short members takes four tar blocks of 512 bytes."""
        return self.samples_per_block * 2048

    @property
    def memory_limit(self) -> int:
        """Four times the window, as the loader gives a quarter of its limit to one."""
        return 4 * self.window_blocks * self.block_bytes


@dataclass(frozen=True, eq=False)
class Task:
    """The shards and the held-out images."""

    pattern: str
    setup: Setup
    test_x: Tensor
    test_y: Tensor
    num_samples: int

    @property
    def by_block(self) -> ShardedDataset:
        """Several blocks a shard."""
        return self._open(self.setup.block_bytes)

    @property
    def by_shard(self) -> ShardedDataset:
        """Each shard one block, so that the order cannot cut it."""
        return self._open(1 << 40)

    def _open(self, block_bytes: int) -> ShardedDataset:
        catalog = str(Path(self.pattern).parent / f"{block_bytes}.catalog")
        return ShardedDataset(self.pattern, catalog=catalog, block_bytes=block_bytes, progress=False)


def digits() -> tuple[Any, Any, Any, Any]:
    """Training images and labels in 9 shifts, in a fixed random order; every fifth image for testing."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.uint8).reshape(-1, 8, 8)
    held_out = np.arange(len(labels)) % 5 == 0
    shifts = [(dx, dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1)]
    x = np.concatenate([np.roll(images[~held_out], shift, (1, 2)) for shift in shifts])
    y = np.tile(labels[~held_out], len(shifts))
    # Within a label the order is random, or runs of one shift would be a second label.
    mixed = np.random.Generator(np.random.Philox(key=0)).permutation(len(y))
    return x[mixed].reshape(-1, 64), y[mixed], images[held_out].reshape(-1, 64), labels[held_out]


def make_task(folder: Path, setup: Setup, images: Callable[[], tuple[Any, Any, Any, Any]] = digits) -> Task:
    """Write the shards, sorted by label."""
    x, y, test_x, test_y = images()
    x, y = x[: setup.max_samples], y[: setup.max_samples]
    by_label = np.argsort(y, kind="stable")
    folder.mkdir(parents=True, exist_ok=True)
    for catalog in folder.glob("*.catalog"):
        catalog.unlink()  # of shards that are written again
    pattern = str(folder / "digits-%04d.tar")
    per_shard = setup.samples_per_block * setup.blocks_per_shard
    with ShardWriter(pattern, max_count=per_shard, overwrite=True) as writer:
        for number, at in enumerate(by_label.tolist()):
            writer.write({"__key__": f"{number:06d}", "bin": x[at].tobytes(), "cls": int(y[at])})
    test = torch.from_numpy(test_x).float() / 16, torch.from_numpy(test_y)
    return Task(pattern.replace("%04d", "*"), setup, *test, len(y))


Batches = Iterator[tuple[Tensor, Tensor]]


def batches(task: Task, arm: str, seed: int) -> Batches:
    """All batches of all epochs in the order of an arm; whole batches only."""
    setup, seed = task.setup, seed + (1000 if arm == "full again" else 0)
    if arm.startswith("buffer"):
        yield from _buffered(task, seed, int(arm.split()[1]))
        return
    dataset = task.by_shard if arm == "shard" else task.by_block
    shuffle = {"default": True, "shard": Shuffle(window_blocks=1)}.get(arm, Shuffle("full"))
    limit = setup.memory_limit if arm == "default" else None
    kwargs = {"seed": seed, "drop_last": True, "num_workers": 1, "workers": "thread", "memory_limit": limit}
    with DataLoader(dataset, setup.batch_size, shuffle, **kwargs) as loader:
        for _ in range(setup.epochs):
            for batch in loader:
                yield batch["bin"], batch["cls"]


def _buffered(task: Task, seed: int, num_shards: int) -> Batches:
    """Shards in random order and whole, through WebDataset's shuffle buffer."""
    setup = task.setup
    size = num_shards * setup.samples_per_block * setup.blocks_per_shard
    loader = DataLoader(task.by_shard, 256, Shuffle("blocks"), seed=seed, num_workers=1, workers="thread")
    with loader:
        for epoch in range(setup.epochs):
            rows = (row for batch in loader for row in zip(batch["bin"], batch["cls"], strict=True))
            rng = random.Random(mix_key(seed, epoch))
            mixed = list(webdataset.shuffle(size, initial=size, rng=rng)(rows))
            for start in range(0, len(mixed) - setup.batch_size + 1, setup.batch_size):
                x, y = zip(*mixed[start : start + setup.batch_size], strict=True)
                yield torch.stack(x), torch.stack(y)


def train(task: Task, arm: str, seed: int) -> dict[str, Any]:
    """One run: final loss and accuracy on the held-out images."""
    setup = task.setup
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, setup.hidden), nn.ReLU(), nn.Linear(setup.hidden, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=setup.lr, momentum=0.9)
    steps = setup.epochs * (task.num_samples // setup.batch_size)
    step = 0
    for x, y in batches(task, arm, seed):
        rising = 1.0 if setup.warmup == 0 else min(1.0, (step + 1) / (setup.warmup * steps))
        optimizer.param_groups[0]["lr"] = setup.lr * min(rising, 1 - step / steps)
        loss = nn.functional.cross_entropy(model(x.float() / 16), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    assert step == steps, f"{arm} took {step} steps, not {steps}"
    with torch.no_grad():
        out = model(task.test_x)
        loss = nn.functional.cross_entropy(out, task.test_y)
        correct = (out.argmax(1) == task.test_y).float().mean()
    return {"arm": arm, "seed": seed, "steps": steps, "loss": loss.item(), "accuracy": correct.item()}


def facts(task: Task) -> dict[str, Any]:
    """What the data and the window are, and how the orders measure."""
    dataset, setup = task.by_block, task.setup
    with DataLoader(dataset, setup.batch_size, True, memory_limit=setup.memory_limit) as loader:
        shuffle = loader.shuffle
    order = Order(dataset.catalog.blocks.num_samples, shuffle, seed=0, epoch=0)
    settings = InspectSettings(batch_size=setup.batch_size, memory_limit=setup.memory_limit, label="cls")
    found = inspect_dataset(dataset, settings)
    blocks = dataset.catalog.blocks
    labels = {side: getattr(found, side).figures for side in ("plan", "full")}
    return {
        "samples": task.num_samples,
        "shards": dataset.catalog.num_shards,
        "blocks": len(blocks.length),
        "blocks_in_a_window": shuffle.window_blocks,
        "lanes": shuffle.num_lanes,
        "windows_in_an_epoch": order.num_windows,
        "largest_window_share_of_epoch": float(order.table.window_lengths.max() / task.num_samples),
        "window_reason": found.window_reason,
        "label_dispersion": {side: f.label_dispersion for side, f in labels.items()},
        "label_correlation": {side: f.label_correlation for side, f in labels.items()},
    }


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per arm: mean, and paired difference from the full shuffle with its 95 % t-interval."""
    from scipy import stats

    by_arm = {arm: {run["seed"]: run for run in runs if run["arm"] == arm} for arm in ARMS}
    rows = []
    for arm, found in by_arm.items():
        seeds = sorted(set(found) & set(by_arm["full"]))
        if len(seeds) < 2:
            continue
        row: dict[str, Any] = {"arm": arm, "seeds": len(seeds)}
        for name in ("loss", "accuracy"):
            own = np.array([found[seed][name] for seed in seeds])
            off = own - np.array([by_arm["full"][seed][name] for seed in seeds])
            half = float(stats.t.ppf(0.975, len(seeds) - 1) * off.std(ddof=1) / len(seeds) ** 0.5)
            row[name] = {
                "mean": float(own.mean()),
                "sd": float(own.std(ddof=1)),
                "difference": float(off.mean()),
                "half_interval": half,
                "within_noise": bool(abs(off.mean()) <= half),
            }
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The summary as Markdown."""
    lines = [
        "| order | final test loss | difference from full (95 % interval) | accuracy | difference, points |",
        "|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        loss, right = row["loss"], row["accuracy"]
        off = f"{loss['difference']:+.4f} ± {loss['half_interval']:.4f}"
        points = f"{100 * right['difference']:+.2f} ± {100 * right['half_interval']:.2f}"
        if row["arm"] == "full":
            off = points = ""
        lines.append(
            f"| {row['arm']} | {loss['mean']:.4f} | {off} | {100 * right['mean']:.2f} % | {points} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and write the results after each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/convergence.json"))
    parser.add_argument("--data", type=Path, default=Path(".bench-data/convergence"))
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds; run again to go on")
    parser.add_argument("--arms", default=",".join(ARMS), help="comma-separated, full among them")
    parser.add_argument("--warmup", type=float, default=Setup.warmup, help="share of the steps")
    asked = parser.parse_args(arguments)
    began = time.monotonic()
    torch.set_num_threads(1)
    setup = Setup(warmup=asked.warmup)
    task = make_task(asked.data, setup)
    known = json.loads(asked.results.read_text()) if asked.results.exists() else {}
    measured = facts(task)  # of another order, they differ
    same = (known.get("setup"), known.get("facts")) == (asdict(setup), measured)
    runs = known["runs"] if same else []
    done = {(run["arm"], run["seed"]) for run in runs}
    command = f"python -m benchmarks.order.convergence --seeds {asked.seeds} --warmup {asked.warmup}"
    arms = asked.arms.split(",")
    for seed in range(asked.seeds):
        for arm in arms:
            if (arm, seed) not in done and time.monotonic() - began < asked.stop_after:
                runs.append(train(task, arm, seed))
        save_figures(
            asked.results,
            command=f"{command} --arms '{asked.arms}'",  # of all sessions together
            versions=versions() | {"scikit-learn": metadata.version("scikit-learn")},
            setup=asdict(setup),
            facts=measured,
            summary=summary(runs),
            runs=runs,
        )
    print(table(summary(runs)))
    left = asked.seeds * len(arms) - len({(run["arm"], run["seed"]) for run in runs})
    if left > 0:
        sys.exit(f"{left} runs are left: run again")


if __name__ == "__main__":
    main()
