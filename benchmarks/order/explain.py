"""How long it takes to tell what was in one step, of a dataset of a billion samples in a million shards.

    python -m benchmarks.order.explain --json benchmarks/results/explain.json

The dataset is a catalog alone: 1,000 samples a shard, one block each, 64 of which make a window; no shard is
there, and none is read. (A window is mixed whole to tell one sample of it: larger ones take longer.)
For each shuffle, in a fresh process: the dataset is opened and a state loaded, which is a step in the middle
of epoch 3 of 64 ranks with batches of 16. Then one step is asked for, of all ranks. Measured are the seconds
until its table is there, the same for another step of that epoch, and how much memory the process took at
most beside what it had once the dataset was opened. The bar is 0.5 s and 200 MB.
Then `find` is asked for 1,000 samples, of which it tells the steps in all four epochs, and the next one. The
bar is 10 s an epoch and 500 MB.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.harness import run_child
from benchmarks.report import save_figures

SHUFFLES = ("none", "window", "full")
SAMPLES_A_SHARD, LENGTH, RANKS, BATCH, WINDOW = 1000, 8, 64, 16, 64
BAR_S, BAR_MB = 0.5, 200
FOUND, FIND_BAR_S, FIND_BAR_MB = 1000, 10, 500


def written(folder: Path, num_shards: int) -> str:
    """A catalog of so many shards, like the one that is written."""
    from dataflow import ShardedDataset

    np.arange(SAMPLES_A_SHARD * LENGTH + 1, dtype=np.uint16).tofile(folder / "0.bin")
    one = ShardedDataset(str(folder / "0.bin"), dtype="uint16", length=LENGTH).catalog
    rows = one.rows.take(np.zeros(num_shards, np.int64)).combine_chunks()
    urls = pa.array([f"{folder}/{number:07d}.bin" for number in range(num_shards)], pa.large_string())
    path = str(folder / "million.catalog")
    replace(one, rows=rows.set_column(0, "url", urls), url="", blob_crcs=None).save(path)
    return path


def measured(path: str, kind: str) -> dict[str, Any]:
    """One shuffle, in this process."""
    from dataflow import DataLoader, ShardedDataset, Shuffle, Topology
    from sharding.catalog.table import Catalog
    from sharding.plan.history import StepHistory

    dataset = ShardedDataset(path, catalog=Catalog.load(path))  # believed, without a look at shards
    num_steps = len(dataset) // (RANKS * BATCH)
    history = StepHistory()
    for epoch in range(3):
        history = history.after(num_steps + 1, epoch, 0, RANKS * BATCH, RANKS, "even")
    step = history.num_steps + num_steps // 2
    history = history.after(num_steps // 2 + 1000, 3, 0, RANKS * BATCH, RANKS, "even")
    topology = Topology(0, RANKS)
    with DataLoader(
        dataset, BATCH, Shuffle(kind, WINDOW if kind == "window" else None), topology=topology, num_workers=0
    ) as loader:
        state = loader.state_dict()
        from dataflow.state_checksum import checked_fields, with_checksum

        position = (num_steps // 2 + 1000) * RANKS * BATCH
        fields = {**checked_fields(state), "epoch": 3, "position": position, "history": history.to_json()}
        loader.load_state_dict(with_checksum(fields))
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before_mb = _peak_mb()
        first_s, table = _timed(lambda: loader.provenance(step))
        next_s, _ = _timed(lambda: loader.provenance(step + 500))
        more_mb = _peak_mb() - before_mb
        numbers = np.random.default_rng(1).integers(0, len(dataset), FOUND)
        find_s, found = _timed(lambda: loader.find(numbers))
        find_mb = _peak_mb() - before_mb
    assert table.num_rows == RANKS * BATCH
    assert all(3 <= len(steps) <= 4 for steps in found["steps"].to_pylist())
    step = {"step_s": first_s, "next_step_s": next_s, "opened_mb": before_mb, "more_mb": more_mb}
    return {**step, "find_epoch_s": find_s / 5, "find_mb": find_mb}


def _timed(call: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def _peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--shards", type=int, default=10**6)
    parser.add_argument("--only", nargs="*", default=SHUFFLES, choices=SHUFFLES)
    arguments = parser.parse_args()
    cases = []
    with TemporaryDirectory() as folder:
        path = written(Path(folder), arguments.shards)
        for kind in arguments.only:
            events, _ = run_child(measured, path, kind, limit_s=300)
            figures = events.get("result") or {"reason": events.get("reason", "")}
            cases.append({"shuffle": kind, "shards": arguments.shards, **figures})
            print(cases[-1], flush=True)
    if arguments.json:
        save_figures(
            arguments.json,
            command="python -m benchmarks.order.explain --json benchmarks/results/explain.json",
            bar_s=BAR_S,
            bar_mb=BAR_MB,
            find_bar_s=FIND_BAR_S,
            find_bar_mb=FIND_BAR_MB,
            cases=cases,
        )


if __name__ == "__main__":
    main()
