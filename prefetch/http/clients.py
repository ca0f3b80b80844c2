"""Fill a destination with the bytes of a range, by whatever a filesystem offers, as they arrive.

fsspec's `cat_file` gives a range whole or not at all; a body that breaks near its end would be paid twice.
HTTP and S3 are read past their clients where that can be (`prefetch.http.direct`). Where it cannot, fsspec's
filesystems are asked below `cat_file`, with the sessions, credentials and options that they hold. What every
response says of the object is held against the catalog, so that no body is ever continued from another
version. Other asynchronous filesystems give their ranges whole (`whole_body`).

Coroutines, for the filesystem's own event loop. They have no time-outs of their own: whoever awaits has.
They end when the destination is full or the body ended, and write nothing into it after their end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from pkgutil import resolve_name
from typing import Any

from fsspec.asyn import AsyncFileSystem

from prefetch.http.connections import Destination
from prefetch.http.direct import NotDirectError, direct_http, direct_s3
from prefetch.http.responses import Check, check_range, gives_own_bytes, raise_for_status

Fill = Callable[[Any, str, int, Destination, Check], Awaitable[None]]
"""`fill(fs, path, start, dest, check)` puts the object's bytes from `start` into a destination."""

Client = tuple[Fill, bool]
"""A way to ask for a filesystem's bytes, and whether they come in pieces."""

PIECE_BYTES = 1 << 18
_resolved = cache(resolve_name)
"""Finds what a filesystem names. Each read asks."""


def client_of(fs: Any) -> Client | None:
    """Return what asks for this filesystem's bytes; None: only `cat_file` does.

    Filesystems are told apart by what they can do, as their packages may not be installed, and other classes
    may serve the same protocol; ours name what asks, as `fill`. But for `simplecache::` and its like: they
    show the attributes of what they wrap, and would be passed by.
    """
    if not isinstance(fs, AsyncFileSystem) or fs.asynchronous:
        return None
    if hasattr(fs, "encode_url") and hasattr(fs, "set_session"):
        return http_body, True
    if fill := getattr(fs, "fill", ""):
        return _resolved(fill), True
    if hasattr(fs, "get_s3") and hasattr(fs, "_get_s3_method_kwargs"):
        return s3_body, True
    return whole_body, False


async def http_body(fs: Any, path: str, start: int, dest: Destination, check: Check) -> None:
    """Fetch from fsspec's HTTPFileSystem."""
    with suppress(NotDirectError):
        await direct_http(fs, path, start, dest, check)
        return
    await aiohttp_body(fs, path, start, dest, check)


async def aiohttp_body(fs: Any, path: str, start: int, dest: Destination, check: Check) -> None:
    """Read by the session of fsspec's HTTPFileSystem, which knows redirects, chunks and all options."""
    import aiohttp

    session = await fs.set_session()
    options = {"timeout": aiohttp.ClientTimeout(total=None), "read_bufsize": PIECE_BYTES, **fs.kwargs}
    # A body compressed on its way has other ranges than the object.
    headers = {"Range": f"bytes={start}-{start + len(dest.rest) - 1}", "Accept-Encoding": "identity"}
    options["headers"] = {**options.get("headers", {}), **headers}
    # Unpacked are only whole objects that the server compresses whatever it is asked.
    for unpacks in (False, True):
        async with session.get(fs.encode_url(path), **options, auto_decompress=unpacks) as response:
            fields = {name.lower(): value for name, value in response.headers.items()}
            raise_for_status(response.status, str(response.reason or ""), fields, path)
            if not gives_own_bytes(response.status, fields) and start == 0 and response.status == 200:
                if not unpacks:
                    continue
                fields = {name: fields[name] for name in fields.keys() & {"etag", "last-modified"}}
            check_range(response.status, fields, start, check)
            while len(dest.rest) and (piece := await response.content.readany()):
                dest.put(piece)
        return


async def s3_body(fs: Any, path: str, start: int, dest: Destination, check: Check) -> None:
    """Fetch from s3fs."""
    with suppress(NotDirectError):
        await direct_s3(fs, path, start, dest, check)
        return
    await botocore_body(fs, path, start, dest, check)


async def botocore_body(fs: Any, path: str, start: int, dest: Destination, check: Check) -> None:
    """Read by s3fs's client. Its own retries are passed by; those of the client, botocore, come first."""
    from s3fs.errors import translate_boto_error

    bucket, key, version = fs.split_path(path)
    await fs.set_session()
    client = await fs.get_s3(bucket)
    last = start + len(dest.rest) - 1
    request = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{last}", **fs.req_kw}
    if version is not None:
        request["VersionId"] = version
    try:
        response = await client.get_object(**fs._get_s3_method_kwargs(client.get_object, **request))
    except Exception as error:
        raise translate_boto_error(error) from error
    body = response["Body"]
    try:
        fields = {"etag": response.get("ETag", ""), "content-range": response.get("ContentRange", "")}
        check_range(206 if fields["content-range"] else 200, fields, start, check)
        while len(dest.rest) and (piece := await body.read(PIECE_BYTES)):
            dest.put(piece)
    finally:
        body.close()


async def whole_body(fs: Any, path: str, start: int, dest: Destination, check: Check) -> None:
    """Read in one piece, from any asynchronous filesystem; the caller has checked the object."""
    dest.put(await fs._cat_file(path, start=start, end=start + len(dest.rest)))
