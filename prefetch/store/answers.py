"""What the head of an answer to a range request says: of the object, and of the server's mood.

Field names are in lower case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from prefetch.store.retries import StatusError, WrongRangeError

Info = Mapping[str, Any]
Check = Callable[[Info], None]
"""Raises if an object of this description ("size", "ETag") is not the one that was indexed."""
Fields = Mapping[str, str]

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class NoRangesError(Exception):
    """The server sends whole objects only."""

    def __str__(self) -> str:
        return "the server gives no byte ranges; put 'simplecache::' before the URL to read whole files"


def raise_for_status(status: int, reason: str, fields: Fields, path: str) -> None:
    """Raise what an unsuccessful answer means: `FileNotFoundError` or `StatusError`."""
    if status in (404, 410):
        raise FileNotFoundError(path)
    if status >= 300:
        raise StatusError(status, reason, _retry_after_s(fields))


def check_range(status: int, fields: Fields, start: int, check: Check) -> None:
    """Hold a successful answer to what was asked, and the object to the catalog.

    Raises:
        NoRangesError: the whole object comes, though its beginning is not wanted.
        WrongRangeError: another range comes, or nobody says which.
        What `check` raises.
    """
    info: dict[str, Any] = {"ETag": fields.get("etag", ""), "Last-Modified": fields.get("last-modified", "")}
    said = fields.get("content-range", "").strip()
    given = _CONTENT_RANGE.fullmatch(said)
    if status != 206:
        if start:
            raise NoRangesError
        # The whole object comes; its beginning is what was asked for.
        info["size"] = fields.get("content-length")
    elif given is None or int(given[1]) != start:
        raise WrongRangeError(
            f"the answer's Content-Range is {said!r}, where bytes from {start} were asked for"
        )
    else:
        info["size"] = None if given[3] == "*" else int(given[3])
    check(info)


def _retry_after_s(fields: Fields) -> float:
    """Seconds of a `Retry-After`; a date counts from the server's own clock. 0: none that can be read."""
    text = fields.get("retry-after", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        wait = parsedate_to_datetime(text) - parsedate_to_datetime(fields.get("date", ""))
        return max(0.0, wait.total_seconds())
    except (TypeError, ValueError):
        return 0.0


__all__ = ["Check", "Info", "NoRangesError", "check_range", "raise_for_status"]
