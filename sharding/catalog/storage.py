"""Ask a store about one shard: is it there, how long is it, is it still the same.

A shard's *version* is its etag where the store has one, else its modification time. Versions of different
kinds (a copy on another store) are not compared; sizes always are. Failures of any store become
`ShardReadError` with the reason in words. fsspec keeps one filesystem per thread and options, so whoever
hands work to threads opens the URL first and passes the filesystem along. Metadata only.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pkgutil import resolve_name
from typing import Any, BinaryIO, cast

from sharding.blocks import Shard
from sharding.errors import DataflowError, ShardReadError
from sharding.hub.names import FILESYSTEM, is_hub
from sharding.redaction import hide_secrets, identity_of, redact_logs
from sharding.urls import is_chain, is_http, is_local, local_path, protocol_of, url_to_fs

Info = Mapping[str, Any]
"""The result of `fs.info`, or of `local_info`: "size", "type", and the store's own keys."""

_ETAG_KEYS = ("ETag", "etag", "e_tag", "blob_id", "xet_hash")
_MTIME_KEYS = ("mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created")
VERSION_KEYS = _ETAG_KEYS + _MTIME_KEYS
"""Keys of what stores say of a file that tell its version."""
_EXTRAS = {"s3": "s3", "s3a": "s3", "http": "http", "https": "http", "hf": "hub"}
_NO_INFO = ("filecache", "blockcache", "cached")
"""Chains that look for a file in a listing of its folder, which HTTP does not give."""
_SILENCE_S = 12.0
"""A small request that gets no byte for so long is given up; whoever asked may ask again."""
_LONGEST_S = 600.0
"""One that takes longer is given up, too, however slowly its bytes go on coming."""
SCAN_READ_BYTES = 1 << 20
"""Least read of a remote shard while indexing: large against latency, small against a shard."""


