"""Ranges by `obstore` (Rust) below s3fs: connections, signing and parsing without the interpreter lock.

The filesystem stays what the user configured: whatever is listed, indexed or asked of an object goes through
it, and obstore's store of a bucket is made from it (endpoint, region, credentials). What cannot be said to
obstore, or would be said differently (options that only botocore knows, versions, keys that the two may write
differently), is left to s3fs. obstore's own retries are off: failures, resumption and pauses are those of
`prefetch.store`, the same for all stores.

obstore does not survive a fork: a child whose parent has used it would hang. Such a child uses s3fs.
"""

from __future__ import annotations

import importlib.util
import os
import re
import threading
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from prefetch.retries import CutBodyError, StatusError

_PIECE_BYTES = 1 << 18
_PLAIN_KEY = re.compile(r"(?!\.{1,2}(/|$))[\w.~=+@,-]+(/(?!\.{1,2}(/|$))[\w.~=+@,-]+)*", re.ASCII)
"""Keys that s3fs and obstore write alike into a URL."""
_STATUS = re.compile(r"status code: (\d{3}) ?([^:\n]*)")
_CREDENTIALS_LAST = timedelta(minutes=5)
_SAID_ALIKE = {"endpoint_url", "region_name"}
_NOT_SAID = {"max_pool_connections"}
"""An option of botocore that means nothing to obstore, which opens as many connections as it needs."""


class NotNativeError(Exception):
    """What is asked for cannot be asked of obstore."""


class _Use:
    """What obstore has been used for. A forked child inherits this, and so knows of its parent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # guards everything below
        self.pid: int | None = None
        self.stores: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


_use = _Use()


def is_native() -> bool:
    """Whether obstore is installed, and no parent of this process used it before the fork."""
    return _installed() and _use.pid in (None, os.getpid())


@cache
def _installed() -> bool:
    return importlib.util.find_spec("obstore") is not None


async def native_body(
    fs: Any, path: str, start: int, end: int, check: Callable[[dict[str, Any]], None]
) -> AsyncIterator[bytes]:
    """A range from a bucket of s3fs, in pieces of about 256 KiB.

    Raises:
        NotNativeError: s3fs must be asked instead; nothing was given yet.
        StatusError, CutBodyError, ConnectionError: as `prefetch.retries` sorts them.
    """
    from obstore.exceptions import BaseError, NotSupportedError, PermissionDeniedError, UnauthenticatedError

    store, key = await _store_of(fs, path)
    try:
        answer = await store.get_async(key, options={"range": (start, end)})
        check({"ETag": answer.meta.get("e_tag"), "size": answer.meta.get("size")})
        async for piece in answer.stream(min_chunk_size=_PIECE_BYTES):
            yield piece
    except NotSupportedError as error:
        raise NotNativeError from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise PermissionError(_first_line(error)) from error
    except FileNotFoundError:
        raise FileNotFoundError(path) from None
    except BaseError as error:
        raise _sorted(error) from error


async def _store_of(fs: Any, path: str) -> tuple[Any, str]:
    """Obstore's store of a bucket as s3fs reaches it, and the key in it."""
    bucket, key, version = fs.split_path(path)
    other = set(fs.client_kwargs) - _SAID_ALIKE or set(fs.config_kwargs) - _NOT_SAID
    if version is not None or other or fs.kwargs or fs.req_kw or fs.s3_additional_kwargs:
        raise NotNativeError
    if not _PLAIN_KEY.fullmatch(key):
        raise NotNativeError
    await fs.set_session()
    client = await fs.get_s3(bucket)
    with _use.lock:
        _use.pid = os.getpid()
        stores = _use.stores.setdefault(fs, {})
        if bucket not in stores:
            stores[bucket] = _make_store(fs, bucket, client.meta)
        return stores[bucket], key


def _make_store(fs: Any, bucket: str, meta: Any) -> Any:
    from obstore.store import S3Store

    async def credentials() -> Any:
        """As s3fs has them; asked for again every few minutes, as they may expire."""
        found = {"access_key_id": fs.key, "secret_access_key": fs.secret, "token": fs.token}
        if not fs.key:
            held = await fs.session.get_credentials()
            if held is None:
                raise PermissionError(
                    "no AWS credentials found; for public data: storage_options={'anon': True}"
                )
            now = await held.get_frozen_credentials()
            found = {
                "access_key_id": now.access_key,
                "secret_access_key": now.secret_key,
                "token": now.token,
            }
        return {**found, "expires_at": datetime.now(UTC) + _CREDENTIALS_LAST}

    config: Any = {"region": meta.region_name or "us-east-1"}
    if not meta.endpoint_url.partition("/?")[0].endswith((".amazonaws.com", ".amazonaws.com.cn")):
        config |= {"endpoint": meta.endpoint_url, "virtual_hosted_style_request": False}
    if fs.anon:
        config["skip_signature"] = True
    # Only silence is too long, and `prefetch.store` watches for that.
    client: Any = {
        "allow_http": meta.endpoint_url.startswith("http://"),
        "timeout": timedelta(days=1),
        "connect_timeout": timedelta(minutes=1),
    }
    return S3Store(
        bucket,
        config=config,
        client_options=client,
        retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
        credential_provider=None if fs.anon else credentials,
    )


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


__all__ = ["NotNativeError", "is_native", "native_body"]
