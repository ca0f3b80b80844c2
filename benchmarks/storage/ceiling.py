"""`dataflow bench storage` over HTTP beside the ceiling of the server.

    python -m benchmarks.storage.ceiling                      one minute; nginx too, where it is installed
    python -m benchmarks.storage.ceiling --json benchmarks/results/storage-ceiling.json

Servers on this machine over a file of 256 MiB, page cache warm: slowstore.py held to 0.4, 2 and 4
Gbit/s in all after 20 ms of latency, and nginx without a limit (its `limit_rate` does not bind requests as
short as these). The ceiling of each is measured in the same turn by 16 threads with plain sockets that throw
the bytes away. Blocks of 2 MiB, 16 in flight, random. Without a limit the client, not the server, is what is
measured: both are told.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import REPOSITORY
from benchmarks.remote.slow_server import free_port, serving
from benchmarks.report import save_figures

SIZE = 256 << 20
BLOCK = 2 << 20
IN_FLIGHT = 16
_BAR = 0.9
_MBPS = (400, 2000, 4000)


@contextlib.contextmanager
def slowstore(folder: Path, mbps: int) -> Iterator[str]:
    with serving(folder, {"total-mbps": mbps, "latency-ms": 20.0}) as server:
        yield server.url


@contextlib.contextmanager
def nginx(folder: Path) -> Iterator[str]:
    """Nginx over a folder; when its script returns, it listens."""
    script, port = ["bash", str(REPOSITORY / "tests" / "servers" / "nginx.sh")], free_port()
    with tempfile.TemporaryDirectory() as name:
        run = str(Path(name) / "run")
        subprocess.run([*script, "up", str(folder), run, str(port)], check=True)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            subprocess.run([*script, "down", run], check=True)


def ceiling(url: str, seconds: float) -> float:
    """MB/s of plain sockets that read ranges of a file of `SIZE` bytes."""
    where = urlsplit(url)
    assert where.hostname is not None
    host, port = where.hostname, where.port
    target = f"{where.path}?{where.query}" if where.query else where.path
    stop = time.perf_counter() + seconds

    def fetch(number: int) -> int:
        connection = http.client.HTTPConnection(host, port, timeout=60)
        out, done, at = bytearray(BLOCK), 0, number * 7
        while time.perf_counter() < stop:
            at = (at + 13) % (SIZE // BLOCK)
            headers = {"Range": f"bytes={at * BLOCK}-{(at + 1) * BLOCK - 1}"}
            connection.request("GET", target, headers=headers)
            answer = connection.getresponse()
            while got := answer.readinto(out):
                done += got
        connection.close()
        return done

    began = time.perf_counter()
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        total = sum(pool.map(fetch, range(IN_FLIGHT)))
    return total / 1e6 / (time.perf_counter() - began)


def ours(
    url: str, seconds: float, options: Mapping[str, Any] | None = None, inside: Sequence[str] = ()
) -> dict[str, Any]:
    """What `dataflow bench storage` says of the same ranges, with these storage options.

    `inside` is put before the command, such as what runs it in another network namespace.
    """
    command = [*inside, sys.executable, "-m", "dataflow.tools.cli", "bench", "storage", url, "--json", "-"]
    command += ["--pattern", "random", "--block-size", str(BLOCK), "--in-flight", str(IN_FLIGHT)]
    for name, value in (options or {}).items():
        command += ["--storage-option", f"{name}={value}"]
    done = subprocess.run(
        [*command, "--seconds", str(seconds)], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    [one] = found["cases"]
    return {
        "mb_per_s": round(one["mb_per_s"], 1),
        "cpu_s_per_gb": round(one["cpu_s_per_gb"], 2),
        "cores": round(one["cores"], 2),
        "first_byte_p50_ms": round(found["first_byte"]["latency_s"]["50"] * 1e3, 2),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "x.bin").write_bytes(os.urandom(SIZE))
        servers: dict[str, contextlib.AbstractContextManager[str]] = {
            f"slowstore, {mbps} Mbit/s": slowstore(folder, mbps) for mbps in _MBPS
        }
        if shutil.which("nginx"):
            servers["nginx, no limit"] = nginx(folder)
        for server, running in servers.items():
            with running as url:
                file = f"{url}/x.bin"
                ceiling(file, 0.5)
                turns, seconds = range(asked.repeats), asked.seconds
                runs = [(ceiling(file, seconds), ours(file, seconds)) for _ in turns]
            most = statistics.median(limit for limit, _ in runs)
            reached = statistics.median(one["mb_per_s"] for _, one in runs)
            verdict = "held" if reached >= _BAR * most else "MISSED"
            print(
                f"{server:30} ceiling {most:8,.1f} MB/s  ours {reached:8,.1f}  {reached / most:.2f} {verdict}"
            )
            sys.stdout.flush()
            row = {"server": server, "ceiling_mb_per_s": round(most, 1), "ours_mb_per_s": reached}
            rows.append({**row, "ratio": round(reached / most, 3), "runs": runs})
    if asked.json:
        save_figures(asked.json, block_bytes=BLOCK, in_flight=IN_FLIGHT, servers=rows)


if __name__ == "__main__":
    main()
