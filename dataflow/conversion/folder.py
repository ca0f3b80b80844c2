"""The destination of a conversion: a folder of any fsspec filesystem, and whose it is meanwhile.

What conversions keep lies in `.convert/`: the plan, a receipt for each finished shard, and who is at work.

A conversion that replaces another is the next *run*: the names of its shards have "-r1", "-r2" and so on,
and its receipts lie in a folder of their own. What earlier runs wrote is removed once it is
whole: so whenever it is killed, catalog and index each name a set of shards that is whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import socket
import uuid
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from dataflow.telemetry.status.reading import boot_id, start_ticks
from sharding.catalog.storage import failure_text, store_errors, version_of
from sharding.errors import DataflowError
from sharding.redaction import identity_of
from sharding.urls import is_chain, is_local, local_path, naming_part, protocol_of, url_to_fs
from sharding.write.file import PARTIAL, NewFile

CATALOG_NAME = "dataset.catalog"
LISTING_NAME = "index.json"
KEPT = ".convert"
PLAN = f"{KEPT}/plan.json"
_OWNER = f"{KEPT}/owner.json"
_DONE = f"{KEPT}/done.json"
_RECEIPTS, _BEGUN = "shards", "begun"
_RUN = re.compile(r"(?:shards|shard-\d{6}|shard\.\d{5})(?:-r(\d+))?(?:\.|$)")
"""Names of shards and of folders of receipts; of which run they are."""
_INDEX = ".index"
_BESIDE = (".idx", ".json")
"""Endings of what lies beside shards of tokens."""
THREADS = 16


def index_name(index: bytes) -> str:
    """Return the name of the file of a source's index."""
    return f"{KEPT}/{hashlib.blake2b(index, digest_size=16).hexdigest()}{_INDEX}"


def _places(folder: str) -> set[tuple[object, ...]]:
    """Return what tells a folder from others, however it is spelled."""
    if is_local(folder):
        path = os.path.realpath(local_path(folder or "/"))
        with suppress(OSError):
            status = os.stat(path)
            return {(status.st_dev, status.st_ino)}
        return {(path,)}
    import fsspec

    with suppress(ImportError, ValueError):
        kind = fsspec.get_filesystem_class(protocol_of(folder))
        return {(kind, kind._strip_protocol(naming_part(folder)))}
    return set()


class ConversionError(DataflowError):
    """A conversion cannot begin or go on; the message says what to do."""


def files_of(name: str) -> list[str]:
    """Return a shard's file and those that may lie beside it."""
    return [name, *(f"{name[:-4]}{end}" for end in _BESIDE if name.endswith(".bin"))]


def stamp_of(info: Mapping[str, Any]) -> list[Any]:
    """Return what tells that a file is as it was: its bytes, and its etag or time; "": not known."""
    return [int(info["size"]), version_of(info).replace('"', "")]


@contextmanager
def write_errors(url: str) -> Iterator[None]:
    """Turn what a store raises when a file is written into `ConversionError`, but for `DataflowError`s."""
    try:
        yield
    except DataflowError:
        raise
    except Exception as error:
        is_protocol = type(error) is NotImplementedError  # pyarrow raises others
        reason = "files of this protocol cannot be written" if is_protocol else failure_text(error, "written")
        raise ConversionError(f"{identity_of(url)}: {reason}") from error