def open_url(url: str, storage_options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """The fsspec filesystem of a URL and the path in it. The filesystem is made once a thread and reused.

    Raises:
        ImportError: the filesystem needs a package that is not installed; names it.
        ValueError: no filesystem knows the protocol, or the chain cannot work.
        ShardReadError: the outer file of a chain (`zip://...::`) cannot be opened.
    """
    redact_logs()
    outer = url.partition("::")[0] if is_chain(url) else ""
    if outer in _NO_INFO and is_http(url):
        raise ValueError(
            f"{identity_of(url)}: fsspec's {outer}:: finds no files behind HTTP; use simplecache:: or "
            "ShardedDataset(..., cache=Cache(folder))"
        )
    if is_hub(url):
        hub = resolve_name(FILESYSTEM)(storage_options or {})
        if hub is not None:
            return hub, hub._strip_protocol(url)
    try:
        fs, path = url_to_fs(url, _patient(url, storage_options or {}))
    except ImportError as error:
        extra = _EXTRAS.get(protocol_of(url))
        cure = f"pip install 'dataflow-loader[{extra}]'" if extra else str(error)
        raise ImportError(f"{identity_of(url)}: reading it needs another package: {cure}") from error
    except ValueError as error:
        hide_secrets(error)
        raise ValueError(f"{identity_of(url)}: {error}") from error
    except Exception as error:
        raise ShardReadError(url, failure_text(error)) from error
    return fs, path


def _patient(url: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options, where fsspec would wait 300 s for an answer of HTTP, and as long for a whole catalog.

    S3's client would try five times by itself: who asks tries again, and knows when a host is mistyped.
    """
    if not is_chain(url) and protocol_of(url) in ("s3", "s3a"):
        config = options.get("config_kwargs") or {}
        return {**options, "config_kwargs": {"retries": {"max_attempts": 1}, **config}}
    if is_chain(url) or not is_http(url):
        return options
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=_LONGEST_S, sock_connect=_SILENCE_S, sock_read=_SILENCE_S)
    return {**options, "client_kwargs": {"timeout": timeout, **(options.get("client_kwargs") or {})}}


@contextmanager
def store_errors(url: str, done: str = "read") -> Iterator[None]:
    """Turn what a store raises into `ShardReadError`, stage "index", with the cause kept. `done`: to it."""
    try:
        yield
    except DataflowError:
        raise
    except Exception as error:
        raise ShardReadError(url, failure_text(error, done)) from error


def failure_text(error: BaseException, done: str = "read") -> str:
    """A store's failure in words; from now on it prints no secrets itself, either. `done`: to the file."""
    hide_secrets(error)
    status, cause = getattr(error, "status", None), error.__cause__
    if isinstance(error, FileNotFoundError):
        # fsspec says so of whatever an HTTP server answers, and if there is no answer.
        other = isinstance(cause, (OSError, TypeError, ValueError)) or "aiohttp." in type(cause).__module__
        if cause and getattr(cause, "status", 0 if other else 404) not in (404, 410):
            return failure_text(cause, done)
        answer = getattr(cause, "response", None)  # botocore's
        code = answer.get("Error", {}).get("Code") if isinstance(answer, dict) else None
        return "no such bucket" if code == "NoSuchBucket" else "no such file"
    if isinstance(error, PermissionError) or status in (401, 403):
        return f"permission denied ({error})"
    if isinstance(error, TimeoutError) and not str(error):  # fsspec's says nothing
        return (
            failure_text(cause, done)
            if isinstance(cause, Exception)
            else f"cannot be {done}: it took too long"
        )
    if isinstance(error, IsADirectoryError):
        return "is a directory, not a file"
    return f"cannot be {done}: {type(error).__name__}: {error}"


def shard_info(url: str, fs: Any, path: str) -> Info:
    """Ask the store now. `ShardReadError` where it is not a file of known size that can be seeked.

    `fs` and `path` are those of `open_url`; for a local URL they are not used.
    """
    with store_errors(url):
        info = local_info(os.stat(local_path(url))) if is_local(url) else _remote_info(fs, path)
    if info.get("type", "file") == "directory":
        raise ShardReadError(url, "is a directory, not a file; give the directory alone, or a glob")
    if info.get("type", "file") == "other":
        raise ShardReadError(url, "is neither a file nor a directory")
    if info.get("size") is None or info.get("partial") is False:
        reason = "the server gives no byte ranges; put 'simplecache::' before the URL to read whole files"
        raise ShardReadError(url, reason)
    return info


def _remote_info(fs: Any, path: str) -> Info:
    """Return what a store says of a file; ask for its bytes where it does not say the size."""
    from fsspec.asyn import sync
    from fsspec.implementations.cached import CachingFileSystem

    info: Info = fs.info(path)
    if isinstance(fs, CachingFileSystem):  # a copy of the whole file has every range
        if info.get("size") is not None:
            return {**info, "partial": None}
        with fs.open(path, "rb") as file:
            return {**info, "size": file.seek(0, os.SEEK_END), "partial": None}
    if info.get("size") is not None or not hasattr(fs, "encode_url"):
        return info
    # fsspec believes no length beside a `Content-Encoding`; a range tells how long the object is.
    return cast(Info, sync(fs.loop, _ranged_info, fs, path, info))


async def _ranged_info(fs: Any, path: str, info: Info) -> Info:
    session = await fs.set_session()
    headers = {**fs.kwargs.get("headers", {}), "Range": "bytes=0-0", "Accept-Encoding": "identity"}
    async with session.get(fs.encode_url(path), **{**fs.kwargs, "headers": headers}) as answer:
        total = answer.headers.get("Content-Range", "").rpartition("/")[2]
        encoding = answer.headers.get("Content-Encoding", "identity")
    if answer.status == 206 and total.isdigit():
        return {**info, "size": int(total), "partial": None}
    if encoding != "identity":
        raise ShardReadError(path, encoded_text(encoding))
    return info


def encoded_text(encoding: str) -> str:
    """Say what is wrong with a server that compresses files on their way, and the cure."""
    what = f"the server sends it with 'Content-Encoding: {encoding}', and no byte ranges of the file itself"
    return f"{what}; put 'simplecache::' before the URL to read whole files, unpacked"


def local_info(status: os.stat_result) -> Info:
    """`os.stat` or `os.fstat` of a local file, in the shape of `fs.info`."""
    kind = {stat.S_IFREG: "file", stat.S_IFDIR: "directory"}.get(stat.S_IFMT(status.st_mode), "other")
    return {"size": status.st_size, "type": kind, "mtime_ns": status.st_mtime_ns}


def exists(url: str, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Return whether a file is there. `ShardReadError` where the store does not say."""
    if is_local(url):
        return os.path.exists(local_path(url))
    fs, path = open_url(url, storage_options)
    with store_errors(url):
        if not is_http(url):
            return bool(fs.exists(path))
        try:
            fs.info(path)
        except FileNotFoundError as error:  # fsspec's `exists` says False of a server that fails, too
            cause = error.__cause__
            status = getattr(cause, "status", 404 if cause is None else 0)
            if not 400 <= status < 500 or status in (408, 429):
                raise
            return False
        return True


def read_file(
    url: str, storage_options: Mapping[str, Any] | None = None, num_bytes: int | None = None
) -> bytes:
    """The first bytes of a file, or all of a small one. `ShardReadError` where it cannot be read."""
    with store_errors(url):
        if is_local(url):
            with open(local_path(url), "rb") as file:
                return file.read(num_bytes)
        fs, path = open_url(url, storage_options)
        return bytes(fs.cat_file(path, end=num_bytes))


def shard_of(url: str, info: Info) -> Shard:
    """The shard at a URL as it is now."""
    identity = identity_of(url)
    return Shard(identity, int(info["size"]), version_of(info), "" if identity == url else url)


def version_of(info: Info) -> str:
    """Say "etag:..." where the store has one, else "mtime:<ns since 1970, or the store's text>", else ""."""
    if "mtime_ns" in info:
        return f"mtime:{info['mtime_ns']}"
    lfs = info.get("lfs")  # of huggingface_hub's own filesystem
    if lfs:
        return f"etag:{lfs['sha256']}"
    for kind, keys in (("etag", _ETAG_KEYS), ("mtime", _MTIME_KEYS)):
        for key in keys:
            if info.get(key) not in (None, ""):
                return f"{kind}:{_instant(info[key])}"
    return ""


def _instant(value: Any) -> str:
    if isinstance(value, datetime):
        since = (value if value.tzinfo else value.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
        return str((since.days * 86_400 + since.seconds) * 10**9 + since.microseconds * 1000)
    return str(int(value * 1e9)) if isinstance(value, float) else str(value)


def check_shard(shard: Shard, info: Info) -> str | None:
    """Say what differs between a shard as indexed and as the store has it now; None if nothing."""
    size = info.get("size")
    if size is not None and int(size) != shard.size:
        return f"its size is {size} bytes; it was {shard.size} when it was indexed"
    now, then = version_of(info), shard.version
    if now and then and now != then and _kind(now) == _kind(then):
        kind = {"etag": "etag", "mtime": "modification time"}[now.partition(":")[0]]
        return f"its {kind} is {now.partition(':')[2]}; it was {then.partition(':')[2]} when it was indexed"
    return None


def _kind(version: str) -> tuple[str, bool]:
    """Versions of one kind can be compared. A time may be a number or, over HTTP, a date."""
    name, _, value = version.partition(":")
    return name, name == "mtime" and value.lstrip("-").isdigit()


def open_shard(shard: Shard, fs: Any, path: str) -> BinaryIO:
    """The stored bytes of a shard as a seekable file, for indexing. The caller closes it."""
    with store_errors(shard.location):
        if is_local(shard.location):
            return open(local_path(shard.location), "rb")
        return cast(BinaryIO, fs.open(path, "rb", block_size=SCAN_READ_BYTES))
