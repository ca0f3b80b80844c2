"""Small files that ask for much memory, and what indexing them takes, in a process of its own."""

from __future__ import annotations

import gzip
import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# As a script: the folders beside this file are named like the packages.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LIMIT_MB = 512
_ADDRESS_SPACE = 6 << 30
_TIMEOUT_S = 120.0


def index_apart(path: Path, format_name: str = "auto") -> tuple[str, float]:
    """Index a file in a process of its own: what was raised ("": nothing), and peak MB besides imports."""
    done = subprocess.run(
        [sys.executable, __file__, str(path), format_name], capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-2000:]}"
    answer = json.loads(done.stdout)
    return answer["error"], answer["megabytes"]


def _main(path: str, format_name: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    import pyarrow.json
    import pyarrow.parquet
    import zstandard

    from sharding.catalog.build import build_catalog
    from sharding.formats import resolve_format

    assert pyarrow.json
    assert pyarrow.parquet
    assert zstandard
    before, error = _peak(), ""
    try:
        build_catalog(
            [path], resolve_format(format_name, [path], length=8 if format_name == "tokens" else None)
        )
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    print(json.dumps({"error": error[:3000], "megabytes": _peak() - before}))


def _peak() -> float:
    """MB of this program at the most; `ru_maxrss` would begin with those of the process that started it."""
    kilobytes = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert kilobytes
    return int(kilobytes[1]) * 1024 / 1e6


def write_gzip(path: Path, pieces: Iterable[bytes]) -> None:
    """Compress piece by piece."""
    with gzip.open(path, "wb", compresslevel=6) as file:
        for piece in pieces:
            file.write(piece)


def write_zstd(path: Path, pieces: Iterable[bytes]) -> None:
    """Compress piece by piece."""
    import zstandard

    with path.open("wb") as stored, zstandard.ZstdCompressor(level=3).stream_writer(stored) as file:
        for piece in pieces:
            file.write(piece)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