class OutputFolder:
    """A destination. Picklable by its URL and options.

    Args:
        url: path or fsspec URL of the folder.
        storage_options: for the fsspec filesystem.
        run: number of the conversion into it, whose shards and receipts are meant.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None, run: int = 0) -> None:
        self.url = local_path(url) if is_local(url) else url.rstrip("/")
        self.options, self.run = dict(storage_options or {}), run

    @property
    def mark(self) -> str:
        """Return what names of the run's shards have before their ending."""
        return f"-r{self.run}" if self.run else ""

    @property
    def _receipts(self) -> str:
        return f"{KEPT}/{_RECEIPTS}{self.mark}"

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

    def entries(self, name: str = "", kind: str = "file") -> dict[str, Mapping[str, Any]]:
        """Return the files (or folders) of it, or of a folder in it, and what the store says of them."""
        fs, path = url_to_fs(self.of(name) if name else self.url, self.options)
        with store_errors(self.url):
            fs.invalidate_cache()
            try:
                rows = fs.ls(path, detail=True)
            except FileNotFoundError:
                return {}
        return {str(row["name"]).rstrip("/").rpartition("/")[2]: row for row in rows if row["type"] == kind}

    def holding(self, urls: Iterable[str]) -> str | None:
        """Return the first of some files that lies in it, by whatever name; None: none does."""
        mine, seen = _places(self.url), dict[str, bool]()
        for url in urls:
            for part in url.split("::") if is_chain(url) else [url]:
                folders = [part.rpartition("/")[0]]
                if is_local(part) and os.path.islink(path := local_path(part)):
                    folders.append(os.path.dirname(os.path.realpath(path)))
                for folder in folders if "/" in part else ():
                    if folder not in seen:
                        seen[folder] = not mine.isdisjoint(_places(folder))
                    if seen[folder]:
                        return url
        return None

    def remove(self, name: str) -> None:
        """Remove a file that may be there."""
        fs, path = url_to_fs(self.of(name), self.options)
        with store_errors(self.of(name)), suppress(FileNotFoundError):
            fs.rm_file(path)

    # ---- runs and receipts ---------------------------------------------------------------------------

    def next_run(self, plan: bytes | None) -> int:
        """Return the first run whose names nothing has, `plan` being the one that lies there."""
        names = [*self.entries(), *self.entries(KEPT, "directory")]
        used = [int(match[1] or 0) for name in names if (match := _RUN.match(name))]
        if plan is not None:
            with suppress(ValueError, AttributeError, TypeError):
                used.append(int(json.loads(plan).get("run", 0)))
        return max(used, default=-1) + 1

    def runs(self) -> set[int]:
        """Return the runs that began, and were not forgotten."""
        names = self.entries(KEPT, "directory")
        return {int(match[1] or 0) for name in names if (match := _RUN.match(name))}

    def has_older(self, ending: str) -> bool:
        """Return whether shards of other runs have this ending."""
        others = self.runs() - {self.run}
        named = ((_RUN.match(name), name) for name in self.entries() if name.endswith(ending))
        return any(match and int(match[1] or 0) in others for match, _ in named)

    def whole_runs(self) -> set[int]:
        """Return the runs that catalog and index may name: they were finished, and are not removed."""
        done = self.read(_DONE)
        with suppress(ValueError, AttributeError, TypeError):
            return {int(run) for run in json.loads(done or b"null").get("runs", [0])}
        return set()

    def put_whole(self, runs: Iterable[int]) -> None:
        """Say which runs are whole."""
        self.write(_DONE, json.dumps({"runs": sorted(runs)}).encode())

    def receipts(self, digest: str) -> dict[int, tuple[dict[str, Any], bool]]:
        """Return the receipts of a plan's finished shards, by number, whose files have their sizes.

        And of each, whether all files have the times or etags of then, too.
        """
        names = [name for name in self.entries(self._receipts) if name.endswith(".json")]
        if not names:
            return {}
        now = {name: stamp_of(info) for name, info in self.entries().items()}
        with ThreadPoolExecutor(THREADS, thread_name_prefix="dataflow-convert") as pool:
            texts = list(pool.map(lambda name: self.read(f"{self._receipts}/{name}"), names))
        receipts: dict[int, tuple[dict[str, Any], bool]] = {}
        for text in texts:
            with suppress(ValueError, KeyError, TypeError):
                receipt = json.loads(text or b"")
                files = [(now.get(name, [None, ""]), stamp) for name, stamp in receipt["files"].items()]
                if receipt["plan"] == digest and all(is_now[0] == was[0] for is_now, was in files):
                    is_sure = all(is_now == was and was[1] for is_now, was in files)
                    receipts[int(receipt["shard"])] = receipt, is_sure
        return receipts

    def put_receipt(self, number: int, receipt: Mapping[str, Any]) -> None:
        """Say that a shard is finished. The files that it has then are taken from the store."""
        names = [file for name in receipt["files"] for file in files_of(name)]
        fs, _ = url_to_fs(self.url, self.options)
        stamps = {}
        for name in names:
            _, path = url_to_fs(self.of(name), self.options)
            with store_errors(self.of(name)), suppress(FileNotFoundError):
                fs.invalidate_cache()
                stamps[name] = stamp_of(fs.info(path))
        text = json.dumps({**receipt, "files": stamps}, sort_keys=True)
        self.write(f"{self._receipts}/{number:06d}.json", text.encode())

    def begin(self) -> None:
        """Say that the names of this run are a conversion's, before the first file has one."""
        self.write(f"{self._receipts}/{_BEGUN}", b"")

    def forget(self, kept_runs: Collection[int]) -> None:
        """Remove the shards of all runs but some, also those that have no receipt yet, and their receipts."""
        forgotten = self.runs() - {*kept_runs}
        for name in self.entries() if forgotten else ():
            match = _RUN.match(name)
            if match and int(match[1] or 0) in forgotten:
                self.remove(name)
        for run in forgotten:
            folder = OutputFolder(self.url, self.options, run)._receipts
            for name in sorted(self.entries(folder), key=_BEGUN.__eq__):
                self.remove(f"{folder}/{name}")
            fs, path = url_to_fs(self.of(folder), self.options)
            with suppress(OSError, NotImplementedError):  # stores have no folders
                fs.rmdir(path)

    def clear(self) -> None:
        """Remove what killed workers have left of files that they were writing, and indexes of sources."""
        for name in self.entries(KEPT):
            if name.endswith(_INDEX):
                self.remove(f"{KEPT}/{name}")
        for folder in ("", self._receipts):
            for name in self.entries(folder):
                if name.endswith(PARTIAL) and name.startswith(("shard", *"0123456789")):
                    self.remove(f"{folder}/{name}" if folder else name)

    def abort_uploads(self) -> None:
        """End uploads in parts of shards that a killed worker had begun, which S3 lists; or tell of them."""
        fs, path = url_to_fs(self.url, self.options)
        if not hasattr(fs, "list_multipart_uploads"):
            return
        bucket, key, _ = fs.split_path(f"{path.rstrip('/')}/")
        after: dict[str, str] | None = {}
        try:
            while after is not None:
                page = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key, **after)
                for upload in page.get("Uploads", ()):
                    if _RUN.match(upload["Key"].removeprefix(key)):
                        named = {name: upload[name] for name in ("Key", "UploadId")}
                        fs.call_s3("abort_multipart_upload", Bucket=bucket, **named)
                names = ("KeyMarker", "UploadIdMarker") if page.get("IsTruncated") else ()
                after = {name: page[f"Next{name}"] for name in names} or None
        except Exception as error:
            warnings.warn(
                f"{identity_of(self.url)}: parts of shards that were not finished may be left, unseen but "
                f"paid for ({failure_text(error, 'listed')}): a lifecycle rule of the store removes such",
                stacklevel=2,
            )

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
