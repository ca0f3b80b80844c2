"""The bytes of a range as they arrive, for the filesystems that can hand them out piece by piece.

fsspec's `cat_file` gives a range whole or not at all; a body that breaks near its end would be paid twice.
Its HTTP and S3 filesystems are asked below that call, with the sessions, credentials and options that they
hold, and what every response says of the object is held against the catalog, so that no body is ever
continued from another version. Other asynchronous filesystems give their ranges whole (`whole_body`).

Coroutines, for the filesystem's own event loop. They have no time-outs of their own: whoever iterates has.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from email.utils import parsedate_to_datetime
from typing import Any

from prefetch.native import NotNativeError, is_native, native_body
from prefetch.retries import StatusError

Info = Mapping[str, Any]
Check = Callable[[Info], None]
"""Raises if an object of this description ("size", "ETag") is not the one that was indexed."""
OpenBody = Callable[[Any, str, int, int, Check], AsyncIterator[bytes]]
"""`open_body(fs, path, start, end, check)` gives the bytes [start, end) in pieces."""

PIECE_BYTES = 1 << 18
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class NoRangesError(Exception):
    """The server sends whole objects only."""

    def __str__(self) -> str:
        return "the server gives no byte ranges; put 'simplecache::' before the URL to read whole files"


def body_of(fs: Any) -> tuple[OpenBody, bool] | None:
    """How this filesystem's bytes are asked for, and whether they come in pieces; None: only by `cat_file`.

    Filesystems are told apart by what they can do, as their packages may not be installed, and other classes
    may serve the same protocol.
    """
    if not getattr(fs, "async_impl", False) or getattr(fs, "asynchronous", True):
        return None
    if hasattr(fs, "encode_url") and hasattr(fs, "set_session"):
        return http_body, True
    if hasattr(fs, "get_s3") and hasattr(fs, "_get_s3_method_kwargs"):
        return (native_or_s3_body if is_native() else s3_body), True
    return whole_body, False


async def http_body(fs: Any, path: str, start: int, end: int, check: Check) -> AsyncIterator[bytes]:
    """A range from fsspec's HTTPFileSystem."""
    import aiohttp

    session = await fs.set_session()
    options = {"timeout": aiohttp.ClientTimeout(total=None), "read_bufsize": PIECE_BYTES, **fs.kwargs}
    # A body compressed on its way has other ranges than the object.
    asked = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    options["headers"] = {**options.get("headers", {}), **asked}
    async with session.get(fs.encode_url(path), **options) as response:
        if response.status in (404, 410):
            raise FileNotFoundError(path)
        if response.status >= 300:
            wait_s = _retry_after_s(response.headers)
            raise StatusError(response.status, str(response.reason or ""), wait_s)
        _check_range(response.status, response.headers, start, check)
        while piece := await response.content.readany():
            yield piece


async def s3_body(fs: Any, path: str, start: int, end: int, check: Check) -> AsyncIterator[bytes]:
    """A range from s3fs. Its own retries are passed by; those of its client, botocore, come first."""
    from s3fs.errors import translate_boto_error

    bucket, key, version = fs.split_path(path)
    await fs.set_session()
    client = await fs.get_s3(bucket)
    asked = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{end - 1}", **fs.req_kw}
    if version is not None:
        asked["VersionId"] = version
    try:
        response = await client.get_object(**fs._get_s3_method_kwargs(client.get_object, **asked))
    except Exception as error:
        raise translate_boto_error(error) from error
    body = response["Body"]
    try:
        headers = {"ETag": response.get("ETag", ""), "Content-Range": response.get("ContentRange", "")}
        _check_range(206 if headers["Content-Range"] else 200, headers, start, check)
        while piece := await body.read(PIECE_BYTES):
            yield piece
    finally:
        body.close()


async def native_or_s3_body(fs: Any, path: str, start: int, end: int, check: Check) -> AsyncIterator[bytes]:
    """A range from s3fs by obstore, or by s3fs where obstore cannot be asked."""
    try:
        async with aclosing(native_body(fs, path, start, end, check)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                yield piece
            return
    except NotNativeError:
        pass
    async with aclosing(s3_body(fs, path, start, end, check)) as pieces:  # type: ignore[type-var]
        async for piece in pieces:
            yield piece


async def whole_body(fs: Any, path: str, start: int, end: int, check: Check) -> AsyncIterator[bytes]:
    """A range in one piece, from any asynchronous filesystem; the caller has checked the object."""
    yield await fs._cat_file(path, start=start, end=end)


def _check_range(status: int, headers: Mapping[str, str], start: int, check: Check) -> None:
    info: dict[str, Any] = {"ETag": headers.get("ETag", "")}
    given = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
    if status != 206 or given is None:
        if start:
            raise NoRangesError
        # The whole object comes; its beginning is what was asked for.
        info["size"] = headers.get("Content-Length")
    else:
        if int(given[1]) != start:
            raise NoRangesError
        info["size"] = None if given[3] == "*" else int(given[3])
    check(info)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds of a `Retry-After`; a date counts from the server's own clock. 0: none that can be read."""
    text = headers.get("Retry-After", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        wait = parsedate_to_datetime(text) - parsedate_to_datetime(headers.get("Date", ""))
        return max(0.0, wait.total_seconds())
    except (TypeError, ValueError):
        return 0.0


__all__ = [
    "Check",
    "NoRangesError",
    "OpenBody",
    "body_of",
    "http_body",
    "native_or_s3_body",
    "s3_body",
    "whole_body",
]
