"""Small files that ask for much memory, and what indexing them takes, in a process of its own."""

from __future__ import annotations

import gzip
import json
import re
import resource
from collections.abc import Iterable
from pathlib import Path

from programs_kit import Script

LIMIT_MB = 512
_ADDRESS_SPACE = 6 << 30
_TIMEOUT_S = 120.0
_IMPORTED = (
    *("sharding.formats.arrow.jsonl", "pyarrow.parquet", "zstandard"),
    *("sharding.catalog.build", "sharding.formats", "bombs_kit"),
)


def index_apart(path: Path, format_name: str = "auto") -> tuple[str, float]:
    """Index a file in a process of its own: what was raised ("": nothing), and peak MB besides imports."""
    program = "import sys, bombs_kit\nbombs_kit.tell(*sys.argv[1:])\n"
    with Script(program, path, format_name, how="forked", folder=path.parent, imported=_IMPORTED) as indexing:
        code, out, err = indexing.end(_TIMEOUT_S)
    assert code == 0, f"exit status {code}: {err[-2000:]}"
    answer = json.loads(out)
    return answer["error"], answer["megabytes"]


def tell(path: str, format_name: str) -> None:
    """Index a file and print what came of it."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    from sharding.catalog.build import build_catalog
    from sharding.formats import resolve_format

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
