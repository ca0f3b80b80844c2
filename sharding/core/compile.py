"""Compile `libcore.so` of the C files: at installation, and later by `python -m sharding.core.compile`.

The library is plain C without Python.h and is loaded by ctypes: one file serves every Python. It is compiled
for the least processor of its kind; faster variants of its loops are chosen when it is loaded, and where a
compiler or a C library cannot do that, `CORE_PLAIN` leaves them out. `setup.py` imports this module before
anything is installed: it needs the standard library only.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).parent
_NAMES = ("checksum", "core", "lines", "order", "pages", "patches", "queue", "resize", "signals", "wire")
SOURCES = tuple(FOLDER / f"{name}.c" for name in _NAMES)
HEADER, LIBRARY = FOLDER / "core.h", FOLDER / "libcore.so"
FLAGS = (
    *("-O3", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"),
    "-ffp-contract=off",  # fractions are those of Python and numpy, to the bit
)
PLAIN = ("-DCORE_PLAIN",)
ZIG = (sys.executable, "-m", "ziglang", "cc")
_COMPILE_S = 300.0
"""zig takes 10 s, most of it for a run-time library of its own; an emulated processor ten times as long."""


def compilers_on_path() -> list[tuple[str, ...]]:
    """Commands of the C compilers that this machine has, `$CC` first."""
    named = tuple(shlex.split(os.environ.get("CC", "")))
    return [
        command for command in (named, ("cc",), ("gcc",), ("clang",)) if command and shutil.which(command[0])
    ]


class NoCompilerError(Exception):
    """Nothing here compiles the library."""


def compile_core(library: Path = LIBRARY) -> None:
    """Make the library and say by which compiler.

    Raises `NoCompilerError` that names each compiler that was tried; an older library does not stay then.
    """
    reasons = ""
    for command in (*((*c, *more) for c in compilers_on_path() for more in ((), PLAIN)), *_zig()):
        reason = _reason_against(library, command)
        if not reason:
            print(f"dataflow: {library.name} is compiled by {shlex.join(command)}", flush=True)
            return
        reasons += f"\n{shlex.join(command)}: {reason}"
    library.unlink(missing_ok=True)
    raise NoCompilerError(
        f"dataflow: no C compiler works here, so {library.name} is not compiled, which all loaders need. "
        "Install gcc or clang (`apt install gcc`, `dnf install gcc`, `conda install gcc`), name one by the "
        f"environment variable CC, or `pip install ziglang`; then install again.{reasons}"
    )


def contract_version() -> int:
    """Return the `core_version` that a library must give that is made from the header beside this file."""
    match = re.search(r"^#define CORE_VERSION (\d+)", HEADER.read_text("utf-8"), re.MULTILINE)
    assert match, f"{HEADER} has no CORE_VERSION"
    return int(match[1])


def _zig() -> list[tuple[str, ...]]:
    """The compiler that PyPI has, if it is installed.

    By itself it compiles for the processor and the C library of this very machine, adds a megabyte of debug
    information and a `memcpy` of its own. Its variants of loops took 1.7 times as long as the plain ones.
    """
    if importlib.util.find_spec("ziglang") is None:
        return []
    target = f"{platform.machine()}-linux-gnu.2.17"
    return [(*ZIG, "-s", "-mcpu=baseline", "-target", target, "-nostdlib", "-lc", *PLAIN)]


def _reason_against(library: Path, command: tuple[str, ...]) -> str:
    """Replace the library by what a command compiles, or say why not.

    It is made elsewhere and then renamed: who has the old one loaded keeps it whole. It is loaded first, as a
    compiler for another processor or C library succeeds, too.
    """
    with TemporaryDirectory(prefix=f"{library.name}.", dir=library.parent) as folder:
        new_library = Path(folder) / library.name
        # zig would leave its run-time library in the user's cache.
        caches = dict.fromkeys(("ZIG_LOCAL_CACHE_DIR", "ZIG_GLOBAL_CACHE_DIR"), folder)
        try:
            done = subprocess.run(
                [*command, *FLAGS, "-o", str(new_library), *map(str, SOURCES)],
                env={**os.environ, **caches},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_COMPILE_S,
            )
            if done.returncode:
                return done.stderr.strip() or f"exit code {done.returncode}"
            version = ctypes.CDLL(str(new_library)).core_version()
        except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
            return str(error)
        if version != contract_version():
            return f"core_version gives {version}, and {HEADER.name} has {contract_version()}"
        new_library.replace(library)
    return ""


if __name__ == "__main__":
    try:
        compile_core()
    except NoCompilerError as error:
        sys.exit(str(error))
