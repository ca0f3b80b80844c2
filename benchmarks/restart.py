"""Is a restart near the end of an epoch as fast as its beginning, over HTTP.

    python -m benchmarks.restart                          a dataset of 1 GB, made anew; about a minute
    python -m benchmarks.restart --json restart.json      also saves the figures

The store is that of `benchmarks.faults` without faults: 30 ms, 400 Mbit/s a connection, 2 Gbit/s in all. Each
run is a process of its own that opens the catalog, loads a state (of the beginning, or of 90 % of the epoch),
and waits for its first batch; the time counts from the opened catalog, imports left out. Beginnings and
restarts take turns, with the default windows, whose first are small, and with windows of 8 blocks throughout.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults import LIMIT_S, ROOT, STORE, make_shards, serving, warmed_up
from benchmarks.report import commit, machine, versions

SHARES = (0.0, 0.9)
WINDOWS = (0, 8)
"""Blocks; 0: the default."""


def first_batch(url: str, share: float, window_blocks: int) -> dict[str, Any]:
    """Runs in a process of its own."""
    from dataflow import DataLoader, ShardedDataset, Shuffle

    shuffle = Shuffle("window", window_blocks=window_blocks) if window_blocks else True
    began = time.perf_counter()
    dataset = ShardedDataset(f"{url}/x.catalog")
    opened = time.perf_counter()
    with DataLoader(dataset, 64, shuffle) as loader:
        batch = int(share * len(loader))
        loader.load_state_dict({**loader.state_dict(), "position": 64 * batch})
        next(iter(loader))
        came = time.perf_counter()
        windows = loader.stats().window_blocks
    return {
        "share": share,
        "window_blocks": windows,
        "open_s": round(opened - began, 3),
        "first_batch_s": round(came - opened, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--first-batch-of", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.first_batch_of:
        url, share, window_blocks = asked.first_batch_of
        print(json.dumps(first_batch(url, float(share), int(window_blocks))))
        return
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        make_shards(Path(name), asked.shards)
        with serving(Path(name), STORE, seed=0) as url:
            warmed_up(Path(name), url)
            for _ in range(asked.repeats):
                for window_blocks in WINDOWS:
                    for share in SHARES:
                        command = [sys.executable, "-m", "benchmarks.restart", "--first-batch-of", url]
                        done = subprocess.run(
                            [*command, str(share), str(window_blocks)],
                            cwd=ROOT,
                            check=True,
                            stdout=subprocess.PIPE,
                            text=True,
                            timeout=LIMIT_S,
                        )
                        runs.append(json.loads(done.stdout))
                        print(runs[-1], flush=True)
    medians = {}
    for windows in sorted({run["window_blocks"] for run in runs}):
        for share in SHARES:
            mine = [r["first_batch_s"] for r in runs if (r["window_blocks"], r["share"]) == (windows, share)]
            medians[f"windows of {windows}, at {share:.0%}"] = statistics.median(mine)
    print(f"medians, seconds to the first batch: {medians}")
    if asked.json:
        told = {
            "date": datetime.date.today().isoformat(),
            "commit": commit(),
            "machine": machine(),
            "versions": versions(),
            "store": STORE,
            "shards": asked.shards,
            "runs": runs,
            "medians_s": medians,
        }
        asked.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
