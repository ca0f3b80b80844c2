"""What benchmarks of remote data share: the slow store, and token shards that it serves.

The store is slowstore.py on this machine. Each sample of the shards is its number, hashed, so that
whoever reads one knows whether it is right.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import REPOSITORY

LENGTH = 2048
SHARD_BYTES = 32 << 20
_PER_SHARD = SHARD_BYTES // (4 * LENGTH)


# ---- the store -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlowServer:
    """slowstore.py over a folder."""

    url: str
    folder: Path

    def stats(self) -> dict[str, Any]:
        """Its counts since the last call."""
        return server_stats(self.url)

    def warm_up(self, pattern: str = "*") -> None:
        """Ask for every file once, then count anew.

        The server computes a file's etag at the first request for it; no store does, so nobody waits for it.
        """
        for path in sorted(self.folder.glob(pattern)):
            url = f"{self.url}/{path.relative_to(self.folder)}"
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(urllib.request.Request(url, method="HEAD")).close()
        self.stats()


def server_stats(url: str) -> dict[str, Any]:
    """Counts of the server at `url` since the last call."""
    with urllib.request.urlopen(f"{url}/__stats?reset=1") as answer:
        counted: dict[str, Any] = json.load(answer)
    return counted


@contextlib.contextmanager
def serving(
    folder: Path, options: Mapping[str, float | str], inside: Sequence[str] = ()
) -> Iterator[SlowServer]:
    """Serve a folder; options are those of slowstore.py, such as `{"latency-ms": 30}`.

    `inside` is put before the command, such as what runs it in another network namespace.
    """
    given = [f"--{name}={value}" for name, value in options.items()]
    script = REPOSITORY / "tests" / "servers" / "slowstore.py"
    command = [*inside, sys.executable, str(script), str(folder), *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield SlowServer(process.stdout.readline().split()[-1], folder)
        finally:
            process.terminate()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


# ---- shards ----------------------------------------------------------------------------------------------


def make_shards(folder: Path, num_shards: int, *, distinct: int | None = None) -> None:
    """Token shards, and x.catalog, which has their checksums.

    `distinct`: so many have values of their own, the others are these again: a long epoch on a small disk.
    """
    distinct = distinct or num_shards
    for i in range(distinct):
        expected(np.arange(i * _PER_SHARD, (i + 1) * _PER_SHARD)).tofile(folder / f"x-{i:03d}.bin")
    for i in range(distinct, num_shards):
        os.link(folder / f"x-{i % distinct:03d}.bin", folder / f"x-{i:03d}.bin")
    command = ["index", str(folder / "*.bin"), "--dtype", "uint32", "--length", str(LENGTH), "--checksum"]
    subprocess.run(
        [sys.executable, "-m", "dataflow.tools.cli", *command, "--output", str(folder / "x.catalog")],
        cwd=REPOSITORY,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def expected(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The samples of these numbers, [n, LENGTH] uint32: the number, then what follows from it."""
    columns = np.arange(LENGTH, dtype=np.uint32)[None] * np.uint32(2654435761)
    return numbers.astype(np.uint32)[:, None] + columns


def checked(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The numbers of the samples of a batch, [n]; `AssertionError` if one has wrong values."""
    values = tokens[:, :LENGTH].astype(np.uint32)  # without the token to predict
    assert (values == expected(values[:, 0])).all(), "wrong values"
    return values[:, 0].copy()  # not a view, which would keep all values


def assert_all_once(numbers: list[np.ndarray[Any, Any]], num_shards: int) -> None:
    """The last sample of a shard is none: there is no token after it."""
    everything = np.arange(num_shards * _PER_SHARD)
    wanted = everything[(everything + 1) % _PER_SHARD != 0]
    assert (np.sort(np.concatenate(numbers)) == wanted).all(), "samples missing or twice"
