"""What faults of a store cost: the throughput of an epoch over HTTP with and without them.

    python -m benchmarks.remote.faults                                         1 GB, made anew; about a minute
    python -m benchmarks.remote.faults --json benchmarks/results/faults.json   also saves the figures

The server is slowstore.py on this machine: 30 ms of latency before each answer, 400 Mbit/s for each
connection and 2 Gbit/s for all, so that the store and not this machine is the limit. Token shards of 32 MiB
in blocks of 2 MiB with checksums; the loader has its defaults. Runs with and without faults take turns (A B
A B ...); each is a process of its own that opens the catalog and reads one epoch in shuffled order. Every run
checks that each sample came exactly once with the right bytes. Medians are compared.
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
from benchmarks.remote.slow_server import LENGTH, assert_all_once, checked, make_shards, serving
from benchmarks.report import save_figures

STORE = {"latency-ms": 30.0, "per-conn-mbps": 400.0, "total-mbps": 2000.0}
FAULTS = {"error-rate": 0.05, "reset-rate": 0.02, "stall-rate": 0.01, "stall-s": 30.0, "corrupt-rate": 0.001}


def epoch(url: str) -> dict[str, Any]:
    """Read one epoch and check every sample. Runs in a process of its own."""
    from dataflow import DataLoader, ShardedDataset

    dataset = ShardedDataset(f"{url}/x.catalog")
    with DataLoader(dataset, 64, shuffle=True) as loader:
        began, cpu = time.perf_counter(), time.process_time()
        numbers = [checked(batch["tokens"].numpy()) for batch in loader]
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        stats = loader.stats()
    assert_all_once(numbers, dataset.catalog.num_shards)
    return {
        "mb_per_s": round(4 * LENGTH * sum(map(len, numbers)) / seconds / 1e6, 1),
        "seconds": round(seconds, 2),
        "cpu_s": round(cpu, 2),
        "read_bytes": stats.read_bytes,
        "faults": asdict(stats.faults),
    }


def run(folder: Path, options: dict[str, float]) -> dict[str, Any]:
    with serving(folder, options) as server:
        server.warm_up("x*")
        told = in_own_process(epoch, server.url)
        served = server.stats()
    wanted = ("requests", "bytes", "errors", "resets", "stalls", "corruptions")
    return {**told, "server": {name: served[name] for name in wanted}}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    runs: dict[str, list[dict[str, Any]]] = {"without faults": [], "with faults": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_shards(folder, asked.shards)
        for repeat in range(asked.repeats):
            for what, options in (("without faults", STORE), ("with faults", STORE | FAULTS)):
                runs[what].append(run(folder, options | {"seed": repeat}))
                print(f"{what:15} {runs[what][-1]}", flush=True)
    medians = {
        what: round(statistics.median(one["mb_per_s"] for one in each), 1) for what, each in runs.items()
    }
    ratio = medians["with faults"] / medians["without faults"]
    verdict = "held" if ratio >= 0.8 else "MISSED"
    print(f"medians {medians}; ratio {ratio:.2f} (bar: >= 0.80, {verdict})")
    if asked.json:
        save_figures(
            asked.json,
            store=STORE,
            faults=FAULTS,
            shards=asked.shards,
            runs=runs,
            medians_mb_per_s=medians,
            ratio=round(ratio, 3),
        )


if __name__ == "__main__":
    main()
