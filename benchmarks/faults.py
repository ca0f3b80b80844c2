"""What faults of a store cost: the throughput of an epoch over HTTP with and without them.

    python -m benchmarks.faults                        a dataset of 1 GB, made anew; about five minutes
    python -m benchmarks.faults --json faults.json     also saves the figures

The server is tests/slowstore.py on this machine: 30 ms of latency before each answer, 400 Mbit/s for each
connection and 2 Gbit/s for all, so that the store and not this machine is the limit. Token shards of 32 MiB
in blocks of 2 MiB with checksums; the loader has its defaults. Runs with and without faults take turns (A B
A B ...); each is a process of its own that opens the catalog and reads one epoch in shuffled order. Every run
checks that each sample came exactly once with the right bytes. Medians are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import commit, machine, versions

ROOT = Path(__file__).resolve().parent.parent
STORE = {"latency-ms": 30.0, "per-conn-mbps": 400.0, "total-mbps": 2000.0}
FAULTS = {"error-rate": 0.05, "reset-rate": 0.02, "stall-rate": 0.01, "stall-s": 30.0, "corrupt-rate": 0.001}
LENGTH = 2048
SHARD_BYTES = 32 << 20
_PER_SHARD = SHARD_BYTES // (4 * LENGTH)
LIMIT_S = 300.0


def make_shards(folder: Path, num_shards: int) -> None:
    """Token shards in which each sample is its number, hashed; with their catalog."""
    for i in range(num_shards):
        expected(np.arange(i * _PER_SHARD, (i + 1) * _PER_SHARD)).tofile(folder / f"x-{i:03d}.bin")
    catalog = str(folder / "x.catalog")
    command = [
        "index",
        str(folder / "*.bin"),
        "--dtype",
        "uint32",
        "--length",
        str(LENGTH),
        "--output",
        catalog,
    ]
    subprocess.run(
        [sys.executable, "-m", "dataflow.cli", *command, "--checksum"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def expected(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The samples of these numbers, [n, LENGTH] uint32: the number, then what follows from it."""
    columns = np.arange(LENGTH, dtype=np.uint32)[None] * np.uint32(2654435761)
    return numbers.astype(np.uint32)[:, None] + columns


def numbers_of(num_shards: int) -> np.ndarray[Any, Any]:
    """The samples there are: the last one of a shard has no token after it."""
    everything = np.arange(num_shards * _PER_SHARD)
    return everything[(everything + 1) % _PER_SHARD != 0]


@contextlib.contextmanager
def serving(folder: Path, options: dict[str, float], seed: int) -> Iterator[str]:
    given = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, str(ROOT / "tests" / "slowstore.py"), str(folder), *given, f"--seed={seed}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def epoch(url: str) -> dict[str, Any]:
    """Read one epoch and check every sample. Runs in a process of its own."""
    from dataflow import DataLoader, ShardedDataset

    dataset = ShardedDataset(f"{url}/x.catalog")
    numbers = []
    with DataLoader(dataset, 64) as loader:
        began, cpu = time.perf_counter(), time.process_time()
        for batch in loader:
            tokens = batch["tokens"].numpy()[:, :LENGTH].astype(np.uint32)  # without the token to predict
            numbers.append(tokens[:, 0].copy())
            assert (tokens == expected(tokens[:, 0])).all()
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        stats = loader.stats()
    assert (np.sort(np.concatenate(numbers)) == numbers_of(dataset.catalog.num_shards)).all()
    return {
        "mb_per_s": round(stats.read_bytes / seconds / 1e6, 1),
        "seconds": round(seconds, 2),
        "cpu_s": round(cpu, 2),
        "read_bytes": stats.read_bytes,
        "faults": asdict(stats.faults),
    }


def warmed_up(folder: Path, url: str) -> None:
    """Ask for every file once: the server computes etags at the first request."""
    for path in sorted(folder.glob("x*")):
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(urllib.request.Request(f"{url}/{path.name}", method="HEAD")).close()


def run(folder: Path, options: dict[str, float], seed: int) -> dict[str, Any]:
    with serving(folder, options, seed) as url:
        warmed_up(folder, url)
        urllib.request.urlopen(f"{url}/__stats?reset=1").close()
        command = [sys.executable, "-m", "benchmarks.faults", "--epoch-of", url]
        done = subprocess.run(
            command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S
        )
        with urllib.request.urlopen(f"{url}/__stats") as answer:
            served = json.load(answer)
    wanted = ("requests", "bytes", "errors", "resets", "stalls", "corruptions")
    return {**json.loads(done.stdout), "server": {name: served[name] for name in wanted}}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--epoch-of", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.epoch_of:
        print(json.dumps(epoch(asked.epoch_of)))
        return
    runs: dict[str, list[dict[str, Any]]] = {"without faults": [], "with faults": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_shards(folder, asked.shards)
        for repeat in range(asked.repeats):
            for what, options in (("without faults", STORE), ("with faults", STORE | FAULTS)):
                runs[what].append(run(folder, options, seed=repeat))
                print(f"{what:15} {runs[what][-1]}", flush=True)
    medians = {what: statistics.median(one["mb_per_s"] for one in each) for what, each in runs.items()}
    ratio = medians["with faults"] / medians["without faults"]
    verdict = "held" if ratio >= 0.8 else "MISSED"
    print(f"medians {medians}; ratio {ratio:.2f} (bar: >= 0.80, {verdict})")
    if asked.json:
        told = {
            "date": datetime.date.today().isoformat(),
            "commit": commit(),
            "machine": machine(),
            "versions": versions(),
            "store": STORE,
            "faults": FAULTS,
            "shards": asked.shards,
            "runs": runs,
            "medians_mb_per_s": medians,
            "ratio": round(ratio, 3),
        }
        asked.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
