"""`dataflow bench storage` beside fio: direct reads of the same file, order, block size and depth.

    python -m benchmarks.storage_fio FOLDER                    makes a file of 1 GiB there; two minutes
    python -m benchmarks.storage_fio FOLDER --json benchmarks/results/storage-fio.json

FOLDER lies on the disk in question. Ours runs as many threads as reads are in flight, through the command
line. The pair to it is fio with as many threads (`psync`), which ask in the same way; beside them stands fio
with one thread that keeps as many requests in flight (`libaio`). Threads of fio cannot share one sequential
stream, so more than one sequential read in flight has `libaio` as its pair. Runs take turns (A B C A B C
...), medians are compared, and the bar is a ratio of throughput within 5 % of 1. Needs fio.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import REPOSITORY
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


def engines_of(pattern: str, _: int, depth: int) -> list[str]:
    """The pair to ours first."""
    return ["libaio"] if pattern == "sequential" and depth > 1 else ["psync", "libaio"]


def make_file(path: Path, nbytes: int) -> None:
    with path.open("wb") as file:
        for _ in range(0, nbytes, 64 << 20):
            file.write(os.urandom(64 << 20))
        os.fsync(file.fileno())


def by_fio(path: Path, engine: str, pattern: str, kib: int, depth: int, seconds: float) -> dict[str, Any]:
    command = [
        "fio",
        "--name=x",
        f"--filename={path}",
        f"--rw={'read' if pattern == 'sequential' else 'randread'}",
        f"--bs={kib}k",
        f"--ioengine={engine}",
        *(["--thread", f"--numjobs={depth}"] if engine == "psync" else [f"--iodepth={depth}"]),
        "--direct=1",
        "--readonly",
        "--time_based",
        f"--runtime={seconds}",
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
    command = [sys.executable, "-m", "dataflow.cli", "bench", "storage", str(path), "--json", "-"]
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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    if shutil.which("fio") is None:
        parser.error("fio is not installed: apt-get install fio")
    rows = []
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        path = Path(name) / "x.bin"
        make_file(path, asked.gib << 30)
        for case in CASES:
            engines = engines_of(*case)
            runs: dict[str, list[dict[str, Any]]] = {who: [] for who in (*engines, "ours")}
            for _ in range(asked.repeats):
                for engine in engines:
                    runs[engine].append(by_fio(path, engine, *case, asked.seconds))
                runs["ours"].append(by_ours(path, *case, asked.seconds))
            rate = {who: statistics.median(one["mb_per_s"] for one in each) for who, each in runs.items()}
            ratio = rate["ours"] / rate[engines[0]]
            verdict = "held" if abs(ratio - 1) <= _WITHIN else "MISSED"
            rows.append({"case": case, "medians_mb_per_s": rate, "ratio": round(ratio, 3), "runs": runs})
            told = "  ".join(f"{who} {value:,.1f}" for who, value in rate.items())
            print(f"{case!s:28} MB/s: {told}  ours / {engines[0]} {ratio:.3f} {verdict}")
            sys.stdout.flush()
    if asked.json:
        version = subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()
        save_figures(asked.json, fio=version, gib=asked.gib, seconds=asked.seconds, cases=rows)


if __name__ == "__main__":
    main()
