"""Find and read the pages of all trainings of this user on this machine, alive and ended."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from dataflow.telemetry.status.record import TrainingRecord, from_page, why_unread

SUFFIX = ".page"
_MOST_BYTES = 16 << 20
_OLD_S = 86_400.0
"""Seconds for which the page of a process that is gone stays."""
_MOST_GONE = 64
"""Pages of processes that are gone which stay."""
_MOST_FORMER = 4
"""Pages of trainings before one that it reads."""
_TRIES = 10


def page_folders() -> list[Path]:
    """Folders where pages of this user may lie, the one that a training takes first."""
    uid, runtime = os.geteuid(), os.environ.get("XDG_RUNTIME_DIR", "")
    folders = [Path(runtime) / "dataflow"] if os.path.isabs(runtime) else []
    named = f"dataflow-{uid}"
    # TMPDIR last: on clusters it may be a disk that other machines share, and a slow one.
    others = (Path(f"/run/user/{uid}/dataflow"), Path("/tmp") / named, Path(tempfile.gettempdir()) / named)
    return list(dict.fromkeys([*folders, *others]))


def read_pages(folders: Sequence[Path] | None = None) -> list[TrainingRecord]:
    """Read what all trainings of this user on this machine say, the oldest first.

    Files of other users, links, and what is no page of this version are left out.

    Args:
        folders: where pages lie; None: those of `page_folders`.

    Returns:
        Records whose `state` is "died" where the process is gone and did not say that it ended.
    """
    records = list(pages_in(page_folders() if folders is None else folders))
    return sorted(records, key=lambda record: (record.began_at, record.rank, record.pid))


def pages_in(folders: Sequence[Path]) -> Iterator[TrainingRecord]:
    """Yield the pages in some folders."""
    return _records(folder / name for folder in folders for name in _names(folder))


def former_pages(folder: Path, key: str, *, besides: str) -> list[TrainingRecord]:
    """Read the newest pages of processes that are gone and had this key in their names, the newest first.

    Costs a look at each file: only a few are read, and not the one named `besides`.
    """
    ending = f"-{key}{SUFFIX}"
    named = [name for _, name in _written(folder) if name.endswith(ending) and name != besides]
    records = _records(folder / name for name in named[:_MOST_FORMER])
    return [record for record in records if not record.is_alive]


def _records(paths: Iterable[Path]) -> Iterator[TrainingRecord]:
    boot = boot_id()
    for path in paths:
        record = _read(path)
        if record is None or record.host != platform.node():  # of another machine: who knows if it lives
            continue
        is_gone = record.boot_id != boot or start_ticks(record.pid) != record.start_ticks
        if is_gone and record.is_alive:
            record = msgspec.structs.replace(record, state="died")
        yield record


def unread_pages(folders: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Yield files of this user among the pages in some folders that say nothing, and why."""
    for folder in folders:
        for name in _names(folder):
            path = folder / name
            if _read(path) is None:
                with suppress(OSError):
                    yield path, why_unread(_bytes_of(path))


def remove_old(folder: Path, older_than_s: float = _OLD_S) -> None:
    """Remove pages of processes that are gone, if they were written so long ago, or 64 others are newer.

    Costs a look at each file: pages are not read.
    """
    before = time.time() - older_than_s
    for number, (written, name) in enumerate(_written(folder)):
        if written >= before and number < _MOST_GONE:
            continue
        pid, ticks = (*name.removesuffix(SUFFIX).split("-"), "")[:2]
        if not (pid.isdecimal() and ticks == str(start_ticks(int(pid)))):
            with suppress(OSError):
                (folder / name).unlink()


def _written(folder: Path) -> list[tuple[float, str]]:
    """Return when the pages in a folder were written, and their names, the newest first."""
    pages = []
    for name in _names(folder):
        with suppress(OSError):
            pages.append(((folder / name).lstat().st_mtime, name))
    return sorted(pages, reverse=True)


def _names(folder: Path) -> list[str]:
    try:
        fd = open_folder(folder)
    except OSError:
        return []
    try:
        return sorted(name for name in os.listdir(fd) if name.endswith(SUFFIX))
    finally:
        os.close(fd)


def open_folder(folder: Path) -> int:
    """Open a folder of this user; `OSError` for a link, a file, or a folder of somebody else."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(f"{folder} belongs to another user")
    return fd


def _read(path: Path) -> TrainingRecord | None:
    for _ in range(_TRIES):  # a write takes microseconds
        try:
            if record := from_page(_bytes_of(path)):
                return record
        except OSError:
            return None
    return None


def _bytes_of(path: Path) -> bytes:
    """The bytes of a file of this user; `OSError` for a link, a folder, and what is somebody else's."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb", buffering=0):
        if os.fstat(fd).st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user")
        return os.pread(fd, min(os.fstat(fd).st_size, _MOST_BYTES), 0)


def boot_id() -> str:
    """Return the kernel's id of this start of this machine; "" where it is not told."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def start_ticks(pid: int) -> int:
    """Return when a process was started, in clock ticks; 0: there is none, or it has ended."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    return 0
