"""Ranges of files on the Hugging Face Hub, from the address that it redirects to.

The Hub says once a file where its bytes are: an address of a content network that is signed for about an
hour. From then on ranges are asked of that address, past the Hub, until its signature is about to end, or
the address refuses: then the Hub is asked anew, once, by one request for all reads that wait. The token goes
to the Hub's own origin only.

Who is told to come later (429) tells all processes of this user on this machine, by the time stamp of a file
in the cache folder: none of them asks that host before. It is looked at before each request, which costs
2 us; nobody waits for anybody by it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import parse_qs, urljoin, urlsplit
from weakref import WeakKeyDictionary

from prefetch.http.connections import Connections, Destination, Origin
from prefetch.http.responses import Check, Head, Info, check_range, raise_for_status
from sharding.http_status import StatusError, retry_after_s
from sharding.hub.access import HubAccess
from sharding.hub.snapshot import hub_folder
from sharding.write.file import private_folder

_MOST_REDIRECTS = 5
_EARLY_S = 60.0
"""An address is given up so long before its signature ends, but not before nine tenths of its time."""
_REFUSED = (400, 401, 403)
"""The answers of content networks to a signature that has ended."""
_PATIENCE_S = 5.0
"""For an address; reads that wait for it are asked again by themselves."""
_MOST_BODY = 1 << 16
"""A longer answer to a question for an address is not read: its connection is closed."""
_SPREAD_S = 1.0
"""The time within which all processes come again after a pause."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class _Address:
    """The address of the bytes of a file."""

    url: str
    origin: Origin
    request: bytes
    """But for the range, which is its last line."""
    until_s: float
    """The time until which it holds, on the loop's clock."""
    is_signed: bool
    """True if it is of another origin than the Hub, where no token goes."""
    content: str
    """The SHA-256 that the Hub names; "": none."""


class _Addresses:
    """The addresses of the files of one Hub, as asked with one token. Only one event loop uses it."""

    def __init__(self, access: HubAccess) -> None:
        self._access = access
        self._known: dict[str, asyncio.Task[_Address]] = {}

    async def find(self, path: str, url: str) -> _Address:
        """The address of a file; asks the Hub if there is none, or its time is over."""
        known, address, loop = self._known.get(path), self._found(path), asyncio.get_running_loop()
        if known is None or (known.done() and (address is None or address.until_s <= loop.time())):
            known = self._known[path] = loop.create_task(self._ask(url))
            known.add_done_callback(_look_at)  # all who waited for it may have given up
        return await asyncio.shield(known)  # whoever else waits for it is not cancelled with this one

    def forget(self, path: str, address: _Address) -> None:
        """Ask for another one next time, unless somebody has already."""
        if self._found(path) is address:
            del self._known[path]

    def moved(self, path: str, address: _Address, head: Head) -> None:
        """Look for the file where this answer says from now on."""
        if self._found(path) is address:
            new: asyncio.Future[_Address] = asyncio.get_running_loop().create_future()
            new.set_result(
                self._address(urljoin(address.url, head.fields["location"]), head, address.content)
            )
            self._known[path] = new  # type: ignore[assignment]

    def _found(self, path: str) -> _Address | None:
        """The address that the Hub gave last; None: it is still asked, or gave none."""
        known = self._known.get(path)
        if known is None or not known.done() or known.cancelled() or known.exception():
            return None
        return known.result()

    async def _ask(self, url: str) -> _Address:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await self._follow(url)
        except TimeoutError:
            raise TimeoutError(f"the Hub did not say in {_PATIENCE_S:g} s where the content is") from None

    async def _follow(self, url: str) -> _Address:
        content = ""
        for _ in range(_MOST_REDIRECTS):
            here = self._address(url, None, content)
            head = await _head_of(here)
            content = _content(head) or content
            if head.status in (200, 206):
                return here if not content else self._address(url, None, content)
            if head.status not in (301, 302, 303, 307, 308) or "location" not in head.fields:
                _raise(head, url)
            url = urljoin(url, head.fields["location"])
            if not self._access.is_hub(url):
                return self._address(url, head, content)
        raise StatusError(508, f"the Hub redirected {_MOST_REDIRECTS} times")

    def _address(self, url: str, head: Head | None, content: str) -> _Address:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None or "@" in parts.netloc:
            raise StatusError(508, "the Hub redirected to an address that is not of HTTP")
        is_hub = self._access.is_hub(url)
        fields = {"Host": parts.netloc, "Accept": "*/*", "Accept-Encoding": "identity"}
        if is_hub:
            fields |= {name.title(): value for name, value in self._access.headers().items()}
        else:
            fields["User-Agent"] = "dataflow-loader"
        lines = [f"GET {parts.path or '/'}{'?' * bool(parts.query)}{parts.query} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        left_s = float("inf") if head is None else _seconds_left(url, head)
        return _Address(
            url=url,
            origin=(parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)),
            request="".join(f"{line}\r\n" for line in lines).encode("latin-1"),
            until_s=asyncio.get_running_loop().time() + max(left_s - _EARLY_S, left_s * 0.9),
            is_signed=not is_hub,
            content=content,
        )


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[HubAccess, _Addresses]] = WeakKeyDictionary()
"""All readers of a process share addresses; a child of a fork has another loop, and asks for its own."""


def _look_at(asking: asyncio.Task[_Address]) -> None:
    if not asking.cancelled():
        asking.exception()


class _MovedError(Exception):
    def __init__(self, head: Head) -> None:
        self.head = head


