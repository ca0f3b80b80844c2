"""`dataflow bench storage` beside fio: direct reads of the same file, order, block size and depth.

    python -m benchmarks.storage.fio FOLDER                    makes a file of 1 GiB there; seven minutes
    python -m benchmarks.storage.fio FOLDER --json benchmarks/results/storage-fio.json

FOLDER lies on the disk in question. Ours has as many threads as reads are in flight, in at most two processes
a core, and is run through the command line; the pair to it is fio with as many threads of one process
(`psync`). Threads of fio cannot share one sequential stream: each takes a part of the file of its own there.
A turn is fio, ours, fio again, so that each has a ratio of ours to the mean of its neighbours, and one of fio
to fio, which is what the disk and the machine alone make of the same command. Told are medians of the turns'
ratios, with intervals that hold the true median with 95 %. The bar is 5 %. Needs fio.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import REPOSITORY
from benchmarks.report import save_figures

CASES = [
    ("sequential", 128, 1),
    ("sequential", 128, 16),
    ("sequential", 2048, 4),
    ("random", 4, 1),
    ("random", 4, 16),
    ("random", 128, 1),
    ("random", 128, 16),
    ("random", 2048, 1),
    ("random", 2048, 4),
]
"""Order, KiB a block, reads in flight."""
_WITHIN = 0.05


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The narrowest pair of these values, as far from both ends, that holds their median with 95 %.

    By the binomial distribution, whatever theirs is. With fewer than six the outermost hold it less often.
    """
    ordered, count = sorted(values), len(values)
    outside, cut = 2 * 0.5**count, 0
    while cut + 1 < count / 2 and outside + 2 * math.comb(count, cut + 1) * 0.5**count <= 0.05:
        cut += 1
        outside += 2 * math.comb(count, cut) * 0.5**count
    return ordered[cut], ordered[-1 - cut]


def told(ratios: Sequence[float]) -> dict[str, float]:
    low, high = median_interval(ratios)
    return {"ratio": round(statistics.median(ratios), 3), "low": round(low, 3), "high": round(high, 3)}


def make_file(path: Path, nbytes: int) -> None:
    with path.open("wb") as file:
        for _ in range(0, nbytes, 64 << 20):
            file.write(os.urandom(64 << 20))
        os.fsync(file.fileno())


def by_fio(path: Path, pattern: str, kib: int, depth: int, seconds: float) -> dict[str, Any]:
    own = path.stat().st_size // depth // (kib << 10) * (kib << 10)
    command = [
        "fio",
        "--name=x",
        f"--filename={path}",
        f"--rw={'read' if pattern == 'sequential' else 'randread'}",
        *([f"--offset_increment={own}", f"--size={own}"] if pattern == "sequential" else []),
        f"--bs={kib}k",
        "--ioengine=psync",
        "--thread",
        f"--numjobs={depth}",
        "--direct=1",
        "--readonly",
        "--time_based",
        f"--runtime={round(1e3 * seconds)}ms",  # of seconds it takes whole ones only
        "--invalidate=0",
        "--group_reporting",
        "--output-format=json",
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    read = json.loads(done.stdout)["jobs"][0]["read"]
    return {
        "mb_per_s": round(read["bw_bytes"] / 1e6, 1),
        "p50_ms": round(read["clat_ns"]["percentile"]["50.000000"] / 1e6, 4),
        "p99_ms": round(read["clat_ns"]["percentile"]["99.000000"] / 1e6, 4),
    }


def by_ours(path: Path, pattern: str, kib: int, depth: int, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "dataflow.tools.cli", "bench", "storage", str(path), "--json", "-"]
    command += ["--pattern", pattern, "--block-size", f"{kib}KiB", "--in-flight", str(depth)]
    done = subprocess.run(
        [*command, "--seconds", str(seconds)], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    [one] = json.loads(done.stdout)["cases"]
    times = {f"p{name}_ms": one["latency_s"][name] for name in ("50", "99")}
    return {
        "mb_per_s": round(one["mb_per_s"], 1),
        **{name: None if value is None else round(value * 1e3, 4) for name, value in times.items()},
        "data": one["label"]["word"],
        "cores": round(one["cores"], 2),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    if shutil.which("fio") is None:
        parser.error("fio is not installed: apt-get install fio")
    rows = []
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        path = Path(name) / "x.bin"
        make_file(path, asked.gib << 30)
        for case in CASES:
            turns = []
            for _ in range(asked.repeats):
                before = by_fio(path, *case, asked.seconds)
                turns.append(
                    (before, by_ours(path, *case, asked.seconds), by_fio(path, *case, asked.seconds))
                )
            rates = [[one["mb_per_s"] for one in turn] for turn in turns]
            ours = told([2 * middle / (before + after) for before, middle, after in rates])
            fio = told([after / before for before, _, after in rates])
            medians = {
                "fio": statistics.median(rate for before, _, after in rates for rate in (before, after)),
                "ours": statistics.median(middle for _, middle, _ in rates),
            }
            verdict = "held" if abs(ours["ratio"] - 1) <= _WITHIN else "MISSED"
            rows.append({"case": case, "medians_mb_per_s": medians, "ours": ours, "fio": fio, "turns": turns})
            print(f"{case!s:26} MB/s {medians}  ours / fio {ours}  fio / fio {fio} {verdict}", flush=True)
    if asked.json:
        version = subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()
        save_figures(asked.json, fio=version, gib=asked.gib, seconds=asked.seconds, cases=rows)


if __name__ == "__main__":
    main()
