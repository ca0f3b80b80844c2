"""Text that a terminal shows and does not obey.

Names of shards, columns and samples are whoever's made the data. Escape sequences in them move a cursor, set
a title or paint over what was printed before, and signs without a width make two names look alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_CONTROLS = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    r"\ufff9-\ufffb"
)
_IN_TEXT = re.compile(f"[{_CONTROLS}]")
_IN_NAME = re.compile(f"[\n\t{_CONTROLS}]")


def printable(text: str) -> str:
    r"""Text of one or more lines with control characters written out, as `\x1b`. Others stay as they are.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return text if text.isascii() and text.isprintable() else _IN_TEXT.sub(_written_out, text)


def printable_name(text: str) -> str:
    """A name with control characters written out, ends of lines included."""
    return text if text.isascii() and text.isprintable() else _IN_NAME.sub(_written_out, text)


def listed(names: Iterable[str]) -> str:
    """Names for a message, one after the other."""
    return ", ".join(map(printable_name, names))


def _written_out(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