async def hub_body(fs: Any, path: str, start: int, dest: Destination, check: Check) -> None:
    """Fill a destination from `sharding.hub.filesystem.HubFileSystem`.

    Raises:
        StatusError, FileNotFoundError, OSError: as `prefetch.retries` sorts them; what `check` raises.
    """
    of_loop = _of_loops.setdefault(asyncio.get_running_loop(), {})
    addresses = of_loop.get(fs.access)
    if addresses is None:
        addresses = of_loop[fs.access] = _Addresses(fs.access)
    is_new = False
    for _ in range(_MOST_REDIRECTS):
        address = await addresses.find(path, fs.file_address(path))
        try:
            await _get(address, path, start, dest, check)
            return
        except _MovedError as moved:
            addresses.moved(path, address, moved.head)
        except StatusError as error:
            if not address.is_signed or error.status not in _REFUSED:
                raise
            addresses.forget(path, address)
            if is_new:
                raise PermissionError(
                    f"the address that the Hub gave refuses, twice: HTTP {error.status} {error.text}".rstrip()
                ) from None
            is_new = True
    raise StatusError(508, f"the content was redirected {_MOST_REDIRECTS} times")


async def _get(address: _Address, path: str, start: int, dest: Destination, check: Check) -> None:
    def is_the_indexed(info: Info) -> None:
        # The content network's own etag is not the Hub's: what a file is, its address says.
        check({"size": info.get("size"), "ETag": address.content})

    def accept(head: Head) -> Destination:
        if 300 <= head.status < 400 and "location" in head.fields:
            raise _MovedError(head)
        _record_pause(address, head)
        raise_for_status(head.status, head.reason, head.fields, path)
        check_range(head.status, head.fields, start, is_the_indexed)
        return dest

    _refuse_too_early(address)
    last = start + len(dest.rest) - 1
    request = b"%bRange: bytes=%d-%d\r\n\r\n" % (address.request, start, last)
    await Connections.here().request(address.origin, request, accept, receive_bytes=dest.receive_bytes)


class _NoBodyError(Exception):
    """Its answer has been looked at, and its body is not wanted."""


async def _head_of(address: _Address) -> Head:
    """Ask for the first byte, to see where it comes from."""
    heads: list[Head] = []

    def accept(head: Head) -> Destination:
        heads.append(head)
        _record_pause(address, head)
        if head.length is None or head.length > _MOST_BODY:
            raise _NoBodyError
        return Destination(memoryview(bytearray(head.length)), lambda nbytes: None)

    _refuse_too_early(address)
    with suppress(_NoBodyError):
        await Connections.here().request(
            address.origin, address.request + b"Range: bytes=0-0\r\n\r\n", accept
        )
    return heads[-1]


def _content(head: Head) -> str:
    """The SHA-256 of a file, where the Hub names it."""
    tag = head.fields.get("x-linked-etag", "").removeprefix("W/").strip('"')
    return tag if _SHA256.fullmatch(tag) else ""


def _raise(head: Head, url: str) -> None:
    """Raise what the Hub's refusal means, in words."""
    code, text = head.fields.get("x-error-code", ""), head.fields.get("x-error-message", head.reason)
    if (head.status == 404 and code != "EntryNotFound") or code == "RepoNotFound":
        raise PermissionError(
            f"the Hub says HTTP {head.status} {code or text}: repository or commit are gone, or private, "
            "and the token was not accepted: set HF_TOKEN or run 'hf auth login'"
        )
    if head.status in (401, 403):
        raise PermissionError(
            f"the Hub says HTTP {head.status} {code}: {text}; the token is missing, has expired or may not "
            "read this repository: set HF_TOKEN or run 'hf auth login'"
        )
    raise_for_status(head.status, text, head.fields, urlsplit(url).path)
    raise StatusError(head.status, text)


def _seconds_left(url: str, head: Head) -> float:
    """Return how long an address is signed for, on the clock of whoever answered; infinity: unknown."""
    query = {name.lower(): values[0] for name, values in parse_qs(urlsplit(url).query).items()}
    try:
        now = parsedate_to_datetime(head.fields.get("date", "")).timestamp()
    except (TypeError, ValueError):
        now = time.time()
    ends: list[float] = []
    with suppress(KeyError, ValueError):
        ends.append(float(query["expires"]))
    with suppress(KeyError, ValueError):
        signed = datetime.strptime(query["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        ends.append(signed.timestamp() + float(query["x-amz-expires"]))
    with suppress(KeyError, ValueError):
        ends.append(datetime.fromisoformat(query["se"]).timestamp())
    return min(ends, default=float("inf")) - now


# ---- pauses that a host asked for -----------------------------------------------------------------------


def _pause_file(origin: Origin) -> str:
    name = hashlib.blake2b("\0".join(map(str, origin)).encode(), digest_size=12).hexdigest()
    return os.path.join(hub_folder(), f"{name}.pause")


def _refuse_too_early(address: _Address) -> None:
    """Raise `StatusError` while a host wants to be left alone."""
    try:
        left_s = os.stat(_pause_file(address.origin)).st_mtime - time.time()
    except OSError:
        return
    if left_s > 0:
        raise StatusError(429, "it was asked to be left alone", left_s + random.uniform(0, _SPREAD_S))


def _record_pause(address: _Address, head: Head) -> None:
    """Let all processes know that a host wants to be left alone."""
    wait_s = retry_after_s(head.fields)
    if head.status == 429 and wait_s > 0:
        path, until_s = _pause_file(address.origin), time.time() + wait_s
        with suppress(OSError):
            private_folder(os.path.dirname(path))
            with open(path, "ab"):
                os.utime(path, (until_s, until_s))
