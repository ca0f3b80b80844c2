"""Read the head of a response: the length of the body, the object it is of, and when to come again.

Field names are in lower case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from prefetch.retries import WrongRangeError
from sharding.catalog.storage import encoded_text
from sharding.http_status import StatusError, retry_after_s

Info = Mapping[str, Any]
Check = Callable[[Info], None]
"""Raises if an object of this description ("size", "ETag") is not the one that was indexed."""
Fields = Mapping[str, str]

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_STATUS = re.compile(r"HTTP/1\.([01]) (\d{3})(?: (.*))?")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class BadAnswerError(ConnectionError):
    """The answer is no HTTP, or contradicts itself."""


class NoRangesError(Exception):
    """The server sends whole objects only."""


class EncodedBodyError(Exception):
    """The server compresses objects on their way: ranges of that are none of the object."""


@dataclass(frozen=True)
class Head:
    """The head of a response."""

    status: int
    reason: str
    fields: dict[str, str]
    """By name in lower case; several of one name are joined by commas."""
    keeps_connection: bool

    @property
    def length(self) -> int | None:
        """Bytes of the body; None where its end is marked in another way."""
        text = self.fields.get("content-length")
        if text is None or "transfer-encoding" in self.fields:
            return None
        if not (text.isascii() and text.isdigit()):
            raise BadAnswerError(f"the answer's length is {text[:40]!r}")
        return int(text)


def raise_for_status(status: int, reason: str, fields: Fields, path: str) -> None:
    """Raise what an unsuccessful answer means: `FileNotFoundError` or `StatusError`."""
    if status in (404, 410):
        raise FileNotFoundError(path)
    if status >= 300:
        raise StatusError(status, reason, retry_after_s(fields))


def encoding_of(fields: Fields) -> str:
    """Return how a body is compressed on its way; "": it is not."""
    encoding = fields.get("content-encoding", "").strip().lower()
    return "" if encoding == "identity" else encoding


def gives_own_bytes(status: int, fields: Fields) -> bool:
    """Return whether a body is as the object is stored: a range of it, whatever its coding.

    Servers say so of `.gz` files, and object stores of what was uploaded with `Content-Encoding`.
    """
    match = _CONTENT_RANGE.fullmatch(fields.get("content-range", "").strip())
    return not encoding_of(fields) or (status == 206 and match is not None and match[3] != "*")


def check_range(status: int, fields: Fields, start: int, check: Check) -> None:
    """Hold a successful answer to what was asked, and the object to the catalog.

    Raises:
        EncodedBodyError: what comes is compressed on its way.
        NoRangesError: the whole object comes, though its beginning is not wanted.
        WrongRangeError: another range comes, or nobody says which.
        What `check` raises.
    """
    if not gives_own_bytes(status, fields):
        raise EncodedBodyError(encoded_text(encoding_of(fields)))
    info: dict[str, Any] = {"ETag": fields.get("etag", ""), "Last-Modified": fields.get("last-modified", "")}
    text = fields.get("content-range", "").strip()
    match = _CONTENT_RANGE.fullmatch(text)
    if status != 206:
        if start:
            raise NoRangesError(
                "the server gives no byte ranges; put 'simplecache::' before the URL to read whole files"
            )
        # The whole object comes; its beginning is what was asked for.
        info["size"] = fields.get("content-length")
    elif match is None or int(match[1]) != start:
        raise WrongRangeError(
            f"the answer's Content-Range is {text!r}, where bytes from {start} were asked for"
        )
    else:
        info["size"] = None if match[3] == "*" else int(match[3])
    check(info)


def parse_head(text: bytes) -> Head:
    """The head of an answer, without the empty line at its end.

    By hand, because `http.client.parse_headers` takes 39 us for what takes 3 here, and a range of 128 KiB
    takes 50 altogether. `BadAnswerError` for anything that is no head.
    """
    first, *lines = text.decode("latin-1").split("\r\n")
    status = _STATUS.fullmatch(first)
    if status is None:
        raise BadAnswerError(f"the server does not speak HTTP/1.1; its answer begins with {first[:40]!r}")
    fields: dict[str, str] = {}
    for line in lines:
        name, value = _field(line)
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    persistent, connection = status[1] == "1", fields.get("connection", "").lower()
    keeps = "close" not in connection and (persistent or "keep-alive" in connection)
    return Head(int(status[2]), status[3] or "", fields, keeps)


@lru_cache(maxsize=256)
def _field(line: str) -> tuple[str, str]:
    """Name and value of a line; a server's answers have most of them in common."""
    name, colon, value = line.partition(":")
    if not colon or not _NAME.fullmatch(name):
        raise BadAnswerError(f"the head of the answer has a line {line[:40]!r}")
    return name.lower(), value.strip()
