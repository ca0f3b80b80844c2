"""`dataflow bench storage` and a loader over real S3 (Ceph radosgw) beside the ceiling of the server.

    python -m benchmarks.s3_ceiling                      about two minutes; needs radosgw and the extra s3
    python -m benchmarks.s3_ceiling --json s3.json       also saves the figures

The gateway is started on this machine by tests/servers/radosgw.sh with its objects in memory, so client and
server share its cores. The ceiling is measured before each run: 16 threads of `http.client` ask for ranges of
2 MiB by a signed URL and throw the bytes away. `bench storage` reads the same object in the same way; the
loader takes epochs of 1 GB from 16 tars, of 98,000 bytes a sample undecoded (W1-raw) and of 3,072 (W4), in a
process of its own: shuffled, the catalog given, the first epoch left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import save_figures
from benchmarks.storage_ceiling import SIZE, ceiling, ours
from benchmarks.tars import write_tar

ROOT = Path(__file__).resolve().parent.parent
SHARDS = 16
CASES = {"W1-raw": (98_000, 640, 64), "W4": (3_072, 15_000, 256)}
"""Bytes a sample, samples a shard, samples a batch."""
_EPOCHS = 3
_SCRIPT = ["bash", str(ROOT / "tests" / "servers" / "radosgw.sh")]


@contextlib.contextmanager
def radosgw(port: int) -> Iterator[dict[str, Any]]:
    """A gateway; gives the storage options for it."""
    with tempfile.TemporaryDirectory() as name:
        run, given = str(Path(name) / "run"), {**os.environ, "RGW_STORE": "memstore"}
        try:
            command = [*_SCRIPT, "up", run, str(port)]
            subprocess.run(command, check=True, env=given, stdout=subprocess.DEVNULL)
            yield {"key": "testkey", "secret": "testsecret", "endpoint_url": f"http://127.0.0.1:{port}"}
        finally:
            subprocess.run([*_SCRIPT, "down", run], check=True)


def fill(options: dict[str, Any], folder: Path) -> tuple[str, dict[str, int]]:
    """Make the objects; the signed URL of the one for ranges, and the bytes of each workload."""
    import s3fs

    fs = s3fs.S3FileSystem(**options, config_kwargs={"signature_version": "s3v4"})
    fs.mkdir("bucket")
    fs.pipe_file("bucket/x.bin", os.urandom(SIZE))
    sizes = dict.fromkeys(CASES, 0)
    for name, (nbytes, count, _) in CASES.items():
        for shard in range(SHARDS):
            rng, path = np.random.default_rng(shard), folder / "shard.tar"
            write_tar(
                path, ((f"{i:06d}", {"bin": rng.bytes(nbytes), "cls": b"%d" % i}) for i in range(count))
            )
            fs.put_file(str(path), f"bucket/{name}-{shard:02d}.tar")
            sizes[name] += path.stat().st_size
    return str(fs.sign("bucket/x.bin", 3600)), sizes


def epochs(options: dict[str, Any], name: str, folder: Path) -> list[tuple[float, float]]:
    """Seconds and CPU seconds of each epoch, in a process of its own."""
    asked = json.dumps([options, name, str(folder)])
    command = [sys.executable, "-m", "benchmarks.s3_ceiling", "--child", asked]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [(seconds, cpu_s) for seconds, cpu_s in json.loads(done.stdout)]


def child(options: dict[str, Any], name: str, folder: str) -> None:
    from dataflow import DataLoader, ShardedDataset

    dataset = ShardedDataset(
        f"s3://bucket/{name}-*.tar", storage_options=options, catalog=f"{folder}/{name}.catalog"
    )
    found = []
    with DataLoader(dataset, CASES[name][2], shuffle=True) as loader:
        for _ in range(1 + _EPOCHS):
            began, cpu_s = time.perf_counter(), time.process_time()
            for _ in loader:
                pass
            found.append((time.perf_counter() - began, time.process_time() - cpu_s))
    print(json.dumps(found[1:]))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--port", type=int, default=8390)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.child:
        child(*json.loads(asked.child))
        return
    rows = []
    with tempfile.TemporaryDirectory() as name, radosgw(asked.port) as options:
        folder = Path(name)
        url, sizes = fill(options, folder)
        ceiling(url, 0.5)
        for case in ("bench storage", *CASES):
            runs = []
            for _ in range(asked.repeats):
                limit = ceiling(url, asked.seconds)
                if case == "bench storage":
                    found = ours("s3://bucket/x.bin", asked.seconds, options)
                    rate, cpu_s = found["mb_per_s"], found["cpu_s_per_gb"]
                else:
                    taken = epochs(options, case, folder)
                    rate = statistics.median(sizes[case] / 1e6 / seconds for seconds, _ in taken)
                    cpu_s = statistics.median(cpu / sizes[case] * 1e9 for _, cpu in taken)
                runs.append({"ceiling_mb_per_s": limit, "ours_mb_per_s": rate, "cpu_s_per_gb": cpu_s})
            ratio = statistics.median(run["ours_mb_per_s"] / run["ceiling_mb_per_s"] for run in runs)
            middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            print(
                case, f"{ratio:.2f} of the ceiling", {key: round(value, 2) for key, value in middle.items()}
            )
            sys.stdout.flush()
            rows.append({"case": case, "ratio": ratio, **middle, "runs": runs})
    if asked.json:
        save_figures(asked.json, rows=rows)


if __name__ == "__main__":
    main()
