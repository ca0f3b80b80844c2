"""Globs over paths as `datasets` means them, in a time that grows with pattern and path only.

A part of a pattern between two "/" matches one name, `**` any number of them. fsspec's `glob_translate` makes
one regular expression of all, in which `a*a*a*...` takes years over a name of fifty letters. Here each part
is one of its own (`fnmatch.translate`, which never tries a star again), and `**` is looked for from part to
part. That both match the same is tested.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable

_ANY = "**"


def matcher(pattern: str) -> Callable[[str], bool]:
    """A function that says whether a glob matches a path.

    Raises `ValueError` where `**` is a part of a name.
    """
    parts = [_part(part) for part in pattern.split("/")]

    def matches(path: str) -> bool:
        names = path.split("/")
        # Where in the path the parts seen so far may end: behind so many names.
        ends = {0}
        for number, part in enumerate(parts, 1):
            if part is None:
                is_last = number == len(parts)  # "a/**" is not "a"
                ends = set(range(min(ends) + is_last, len(names) + 1))
            else:
                ends = {end + 1 for end in ends if end < len(names) and part(names[end])}
            if not ends:
                return False
        return len(names) in ends

    return matches


def _part(text: str) -> Callable[[str], object] | None:
    """Return what matches one part of a name; None: it is `**`."""
    if text == _ANY:
        return None
    if _ANY in text:
        raise ValueError(f"'**' must be a whole part of a pattern, between two '/', got {text!r}")
    if text == "*":
        return len  # of an empty name there is none
    return re.compile(fnmatch.translate(text)).match
