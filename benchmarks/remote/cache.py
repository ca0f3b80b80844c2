"""What a cache on this machine's disk gives over a store with latency: rate and bytes of each epoch.

    python -m benchmarks.remote.cache                        256 MiB in 8 shards, made anew; under a minute
    python -m benchmarks.remote.cache --json benchmarks/results/cache.json      also saves the figures

The server is slowstore.py on this machine, 50 ms before each answer. Token shards of 32 MiB in blocks
of 2 MiB, read in shuffled order with the loader's defaults; three epochs in one process, the store's bytes
counted at the server. Without a cache; with one that holds everything; with one that holds half. The consumer
does nothing with the batches. The cache's files stay in the page cache: its disk is not measured.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import in_own_process
from benchmarks.remote.slow_server import LENGTH, SHARD_BYTES, make_shards, server_stats, serving
from benchmarks.report import save_figures

STORE = {"latency-ms": 50.0}
EPOCHS = 3
MEMORY_LIMIT = "2GB"


def epochs(url: str, folder: str, limit: int) -> dict[str, Any]:
    """Read the epochs; no limit: without a cache. Runs in a process of its own."""
    from dataflow import Cache, DataLoader, ShardedDataset

    cache = Cache(folder, limit) if limit else None
    dataset = ShardedDataset(f"{url}/x.catalog", cache=cache)
    rows: list[dict[str, Any]] = []
    server_stats(url)
    with DataLoader(dataset, 64, shuffle=True, memory_limit=MEMORY_LIMIT) as loader:
        for epoch in range(EPOCHS):
            began, cpu = time.perf_counter(), time.process_time()
            samples = sum(len(batch["tokens"]) for batch in loader)
            seconds = time.perf_counter() - began
            rows.append(
                {
                    "epoch": epoch + 1,
                    "samples": samples,
                    "mb_per_s": round(samples * LENGTH * 4 / seconds / 1e6, 1),
                    "cpu_s": round(time.process_time() - cpu, 2),
                    "server_bytes": server_stats(url)["bytes"],
                }
            )
        return {"epochs": rows, "cache": asdict(loader.stats().cache)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    data_bytes = asked.shards * SHARD_BYTES
    limits = {"no cache": 0, "half of it": data_bytes // 2, "all of it": 2 * data_bytes}
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in limits}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_shards(folder, asked.shards)
        for repeat in range(asked.repeats):
            for case, limit in limits.items():
                # Each cache goes with its run: what it wrote would be brought to the disk during the next.
                with (
                    tempfile.TemporaryDirectory() as cache,
                    serving(folder, STORE | {"seed": repeat}) as server,
                ):
                    runs[case].append(in_own_process(epochs, server.url, cache, limit))
    medians = {
        case: [
            {
                "mb_per_s": statistics.median(run["epochs"][e]["mb_per_s"] for run in each),
                "cpu_s": statistics.median(run["epochs"][e]["cpu_s"] for run in each),
                "server_bytes": statistics.median(run["epochs"][e]["server_bytes"] for run in each),
            }
            for e in range(EPOCHS)
        ]
        for case, each in runs.items()
    }
    for case, rows in medians.items():
        text = "; ".join(
            f"epoch {i}: {row['mb_per_s']:7.1f} MB/s, {row['cpu_s']:.2f} CPU s, "
            f"{row['server_bytes'] / 1e6:6.1f} MB served"
            for i, row in enumerate(rows, 1)
        )
        print(f"{case:14} {text}")
    if asked.json:
        save_figures(asked.json, store=STORE, data_bytes=data_bytes, runs=runs, medians=medians)


if __name__ == "__main__":
    main()
