"""Ranges by `obstore` (Rust) below fsspec's HTTP and S3 filesystems: connections, TLS, signing and parsing run
outside the interpreter lock.

The filesystem stays what the user configured: whatever is listed, indexed or asked of an object goes through
it, and a store for obstore is made from it (endpoint, region, credentials, headers). What cannot be said to
obstore, or would be said differently (options that only aiohttp or botocore know, paths that the two write
differently), is left to the body below fsspec (`prefetch.bodies`). obstore's own retries are off: failures,
resumption and pauses are `prefetch.store`'s, the same for all stores.

obstore does not survive a fork: a child whose parent has used it would hang. It is not used there.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from prefetch.retries import CutBodyError, StatusError

PIECE_BYTES = 1 << 18
_PLAIN_PATH = re.compile(r"[A-Za-z0-9._~=+@,-]+(/[A-Za-z0-9._~=+@,-]+)*")
"""Paths that are the same in a URL, in fsspec and in obstore."""
_STATUS = re.compile(r"status code: (\d{3}) ?([^:\n]*)")
_CREDENTIALS_LAST = timedelta(minutes=5)
_NOTHING_SET = (None, "", {}, [], False)


class NotNativeError(Exception):
    """obstore cannot serve this filesystem, or this object of it."""


class _Process:
    """What obstore has been used for. Forked children inherit the record, and so know of their parent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # guards everything below
        self.user: int | None = None
        self.stores: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


_process = _Process()


def is_native() -> bool:
    """Whether obstore is installed, and no parent of this process has used it before the fork."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        return False
    return _process.user in (None, os.getpid())


async def http_store(fs: Any, path: str) -> tuple[Any, str]:
    """obstore's store of an HTTPFileSystem's server, and the path in it. `NotNativeError` where it has none."""
    url = urlsplit(str(path))
    given = {**fs.kwargs, "client_kwargs": fs.client_kwargs}
    headers = {**given.pop("headers", {}), **given["client_kwargs"].get("headers", {})}
    rest = {**given, **given.pop("client_kwargs"), "headers": None}
    proxied = any(name.lower().endswith("_proxy") for name in os.environ)
    own_client = getattr(fs.get_client, "__module__", "") != "fsspec.implementations.http"
    if any(value not in _NOTHING_SET for value in rest.values()) or own_client or proxied or "@" in url.netloc:
        raise NotNativeError
    if url.query or url.fragment or not all(isinstance(v, str) for v in headers.values()):
        raise NotNativeError

    def make() -> Any:
        from obstore.store import HTTPStore

        root = f"{url.scheme}://{url.netloc}"
        return HTTPStore.from_url(root, client_options=_client(root, headers), retry_config=_no_retries())

    return _store(fs, url.netloc, make), _plain(url.path.removeprefix("/"))


async def s3_store(fs: Any, path: str) -> tuple[Any, str]:
    """obstore's store of a bucket as s3fs reaches it, and the key. `NotNativeError` where it has none."""
    bucket, key, version = fs.split_path(path)
    other = (fs.kwargs, fs.config_kwargs, fs.req_kw, fs.s3_additional_kwargs, fs.default_cache_type == "none")
    known = {"endpoint_url", "region_name"}
    if version is not None or any(other[:4]) or set(fs.client_kwargs) - known:
        raise NotNativeError
    await fs.set_session()
    client = await fs.get_s3(bucket)

    async def credentials() -> Any:
        """As s3fs has them; asked for again every few minutes, as they may expire."""
        found = {"access_key_id": fs.key, "secret_access_key": fs.secret, "token": fs.token}
        if not fs.key:
            held = await fs.session.get_credentials()
            if held is None:
                raise PermissionError("no AWS credentials were found; set them, or storage_options={'anon': True}")
            now = await held.get_frozen_credentials()
            found = {"access_key_id": now.access_key, "secret_access_key": now.secret_key, "token": now.token}
        return {**found, "expires_at": datetime.now(UTC) + _CREDENTIALS_LAST}

    def make() -> Any:
        from obstore.store import S3Store

        endpoint = client.meta.endpoint_url
        amazon = endpoint.endswith((".amazonaws.com", ".amazonaws.com.cn"))
        config: dict[str, Any] = {"region": client.meta.region_name or "us-east-1"}
        if not amazon:
            config |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
        if fs.anon:
            config["skip_signature"] = True
        return S3Store(
            bucket,
            config=config,
            client_options=_client(endpoint, {}),
            retry_config=_no_retries(),
            credential_provider=None if fs.anon else credentials,
        )

    return _store(fs, bucket, make), _plain(key)


async def native_body(
    store: Any, path: str, start: int, end: int, check: Any
) -> AsyncIterator[bytes]:
    """The bytes [start, end) of an object in pieces of about 256 KiB.

    Raises:
        NotNativeError: the server answers as obstore does not understand; nothing was given yet.
        StatusError, CutBodyError, ConnectionError: what went wrong, as `prefetch.retries` sorts it.
    """
    from obstore.exceptions import BaseError, NotSupportedError, PermissionDeniedError, UnauthenticatedError

    try:
        answer = await store.get_async(path, options={"range": (start, end)})
        meta = answer.meta
        check({"ETag": meta.get("e_tag"), "size": meta.get("size")})
        async for piece in answer.stream(min_chunk_size=PIECE_BYTES):
            yield piece
    except NotSupportedError as error:
        raise NotNativeError from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise PermissionError(_first_line(error)) from error
    except FileNotFoundError as error:
        raise FileNotFoundError(path) from error
    except BaseError as error:
        raise _sorted(error) from error


def _sorted(error: Exception) -> Exception:
    text = _first_line(error)
    found = _STATUS.search(text)
    if found:
        return StatusError(int(found[1]), found[2].strip())
    if "body error" in text or "decoding response" in text:
        return CutBodyError(text)
    return ConnectionError(text)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _store(fs: Any, place: str, make: Any) -> Any:
    with _process.lock:
        _process.user = os.getpid()
        stores = _process.stores.setdefault(fs, {})
        if place not in stores:
            stores[place] = make()
        return stores[place]


def _plain(path: str) -> str:
    if not _PLAIN_PATH.fullmatch(path) or ".." in path.split("/") or "." in path.split("/"):
        raise NotNativeError
    return path


def _client(endpoint: str, headers: dict[str, str]) -> dict[str, Any]:
    # Only silence is too long, and the reader watches for that.
    return {
        "allow_http": endpoint.startswith("http://"),
        "timeout": timedelta(days=1),
        "connect_timeout": timedelta(seconds=60),
        "default_headers": headers,
    }


def _no_retries() -> dict[str, Any]:
    return {"max_retries": 0, "retry_timeout": timedelta(seconds=0)}
