"""`dataflow bench storage` over HTTP beside the ceiling of the server.

    python -m benchmarks.storage_ceiling                      one minute; nginx too, where it is installed
    python -m benchmarks.storage_ceiling --json figures.json

Servers on this machine over a file of 256 MiB, page cache warm: tests/slowstore.py held to 0.4, 2 and 4
Gbit/s in all after 20 ms of latency, and nginx without a limit (its `limit_rate` does not bind requests as
short as these). The ceiling of each is measured in the same turn by 16 threads with plain sockets that throw
the bytes away. Blocks of 2 MiB, 16 in flight, random. Without a limit the client, not the server, is what is
measured: both are told.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.report import commit, machine

ROOT = Path(__file__).resolve().parent.parent
SIZE = 256 << 20
BLOCK = 2 << 20
IN_FLIGHT = 16
_BAR = 0.9
_MBPS = (400, 2000, 4000)

_NGINX = """
user root; daemon off; pid {run}/pid; error_log {run}/errors; worker_processes 1;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; sendfile_max_chunk 2m; keepalive_requests 1000000;
  client_body_temp_path {run}/a; proxy_temp_path {run}/b; fastcgi_temp_path {run}/c;
  uwsgi_temp_path {run}/d; scgi_temp_path {run}/e;
  server {{ listen 127.0.0.1:{port}; root {folder}; }}
}}
"""


@contextlib.contextmanager
def slowstore(folder: Path, mbps: int) -> Iterator[str]:
    command = [sys.executable, str(ROOT / "tests" / "slowstore.py"), str(folder)]
    limits = [f"--total-mbps={mbps}", "--latency-ms=20"]
    with subprocess.Popen([*command, *limits], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@contextlib.contextmanager
def nginx(folder: Path, port: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as run:
        config = Path(run) / "nginx.conf"
        config.write_text(_NGINX.format(run=run, port=port, folder=folder))
        with subprocess.Popen(["nginx", "-c", str(config), "-e", f"{run}/errors"]) as process:
            try:
                _await_answer(port)
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()


def _await_answer(port: int) -> None:
    give_up = time.monotonic() + 10
    while time.monotonic() < give_up:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("HEAD", "/x.bin")
            connection.getresponse().read()
            return
        time.sleep(0.05)
    raise TimeoutError("nginx does not answer")


def ceiling(url: str, seconds: float) -> float:
    """MB/s of plain sockets."""
    where = urlsplit(url)
    assert where.hostname is not None
    host, port = where.hostname, where.port
    stop = time.perf_counter() + seconds

    def fetch(number: int) -> int:
        connection = http.client.HTTPConnection(host, port, timeout=60)
        out, done, at = bytearray(BLOCK), 0, number * 7
        while time.perf_counter() < stop:
            at = (at + 13) % (SIZE // BLOCK)
            headers = {"Range": f"bytes={at * BLOCK}-{(at + 1) * BLOCK - 1}"}
            connection.request("GET", "/x.bin", headers=headers)
            answer = connection.getresponse()
            while got := answer.readinto(out):
                done += got
        connection.close()
        return done

    began = time.perf_counter()
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        total = sum(pool.map(fetch, range(IN_FLIGHT)))
    return total / 1e6 / (time.perf_counter() - began)


def ours(url: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "dataflow.cli", "bench", "storage", f"{url}/x.bin", "--json", "-"]
    command += ["--pattern", "random", "--block-size", str(BLOCK), "--in-flight", str(IN_FLIGHT)]
    done = subprocess.run(
        [*command, "--seconds", str(seconds)], cwd=ROOT, check=True, capture_output=True, text=True
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
    parser.add_argument("--port", type=int, default=8377)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "x.bin").write_bytes(os.urandom(SIZE))
        servers: dict[str, Any] = {f"slowstore, {mbps} Mbit/s": slowstore(folder, mbps) for mbps in _MBPS}
        if shutil.which("nginx"):
            servers["nginx, no limit"] = nginx(folder, asked.port)
        for server, serving in servers.items():
            with serving as url:
                ceiling(url, 0.5)
                runs = [(ceiling(url, asked.seconds), ours(url, asked.seconds)) for _ in range(asked.repeats)]
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
        told = {
            "date": datetime.date.today().isoformat(),
            "commit": commit(),
            "machine": machine(),
            "block_bytes": BLOCK,
            "in_flight": IN_FLIGHT,
            "servers": rows,
        }
        asked.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
