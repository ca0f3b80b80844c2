"""`dataflow bench storage` beside fio: direct reads of the same file, order, block size and depth.

    python -m benchmarks.storage_fio FOLDER                    makes a file of 2 GiB there; two minutes
    python -m benchmarks.storage_fio FOLDER --json figures.json

FOLDER lies on the disk in question. fio runs one job of `libaio` with `iodepth` reads in flight; ours runs as
many threads, through the command line. Runs take turns (A B A B ...), medians are compared, and the bar is a
ratio of throughput within 5 % of 1. Needs fio.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import commit, machine

ROOT = Path(__file__).resolve().parent.parent
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


def make_file(path: Path, nbytes: int) -> None:
    with path.open("wb") as file:
        for _ in range(0, nbytes, 64 << 20):
            file.write(os.urandom(64 << 20))
        os.fsync(file.fileno())


def by_fio(path: Path, pattern: str, kib: int, depth: int, seconds: float) -> dict[str, Any]:
    command = [
        "fio",
        "--name=x",
        f"--filename={path}",
        f"--rw={'read' if pattern == 'sequential' else 'randread'}",
        f"--bs={kib}k",
        f"--iodepth={depth}",
        "--ioengine=libaio",
        "--direct=1",
        "--readonly",
        "--time_based",
        f"--runtime={seconds}",
        "--invalidate=0",
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
        [*command, "--seconds", str(seconds)], cwd=ROOT, check=True, capture_output=True, text=True
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
    parser.add_argument("--gib", type=int, default=2)
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
            runs: dict[str, list[dict[str, Any]]] = {"fio": [], "ours": []}
            for _ in range(asked.repeats):
                runs["fio"].append(by_fio(path, *case, asked.seconds))
                runs["ours"].append(by_ours(path, *case, asked.seconds))
            rate = {who: statistics.median(one["mb_per_s"] for one in each) for who, each in runs.items()}
            ratio = rate["ours"] / rate["fio"]
            verdict = "held" if abs(ratio - 1) <= _WITHIN else "MISSED"
            rows.append({"case": case, "medians_mb_per_s": rate, "ratio": round(ratio, 3), "runs": runs})
            both = f"fio {rate['fio']:>8,.1f} MB/s  ours {rate['ours']:>8,.1f}"
            print(f"{case!s:28} {both}  {ratio:.3f} {verdict}")
            sys.stdout.flush()
    if asked.json:
        version = subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()
        told = {
            "date": datetime.date.today().isoformat(),
            "commit": commit(),
            "machine": machine(),
            "fio": version,
            "gib": asked.gib,
            "seconds": asked.seconds,
            "cases": rows,
        }
        asked.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
