"""Is a restart near the end of an epoch as fast as its beginning, over HTTP.

    python -m benchmarks.remote.restart                                            1 GB, made anew; a minute
    python -m benchmarks.remote.restart --json benchmarks/results/restart.json     also saves the figures

The store is that of `faults` without faults: 30 ms, 400 Mbit/s a connection, 2 Gbit/s in all. Each
run is a process of its own that opens the catalog, loads a state (of the beginning, or of 90 % of the epoch),
waits for its first batch and reads a twelfth of the epoch; the time counts from the opened catalog, imports
left out. Beginnings and restarts take turns, with the default windows, whose first are small, and with
windows of 8 blocks throughout.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import in_own_process
from benchmarks.remote.faults import STORE
from benchmarks.remote.slow_server import LENGTH, make_shards, serving
from benchmarks.report import save_figures

SHARES = (0.0, 0.9)
WINDOWS = (0, 8)
"""Blocks; 0: the default."""
READ = 1 / 12
"""Of the epoch, in each run: what comes after 90 %, less a rest."""


def begun(url: str, share: float, window_blocks: int) -> dict[str, Any]:
    """Runs in a process of its own."""
    from dataflow import DataLoader, ShardedDataset, Shuffle
    from dataflow.state_checksum import checked_fields, with_checksum

    shuffle = Shuffle("window", window_blocks=window_blocks) if window_blocks else True
    began = time.perf_counter()
    dataset = ShardedDataset(f"{url}/x.catalog")
    opened = time.perf_counter()
    with DataLoader(dataset, 64, shuffle) as loader:
        first, count = int(share * len(loader)), int(READ * len(loader))
        fields = checked_fields(loader.state_dict())
        loader.load_state_dict(with_checksum({**fields, "position": 64 * first}))
        batches = iter(loader)
        samples = len(next(batches)["tokens"])
        came = time.perf_counter()
        samples += sum(len(batch["tokens"]) for batch in itertools.islice(batches, count - 1))
        ended = time.perf_counter()
        windows = loader.stats().window_blocks
    return {
        "share": share,
        "window_blocks": windows,
        "open_s": round(opened - began, 3),
        "first_batch_s": round(came - opened, 3),
        "mb": round(4 * LENGTH * samples / 1e6, 1),
        "mb_per_s": round(4 * LENGTH * samples / 1e6 / (ended - opened), 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    cases = {(blocks, share): [] for blocks in WINDOWS for share in SHARES}  # type: dict[Any, list[Any]]
    with tempfile.TemporaryDirectory() as name:
        make_shards(Path(name), asked.shards)
        with serving(Path(name), STORE) as server:
            server.warm_up("x*")
            for _ in range(asked.repeats):
                for (window_blocks, share), runs in cases.items():
                    runs.append(in_own_process(begun, server.url, share, window_blocks))
                    print(runs[-1], flush=True)
    medians = {
        f"windows of {runs[0]['window_blocks']}, at {share:.0%}": {
            figure: statistics.median(run[figure] for run in runs) for figure in ("first_batch_s", "mb_per_s")
        }
        for (_, share), runs in cases.items()
    }
    for case, figures in medians.items():
        print(f"{case:24} {figures}")
    if asked.json:
        runs = [run for each in cases.values() for run in each]
        save_figures(asked.json, store=STORE, shards=asked.shards, runs=runs, medians=medians)


if __name__ == "__main__":
    main()
