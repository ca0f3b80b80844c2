"""Real servers for tests: each is started once a session on a port of its own, and ended with it.

What is not installed skips, with the reason; `tests/servers/install.sh` installs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from dataflow.telemetry.serving.http import HttpServer

SCRIPTS = Path(__file__).parents[1] / "servers"
START_S = 100.0
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key of Azurite's development account, the same everywhere."""


@dataclass
class Store:
    """A server with an empty place for objects."""

    url: str
    names: str
    """All of its tars, in the way that it allows: HTTP servers cannot be listed."""
    options: dict[str, Any]
    put: Callable[[str, bytes], None]
    """Store an object under a name below `url`."""
    kill: Callable[[], None]
    revive: Callable[[], None]
    wrong: dict[str, Any] = field(default_factory=dict)
    """The options with credentials that are refused; empty where anybody may read."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _needs(*programs: str) -> None:
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed; tests/servers/install.sh does it")


def _script(name: str, *arguments: object, **environment: str) -> None:
    command = ["bash", str(SCRIPTS / name), *map(str, arguments)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=START_S,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{name} {arguments[0]} took more than {START_S:.0f} s on this machine")
    if done.returncode:
        pytest.skip(f"{name} {arguments[0]} failed on this machine: {done.stdout[-300:]}")


@contextlib.contextmanager
def nginx(scratch: Path) -> Iterator[Store]:
    _needs("nginx")
    folder, run, port = scratch / "files", scratch / "run", free_port()
    folder.mkdir()

    written = itertools.count(1_000_000_000)

    def put(name: str, content: bytes) -> None:
        (folder / name).write_bytes(content)
        second = next(written)  # nginx makes its etags of size and second
        os.utime(folder / name, (second, second))

    def start() -> None:
        _script("nginx.sh", "up", folder, run, port)

    def kill() -> None:
        pid = int((run / "nginx.pid").read_text())
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for one in (pid, *map(int, children)):
            os.kill(one, signal.SIGKILL)
        (run / "nginx.pid").unlink()

    start()
    try:
        yield Store(f"http://127.0.0.1:{port}", "x-{0..2}.tar", {}, put, kill, start)
    finally:
        _script("nginx.sh", "down", run)


@contextlib.contextmanager
def radosgw(scratch: Path) -> Iterator[Store]:
    _needs("radosgw", "ceph-mon", "ceph-osd", "radosgw-admin", "curl")
    s3fs = pytest.importorskip("s3fs")
    run, port = scratch / "ceph", free_port()
    try:
        _script("radosgw.sh", "up", run, port, RGW_STORE="memstore")
        options = {"key": "testkey", "secret": "testsecret", "endpoint_url": f"http://127.0.0.1:{port}"}
        fs = s3fs.S3FileSystem(**options)
        fs.mkdir("bucket")
        yield Store(
            "s3://bucket",
            "x-*.tar",
            options,
            lambda name, content: fs.pipe_file(f"bucket/{name}", content),
            lambda: _script("radosgw.sh", "kill", run),
            lambda: _script("radosgw.sh", "revive", run, port),
            {**options, "secret": "wrong"},
        )
    finally:
        _script("radosgw.sh", "down", run)


@contextlib.contextmanager
def azurite(scratch: Path) -> Iterator[Store]:
    _needs("node")
    program = SCRIPTS / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists():
        pytest.skip("azurite is not installed; tests/servers/install.sh does it")
    adlfs = pytest.importorskip("adlfs")
    port = free_port()
    given = ["--silent", "--disableTelemetry", "--skipApiVersionCheck", "--location", str(scratch)]
    command = [str(program), *given, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        curl = ["curl", "-s", "-o", "/dev/null", "--retry", "60", "--retry-delay", "1", "--retry-connrefused"]
        subprocess.run([*curl, f"http://127.0.0.1:{port}/"], check=True, timeout=START_S)

    def kill() -> None:
        process = running.pop()
        process.terminate()  # it writes its table of objects at its end only
        process.wait(10)

    def connection(key: str) -> str:
        endpoint = f"BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;"
        return f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={key};{endpoint}"

    start()
    try:
        options = {"connection_string": connection(KEY)}
        fs = adlfs.AzureBlobFileSystem(**options)
        fs.mkdir("box")
        wrong = {"connection_string": connection("d3Jvbmc=")}

        def put(name: str, content: bytes) -> None:
            fs.pipe_file(f"box/{name}", content, overwrite=True)

        yield Store("abfs://box", "x-*.tar", options, put, kill, start, wrong)
    finally:
        kill()


SERVERS = {"nginx": nginx, "radosgw": radosgw, "azurite": azurite}


@contextmanager
def served(server: HttpServer) -> Iterator[tuple[str, int]]:
    """An `HttpServer` that serves in a thread of the test: its host and port."""
    loops: Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Queue()

    async def serve() -> None:
        over = asyncio.Event()
        loops.put((asyncio.get_running_loop(), over))
        await server.serve(over)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    loop, over = loops.get(timeout=20)
    try:
        host, port = server.listener.getsockname()
        yield host, port
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(20)
