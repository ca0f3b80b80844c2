"""The destination of a conversion: a folder of any fsspec filesystem, and whose it is meanwhile.

What conversions keep lies in `.convert/`: the plan, a receipt for each finished shard, and who is at work.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from dataflow.conversion.errors import ConversionError
from dataflow.live.reading import boot_id, start_ticks
from sharding.catalog.storage import failure_text, store_errors
from sharding.errors import DataflowError
from sharding.redaction import identity_of
from sharding.urls import is_local, local_path, url_to_fs
from sharding.write.file import PARTIAL, NewFile

CATALOG_NAME = "dataset.catalog"
LISTING_NAME = "index.json"
KEPT = ".convert"
_OWNER = f"{KEPT}/owner.json"
_RECEIPTS = f"{KEPT}/shards"
_INDEX = ".index"
_BESIDE = (".idx", ".json")
"""Endings of what lies beside shards of tokens."""
_THREADS = 16


def index_name(index: bytes) -> str:
    """Return the name of the file of a source's index."""
    return f"{KEPT}/{hashlib.blake2b(index, digest_size=16).hexdigest()}{_INDEX}"


@contextmanager
def write_errors(url: str) -> Iterator[None]:
    """Turn what a store raises when a file is written into `ConversionError`, but for `DataflowError`s."""
    try:
        yield
    except DataflowError:
        raise
    except NotImplementedError as error:
        raise ConversionError(f"{identity_of(url)}: files of this protocol cannot be written") from error
    except Exception as error:
        raise ConversionError(f"{identity_of(url)}: {failure_text(error, 'written')}") from error


class OutputFolder:
    """A destination. Picklable by its URL and options.

    Args:
        url: path or fsspec URL of the folder.
        storage_options: for the fsspec filesystem.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.url = local_path(url) if is_local(url) else url.rstrip("/")
        self.options = dict(storage_options or {})

    def of(self, name: str) -> str:
        """Return the URL of a file in it."""
        return f"{self.url}/{name}"

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a file; None: it is not there."""
        fs, path = url_to_fs(self.of(name), self.options)
        with store_errors(self.of(name)):
            try:
                return bytes(fs.cat_file(path))
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        """Write a file, which replaces what is there at once."""
        with write_errors(self.of(name)):
            file = NewFile(self.of(name), storage_options=self.options, overwrite=True)
            try:
                file.write(data)
                file.commit()
            finally:
                file.discard()

    def sizes(self, name: str = "") -> dict[str, int]:
        """Return the files of it, or of a folder in it, and their bytes."""
        fs, path = url_to_fs(self.of(name) if name else self.url, self.options)
        with store_errors(self.url):
            fs.invalidate_cache()
            try:
                entries = fs.ls(path, detail=True)
            except FileNotFoundError:
                return {}
        files = (entry for entry in entries if entry["type"] == "file")
        return {str(entry["name"]).rpartition("/")[2]: int(entry["size"]) for entry in files}

    def remove(self, name: str) -> None:
        """Remove a file that may be there."""
        fs, path = url_to_fs(self.of(name), self.options)
        with store_errors(self.of(name)), suppress(FileNotFoundError):
            fs.rm_file(path)

    # ---- receipts ------------------------------------------------------------------------------------

    def receipts(self, digest: str) -> dict[int, dict[str, Any]]:
        """Return what is known of finished shards of a plan, by number, if their files are as they were."""
        names = [name for name in self.sizes(_RECEIPTS) if name.endswith(".json")]
        if not names:
            return {}
        sizes = self.sizes()
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="dataflow-convert") as pool:
            texts = list(pool.map(lambda name: self.read(f"{_RECEIPTS}/{name}"), names))
        found: dict[int, dict[str, Any]] = {}
        for text in texts:
            with suppress(ValueError, KeyError, TypeError):
                receipt = json.loads(text or b"")
                is_there = all(sizes.get(name) == size for name, size in receipt["files"].items())
                if receipt["plan"] == digest and is_there:
                    found[int(receipt["shard"])] = receipt
        return found

    def put_receipt(self, number: int, receipt: Mapping[str, Any]) -> None:
        """Say that a shard is finished."""
        self.write(f"{_RECEIPTS}/{number:06d}.json", json.dumps(receipt, sort_keys=True).encode())

    def forget(self) -> None:
        """Remove shards that an earlier conversion wrote, and all that is known of them."""
        for name in self.sizes(_RECEIPTS):
            with suppress(ValueError, KeyError, TypeError):
                for file in json.loads(self.read(f"{_RECEIPTS}/{name}") or b"{}").get("files", {}):
                    if "/" not in file and file not in ("", ".", ".."):
                        for beside in (
                            file,
                            *(f"{file[:-4]}{end}" for end in _BESIDE if file.endswith(".bin")),
                        ):
                            self.remove(beside)
            self.remove(f"{_RECEIPTS}/{name}")
        for name in (LISTING_NAME, CATALOG_NAME, f"{KEPT}/plan.json"):
            self.remove(name)

    def clear(self) -> None:
        """Remove what killed workers have left of files that they were writing, and indexes of sources."""
        for name in self.sizes(KEPT):
            if name.endswith(_INDEX):
                self.remove(f"{KEPT}/{name}")
        for folder in ("", _RECEIPTS):
            for name in self.sizes(folder):
                if name.endswith(PARTIAL) and name.startswith(("shard", *"0123456789")):
                    self.remove(f"{folder}/{name}" if folder else name)

    # ---- whose it is ---------------------------------------------------------------------------------

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the folder for this process alone. `ConversionError` names who has it.

        On this machine's filesystems the kernel knows when the owner has died. In a store a file says who it
        is: it is taken over from a process of this machine that is no more; of another machine nobody can
        tell.
        """
        if is_local(self.url):
            with self._locked():
                yield
        else:
            mark = self._claimed()
            try:
                yield
            finally:
                with suppress(DataflowError):  # what ended the conversion is told, not that this failed, too
                    if self._owner().get("mark") == mark:
                        self.remove(_OWNER)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path = os.path.join(self.url, _OWNER)
        with write_errors(self.url):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._taken(self._owner()) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_this_process("")).encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def _claimed(self) -> str:
        mark, owner = uuid.uuid4().hex, self._owner()
        if owner and not _is_dead(owner):
            raise self._taken(owner)
        self.write(_OWNER, json.dumps(_this_process(mark)).encode())
        now = self._owner()
        if now.get("mark") != mark:  # another one wrote it at the same time
            raise self._taken(now)
        return mark

    def _owner(self) -> dict[str, Any]:
        with suppress(ValueError):
            owner = json.loads(self.read(_OWNER) or b"{}")
            return owner if isinstance(owner, dict) else {}
        return {}

    def _taken(self, owner: Mapping[str, Any]) -> ConversionError:
        who = f"process {owner.get('pid', '?')} on {owner.get('host', 'another machine')}"
        cure = "wait for it, or give another folder"
        if not is_local(self.url):
            cure += f"; if it is no more, remove {identity_of(self.of(_OWNER))}"
        return ConversionError(f"{identity_of(self.url)} is being written by {who}: {cure}")


def _this_process(mark: str) -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid": os.getpid(),
        "start": start_ticks(os.getpid()),
        "mark": mark,
    }


def _is_dead(owner: Mapping[str, Any]) -> bool:
    """Return whether an owner was a process of this machine that is no more."""
    if owner.get("host") != socket.gethostname():
        return False
    if owner.get("boot") != boot_id():
        return True
    pid = owner.get("pid")
    return not isinstance(pid, int) or start_ticks(pid) != owner.get("start")
