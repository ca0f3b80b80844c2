"""An answer of HTTP that is no success: its status, and when to come again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

_RATE_LIMIT = re.compile(r"r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")
"""Nothing remains until so many seconds have passed (draft-ietf-httpapi-ratelimit-headers)."""


class StatusError(Exception):
    """An HTTP status that is no success."""

    def __init__(self, status: int, text: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(status, text, retry_after_s)
        self.status, self.text, self.retry_after_s = status, text, retry_after_s

    def __str__(self) -> str:
        return f"HTTP {self.status} {self.text}".rstrip()


def retry_after_s(fields: Mapping[str, str]) -> float:
    """Seconds of a `Retry-After`, or of a `RateLimit` that is used up; 0: none that can be read.

    A date counts from the server's own clock.
    """
    text = fields.get("retry-after", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        wait = parsedate_to_datetime(text) - parsedate_to_datetime(fields.get("date", ""))
        return max(0.0, wait.total_seconds())
    except (TypeError, ValueError):
        used_up = _RATE_LIMIT.search(fields.get("ratelimit", ""))
        return float(used_up[1]) if used_up else 0.0
