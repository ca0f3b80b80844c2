"""Ask for ranges without the store's client, where that can be: plain HTTP, and S3 by signed URLs.

fsspec stays the user's way to say what to read and how; listing, indexing and sizes go through it. A range is
read past it where all that it would say is known here: HTTP(S) with headers only, and S3 with endpoint,
region and credentials only. There the URL of an object is signed once by botocore (for an hour, used for
five minutes; not at all for public buckets) and its ranges are plain HTTP requests. Everything else is
refused by `NotDirectError`, and the client is asked: other options (proxies, cookies, authenticators,
certificates, versions of objects), redirects, bodies without a length in their head or compressed on their
way, and whatever S3 answers to a signed URL but the range, "not found" or "later": the client's word is
final. Where an answer was the reason, its store is left to the client from then on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass
from weakref import WeakKeyDictionary

from prefetch.http.connections import Connections, Destination, Origin
from prefetch.http.responses import Check, Head, check_range, gives_own_bytes, raise_for_status

_SIGNED_FOR_S = 3600
_SIGNATURE_USED_S = 300.0
"""Less than credentials that are renewed by themselves have left."""
_MOST_TARGETS = 4096
_OURS = {"accept-encoding", "connection", "content-length", "expect", "host", "range", "transfer-encoding"}
_SAID_OF_S3 = {"endpoint_url", "region_name"}
_ANY = {"max_pool_connections", "retries"}
"""Options of botocore that mean nothing here."""
_SIGNATURE = ("signature_version", "s3v4")


class NotDirectError(Exception):
    """The store's client must be asked instead; nothing came yet."""


@dataclass(frozen=True)
class _Target:
    """The request line and headers for the ranges of an object."""

    store: str
    origin: Origin
    request: bytes
    """But for the range, which is its last line."""


class _Route:
    """The facts about a filesystem. Only its event loop uses it."""

    def __init__(self, headers: bytes | None, *, is_signed: bool) -> None:
        self.headers, self.is_signed = headers, is_signed
        """The headers as they are sent; None: it cannot be asked directly. True if URLs are signed."""
        self.not_direct: set[str] = set()
        """Stores that answered in a way that only the client understands."""
        self.targets: dict[str, tuple[float, _Target]] = {}
        """By object, and until when each is used: as long as its signature."""

    def target(self, path: str) -> _Target | None:
        until_s, target = self.targets.get(path, (0.0, None))
        return target if asyncio.get_running_loop().time() < until_s else None

    def new_target(self, path: str, store: str, url: SplitResult, *, for_s: float = math.inf) -> _Target:
        self.refuse(store)
        if url.scheme not in ("http", "https") or url.hostname is None or "@" in url.netloc:
            raise NotDirectError
        uri = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
        head = f"GET {uri} HTTP/1.1\r\nHost: {url.netloc}\r\nAccept-Encoding: identity\r\n".encode("ascii")
        origin = url.scheme, url.hostname, url.port or (443 if url.scheme == "https" else 80)
        assert self.headers is not None
        target = _Target(store, origin, head + self.headers)
        if len(self.targets) >= _MOST_TARGETS:
            self.targets.clear()
        self.targets[path] = asyncio.get_running_loop().time() + for_s, target
        return target

    def refuse(self, store: str) -> None:
        """Raise `NotDirectError` for a store that is left to its client."""
        if self.headers is None or store in self.not_direct:
            raise NotDirectError


_routes: WeakKeyDictionary[Any, _Route] = WeakKeyDictionary()
"""By filesystem, which a child of a fork has its own of."""


async def direct_http(fs: Any, path: str, start: int, dest: Destination, check: Check) -> None:
    """Fill a destination from fsspec's HTTPFileSystem.

    Raises:
        NotDirectError: see there.
        StatusError, FileNotFoundError, OSError: as `prefetch.retries` sorts them; what `check` raises.
    """
    route = _of(fs, _headers_of_http)
    target = route.target(path)
    if target is None:
        url = urlsplit(str(fs.encode_url(path)))
        target = route.new_target(path, url.netloc, url)
    await _get(route, target, path, start, dest, check)


