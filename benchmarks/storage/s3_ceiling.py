"""`dataflow bench storage` and a loader over real S3 (Ceph radosgw) beside the ceiling of the server.

    python -m benchmarks.storage.s3_ceiling                  about two minutes; needs radosgw and the extra s3
    python -m benchmarks.storage.s3_ceiling --json s3.json   also saves the figures
    python -m benchmarks.storage.s3_ceiling --link-mbps 2000 4000  some minutes; needs root, ip and tc

The gateway is started on this machine by tests/servers/radosgw.sh with its objects in memory, so client and
server share its cores. The ceiling is measured before each run: 16 threads of `http.client` ask for ranges of
2 MiB by a signed URL and throw the bytes away. `bench storage` reads the same object in the same way; the
loader takes epochs of 1 GB from 16 tars, of 98,000 bytes a sample undecoded (W1-raw) and of 3,072 (W4), in a
process of its own: shuffled, the catalog given, the first epoch left out.

Without a link, the question is what a gateway and a client make of two cores that they share. `--link-mbps`
asks another one, the usual one: how much of a network is filled that is slower than both. Ceiling, `bench
storage` and loader then run in a network namespace whose link to the gateway has this rate
(`benchmarks/lab/netlab.sh`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import REPOSITORY
from benchmarks.lab.network import Lab, lab, on_hosts, set_rates, why_not
from benchmarks.report import save_figures
from benchmarks.runner import call_command, result_of
from benchmarks.storage.ceiling import SIZE, ceiling, ours
from benchmarks.tars import write_tar

SHARDS = 16
CASES = {"W1-raw": (98_000, 640, 64), "W4": (3_072, 15_000, 256)}
"""Bytes a sample, samples a shard, samples a batch."""
_EPOCHS = 3
_LAB = 80
_LIMIT_S = 120.0
"""A ceiling that takes longer is ended, and the benchmark with it."""
_SCRIPT = ["bash", str(REPOSITORY / "tests" / "servers" / "radosgw.sh")]


@contextlib.contextmanager
def radosgw(port: int, rates: Sequence[str] = ()) -> Iterator[tuple[dict[str, Any], Lab | None]]:
    """A gateway; gives the storage options for it, and a host behind a link where rates are given."""
    with contextlib.ExitStack() as stack:
        run = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run")
        stack.callback(subprocess.run, [*_SCRIPT, "down", run], check=True)

        def script(*words: str, **more: str) -> None:
            given = {**os.environ, "RGW_STORE": "memstore", **more}
            subprocess.run([*_SCRIPT, *words], check=True, env=given, stdout=subprocess.DEVNULL)

        script("up", run, str(port))
        options = {"key": "testkey", "secret": "testsecret", "endpoint_url": f"http://127.0.0.1:{port}"}
        if not rates:
            yield options, None
            return
        host = stack.enter_context(lab(rates, _LAB))  # later than the store, which takes any address it finds
        script("kill", run)
        script("revive", run, str(port), RGW_ALSO=host.outside)
        yield {**options, "endpoint_url": f"http://{host.outside}:{port}"}, host


def files(options: dict[str, Any]) -> Any:
    """The gateway's filesystem."""
    import s3fs

    return s3fs.S3FileSystem(**options, config_kwargs={"signature_version": "s3v4"})


def fill(options: dict[str, Any], folder: Path) -> dict[str, int]:
    """Make the objects; the bytes of each workload."""
    fs = files(options)
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
    return sizes


def epochs(
    options: dict[str, Any], name: str, folder: Path, inside: Sequence[str] = ()
) -> list[tuple[float, float]]:
    """Seconds and CPU seconds of each epoch, in a process of its own."""
    command = [*inside, *call_command(taken, options, name, str(folder))]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return [(seconds, cpu_s) for seconds, cpu_s in result_of(done.stdout)]


def taken(options: dict[str, Any], name: str, folder: str) -> list[tuple[float, float]]:
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
    return found[1:]


def rows(
    options: dict[str, Any],
    sizes: dict[str, int],
    folder: Path,
    *,
    seconds: float,
    repeats: int,
    host: Lab | None,
) -> Iterator[dict[str, Any]]:
    """Measure all cases; on the one host of a lab, or, without one, here."""
    url, inside = str(files(options).sign("bucket/x.bin", 3600)), host.inside(0) if host else []

    def most(seconds: float) -> float:
        if host is None:
            return ceiling(url, seconds)
        return float(on_hosts(host, [(url, seconds)], ceiling, limit_s=_LIMIT_S))

    most(0.5)
    for case in ("bench storage", *CASES):
        runs = []
        for _ in range(repeats):
            limit = most(seconds)
            if case == "bench storage":
                found = ours("s3://bucket/x.bin", seconds, options, inside)
                rate, cpu_s = found["mb_per_s"], found["cpu_s_per_gb"]
            else:
                all_epochs = epochs(options, case, folder, inside)
                rate = statistics.median(sizes[case] / 1e6 / seconds for seconds, _ in all_epochs)
                cpu_s = statistics.median(cpu / sizes[case] * 1e9 for _, cpu in all_epochs)
            runs.append({"ceiling_mb_per_s": limit, "ours_mb_per_s": rate, "cpu_s_per_gb": cpu_s})
        ratio = statistics.median(run["ours_mb_per_s"] / run["ceiling_mb_per_s"] for run in runs)
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        yield {"case": case, "ratio": ratio, **middle, "runs": runs}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--port", type=int, default=8390)
    parser.add_argument(
        "--link-mbps", type=int, nargs="+", default=[], help="measure through links of these Mbit/s instead"
    )
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    if asked.link_mbps and (reason := why_not(_LAB)):
        parser.error(f"--link-mbps: {reason}")
    found = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        links = asked.link_mbps or [None]
        rates = [f"{mbps}mbit" for mbps in asked.link_mbps[:1]]
        options, host = stack.enter_context(radosgw(asked.port, rates))
        sizes = fill(options, folder)
        for mbps in links:
            label = "no link between"
            if host:
                set_rates(host, f"{mbps}mbit")
                label = f"behind a link of {mbps} Mbit/s"
            for row in rows(options, sizes, folder, seconds=asked.seconds, repeats=asked.repeats, host=host):
                told = {key: round(value, 2) for key, value in row.items() if isinstance(value, float)}
                print(f"{label}: {row['case']}: {told.pop('ratio')} of the ceiling, {told}", flush=True)
                found.append({"link_mbps": mbps, **row})
    if asked.json:
        save_figures(asked.json, rows=found)


if __name__ == "__main__":
    main()
