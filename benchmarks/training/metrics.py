"""What the page of figures and an endpoint that is scraped once a second cost a training.

    python -m benchmarks.training.metrics --json benchmarks/results/metrics.json

One process trains over local shards. Computing is a sleep of 20 ms a step, as a GPU's would be: what a step
takes beyond that of a loader that nobody watches is the price. Arms take turns of 250 steps: nothing
(`DATAFLOW_LIVE=0`); the page, written once a second; and the page with an endpoint, which another process
asks for `/metrics` once a second. Processor time is that of the training process alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.report import save_figures
from dataflow import DataLoader, ShardedDataset, ShardWriter, serve_metrics

STEP_S = 0.020
STEPS, WARM_UP = 250, 10
"""Steps of a turn; the first ones are left out."""
ARMS = ("nothing", "page", "page, endpoint")
MOST = 0.01
"""Share of a step that metrics may take."""
SCRAPES = """
import sys, time, urllib.request
for second in range(int(sys.argv[2])):
    urllib.request.urlopen(sys.argv[1], timeout=5).read()
    time.sleep(1)
"""


class Turn(NamedTuple):
    """One turn of an arm."""

    step_s: float
    """Mean seconds of a step."""
    cpu_s: float
    """Mean processor seconds of a step, of all threads."""


def write_shards(folder: Path) -> str:
    with ShardWriter(str(folder / "%02d.tar"), max_count=512) as shards:
        for number in range(4096):
            shards.write({"__key__": f"{number:05d}", "cls": number})
    return str(folder / "*.tar")


def turn(source: str, arm: str, address: str, steps: int) -> Turn:
    if arm == "nothing":
        os.environ["DATAFLOW_LIVE"] = "0"
    else:
        os.environ.pop("DATAFLOW_LIVE", None)
    scraper = None
    if arm == "page, endpoint":
        url, seconds = f"http://{address}/metrics", str(int(steps * STEP_S) + 1)
        scraper = subprocess.Popen([sys.executable, "-c", SCRAPES, url, seconds])
    with DataLoader(ShardedDataset(source), 16, shuffle=True, num_workers=1) as loader:
        for number, _ in enumerate(loader):
            if number == WARM_UP:
                began, cpu_began = time.perf_counter(), time.process_time()
            time.sleep(STEP_S)
            if number == steps - 1:
                break
        seconds_of = time.perf_counter() - began, time.process_time() - cpu_began
    if scraper is not None and scraper.wait(30):
        raise RuntimeError("the endpoint did not answer")
    return Turn(*(one / (steps - WARM_UP) for one in seconds_of))


def measured(repeats: int, steps: int) -> list[dict[str, Any]]:
    """A row for each arm."""
    with TemporaryDirectory() as folder, serve_metrics("127.0.0.1:0") as endpoint:
        source = write_shards(Path(folder))
        turn(source, ARMS[-1], endpoint.address, WARM_UP + 2)  # imports what turns need
        turns: dict[str, list[Turn]] = {arm: [] for arm in ARMS}
        for _ in range(repeats):
            for arm in ARMS:
                turns[arm].append(turn(source, arm, endpoint.address, steps))
    rows = []
    for arm, own in turns.items():
        added = [
            100 * (one.step_s / other.step_s - 1) for one, other in zip(own, turns[ARMS[0]], strict=True)
        ]
        rows.append(
            {
                "arm": arm,
                "step_ms": 1e3 * statistics.median(one.step_s for one in own),
                "cpu_ms": 1e3 * statistics.median(one.cpu_s for one in own),
                "added_percent": statistics.median(added),
                "added_percent_of_turns": [round(one, 3) for one in sorted(added)],
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=8, help="turns of each arm")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a turn")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    rows = measured(asked.repeats, asked.steps)
    for row in rows:
        print(
            f"{row['arm']:16s} {row['step_ms']:7.3f} ms a step, {row['cpu_ms']:6.3f} ms of a core; "
            f"{row['added_percent']:+.2f} % (of turns {row['added_percent_of_turns']})"
        )
    if asked.json:
        save_figures(asked.json, step_s=STEP_S, most=MOST, rows=rows)


if __name__ == "__main__":
    main()