async def direct_s3(fs: Any, path: str, start: int, dest: Destination, check: Check) -> None:
    """Fill a destination from s3fs; raises what `direct_http` raises."""
    route = _of(fs, _headers_of_s3)
    target = route.target(path)
    if target is None:
        bucket, _, version = fs.split_path(path)
        if version is not None:
            raise NotDirectError
        route.refuse(bucket)
        url = await _signed(fs, path)
        if _has_own_ways(fs, url):
            route.not_direct.add(bucket)
        target = route.new_target(path, bucket, url, for_s=_SIGNATURE_USED_S)
    await _get(route, target, path, start, dest, check)


def _get(
    route: _Route, target: _Target, path: str, start: int, dest: Destination, check: Check
) -> Awaitable[None]:
    store = target.store
    route.refuse(store)

    def accept(head: Head) -> Destination:
        status, fields = head.status, head.fields
        understood = 200 <= status < 300 or status in (404, 408, 429) or status >= 500
        if not understood and (route.is_signed or status < 400):
            route.not_direct.add(store)
            raise NotDirectError
        raise_for_status(status, head.reason, fields, path)
        if head.length is None or not gives_own_bytes(status, fields):
            route.not_direct.add(store)
            raise NotDirectError
        check_range(status, fields, start, check)
        return dest

    request = b"%bRange: bytes=%d-%d\r\n\r\n" % (target.request, start, start + len(dest.rest) - 1)
    return Connections.here().request(target.origin, request, accept, receive_bytes=dest.receive_bytes)


def _of(fs: Any, headers_of: Any) -> _Route:
    route = _routes.get(fs)
    if route is None:
        route = _routes[fs] = _Route(headers_of(fs), is_signed=headers_of is _headers_of_s3)
    return route


def _headers_of_http(fs: Any) -> bytes | None:
    from fsspec.implementations.http import HTTPFileSystem, get_client

    # A session's time-outs are for other requests: ranges have their own.
    more = {*fs.kwargs, *(fs.client_kwargs.keys() - {"timeout"})} - {"headers"}
    if more or type(fs) is not HTTPFileSystem or fs.get_client is not get_client:
        return None
    headers = {"User-Agent": "dataflow-loader", "Accept": "*/*"}
    for options in (fs.client_kwargs.get("headers"), fs.kwargs.get("headers")):
        for name, value in dict(options or {}).items():
            if name.lower() in ("accept-encoding", "range"):
                continue  # never what the user means of a range
            if name.lower() in _OURS or any(sign in f"{name}{value}" for sign in "\r\n\0"):
                return None
            headers = {n: v for n, v in headers.items() if n.lower() != name.lower()} | {name: value}
    try:
        return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")
    except UnicodeEncodeError:
        return None


def _headers_of_s3(fs: Any) -> bytes | None:
    odd = [option for option in fs.config_kwargs.items() if option[0] not in _ANY and option != _SIGNATURE]
    other = set(fs.client_kwargs) - _SAID_OF_S3 or set(fs.kwargs) - {"profile"} or odd
    return None if other or fs.req_kw or fs.s3_additional_kwargs else b""


async def _signed(fs: Any, path: str) -> SplitResult:
    bucket, key, _ = fs.split_path(path)
    await fs.set_session()
    client = await fs.get_s3(bucket)
    try:
        url = await client.generate_presigned_url(
            "get_object", Params={"Bucket": bucket, "Key": key}, ExpiresIn=_SIGNED_FOR_S
        )
    except Exception as error:  # s3fs says it in its own words
        raise NotDirectError from error
    return urlsplit(str(url))


def _has_own_ways(fs: Any, url: SplitResult) -> bool:
    """Return whether botocore would use a proxy, or trust other certificates, as the environment may say."""
    proxied = {url.scheme, "all"} & getproxies().keys() and not proxy_bypass(url.hostname or "")
    return bool(proxied or (url.scheme == "https" and fs.session.get_config_variable("ca_bundle")))
