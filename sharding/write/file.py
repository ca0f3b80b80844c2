"""A file that is complete or not there, on any fsspec filesystem.

Most filesystems show a file while it is written, so it is written under a temporary name beside its path
and renamed at the end (atomic on local disks). Object stores show an upload only once it is closed; there
a rename would be a copy, so the file is uploaded under its own name and the upload abandoned on failure.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from sharding.redaction import hide_secrets, identity_of, redact_logs
from sharding.urls import has_glob_signs, url_to_fs

PARTIAL = ".partial"
"""Ending of the temporary name."""
PRIVATE_FILE = 0o600
"""Mode of files that are this user's alone."""
NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""Numbers of the errors of a disk, a quota or a file that is full."""
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss"}


class NewFile:
    """A file being written. `commit` renames it to its path; `discard` leaves no trace. Not thread-safe.

    Raises `FileExistsError` where the file is there already, unless `overwrite`.
    """

    def __init__(
        self, url: str, *, storage_options: Mapping[str, Any] | None = None, overwrite: bool = False
    ) -> None:
        self.url = url
        self.num_bytes = 0
        """The number of bytes written so far."""
        self._overwrite = overwrite
        redact_logs()
        self._fs, self._path = url_to_fs(url, storage_options or {})
        protocols = self._fs.protocol
        protocols = {protocols} if isinstance(protocols, str) else {*protocols}
        self._is_local = bool(protocols & {"file", "local"})
        self._refuse_existing()
        if protocols & _OBJECT_STORES:
            self._temporary = self._path
        else:
            self._temporary = f"{self._path}.{uuid.uuid4().hex[:12]}{PARTIAL}"
            self._fs.makedirs(self._fs._parent(self._path), exist_ok=True)
        self._file: Any = self._fs.open(self._temporary, "wb")

    @property
    def closed(self) -> bool:
        """Return whether it was committed or discarded."""
        return self._file is None

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes to the file."""
        # A tar or gzip stream above flushes when it is collected, maybe after `discard`.
        if self._file is not None:
            self._file.write(data)
            self.num_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: `commit` writes what is buffered. Streams above call it."""

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self.num_bytes

    def commit(self) -> None:
        """Show the file under its name. Where this fails, the file is discarded and the error raised."""
        try:
            self._refuse_existing()
            if self._is_local:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
            if self._is_local:
                os.replace(self._temporary, self._path)
            elif self._temporary != self._path:
                if self._fs.exists(self._path):
                    self._fs.rm_file(self._path)
                if has_glob_signs(self._path):  # `mv` of most filesystems takes it for a pattern
                    self._fs.cp_file(self._temporary, self._path)
                    self._fs.rm_file(self._temporary)
                else:
                    self._fs.mv(self._temporary, self._path)
        except BaseException:
            self.discard()
            raise
        self._file = None

    def discard(self) -> None:
        """Remove what was written."""
        file, self._file = self._file, None
        if file is None:
            return
        if self._temporary == self._path:
            file.closed = True  # fsspec closes a file when it is collected, which would upload it
            try:
                getattr(file, "discard", lambda: None)()
            except Exception as error:  # the store may be the reason why we are here
                hide_secrets(error)
                warnings.warn(
                    f"parts of {identity_of(self.url)}, which was not finished, may be left in the store, "
                    f"unseen but paid for: {error}; end that upload, or have a lifecycle rule do it",
                    stacklevel=2,
                )
            return
        with suppress(Exception):  # flushing may fail again for the reason we are here
            file.close()
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._temporary)

    @property
    def space(self) -> str:
        """Bytes that are free where it is written, in words; "": not known."""
        return space_at(self._path) if self._is_local else ""

    def _refuse_existing(self) -> None:
        if not self._overwrite and self._fs.exists(self._path):
            raise FileExistsError(f"{identity_of(self.url)} exists; to replace it, give overwrite=True")


def no_room(error: BaseException | None) -> OSError | None:
    """Return what says that there is no room among an error and its causes; None: nothing does."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return error
        error = error.__cause__ or error.__context__
    return None


def space_at(path: str) -> str:
    """Bytes that are free in the folder of a local file, in words; "": not known."""
    folder = os.path.dirname(os.path.abspath(path))
    with suppress(OSError):
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        return f"{shutil.disk_usage(folder).free:,} bytes are free"
    return ""


_WARNED: set[tuple[str, str]] = set()
"""The warnings that `warn_not_kept` gave: what was not kept, and its folder."""


def warn_not_kept(what: str, path: str, error: BaseException, *, so: str) -> None:
    """Warn, once in a process for each kind and folder, of what could not be kept for the next start.

    Args:
        what: it is, in the plural.
        path: where it was to be.
        error: why it is not.
        so: what follows from that, and what to do.
    """
    folder = path.rpartition("/")[0] or "."
    if (what, folder) in _WARNED:
        return
    _WARNED.add((what, folder))
    full = no_room(error)
    reason = str(error) if full is None else ", ".join(filter(None, [full.strerror, space_at(path)]))
    warnings.warn(f"{what} cannot be kept in {identity_of(folder)} ({reason}): {so}", stacklevel=2)


def user_folder(name: str) -> str:
    """Return this user's folder for a kind of files: `$XDG_CACHE_HOME/dataflow/NAME`, or below `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(root, "dataflow", name)


def private_folder(path: str) -> None:
    """Make a folder and those above it that are missing, for this user alone. What is there stays."""
    if not os.path.isdir(path):
        private_folder(os.path.dirname(path))
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
