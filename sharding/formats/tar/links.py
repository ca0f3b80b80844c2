"""Hard and symbolic links of an archive: whose bytes they are.

As in `tarfile`: a hard link names a file that stands before it; a symbolic link names one relative to its own
folder, anywhere in the archive. Of files of one name, the last one counts. A link may point to a link.
"""

from __future__ import annotations

import posixpath
from bisect import bisect_left
from collections.abc import Iterable, Mapping

from sharding.formats.tar.header import MemberLink

_MOST_STEPS = 40
"""Links that are followed one after the other: as many as Linux does."""


def link_targets(links: Mapping[int, MemberLink], names: Iterable[bytes]) -> dict[int, int | str]:
    """Return where the bytes of each link are.

    Args:
        links: by row of the archive's members.
        names: of all members, in their order.

    Returns:
        By row of the link: the row of a file, or in words what the link is and why its bytes are not there.
    """
    paths = [_normal(name) for name in names]
    beside = {row: posixpath.dirname(paths[row]) if link.is_symbolic else b"" for row, link in links.items()}
    targets = {row: _normal(posixpath.join(beside[row], link.target)) for row, link in links.items()}
    named: dict[bytes, list[int]] = {path: [] for path in targets.values()}
    for row, path in enumerate(paths):
        if path in named:
            named[path].append(row)

    def target(row: int) -> int | str:
        steps, member = 0, row
        while (link := links.get(member)) is not None:
            rows, steps = named[targets[member]], steps + 1
            before = len(rows) if link.is_symbolic else bisect_left(rows, member)
            if not before or steps > _MOST_STEPS:
                return _unresolved(links[row], is_circle=steps > _MOST_STEPS)
            member = rows[before - 1]
        return member

    return {row: target(row) for row in links}


def _normal(path: bytes) -> bytes:
    """A path without `.`, `..` and doubled slashes; most have none."""
    path = path.removeprefix(b"./")
    return posixpath.normpath(path) if b"/." in path or b"//" in path or path[:1] in b"./" else path


def _unresolved(link: MemberLink, *, is_circle: bool) -> str:
    kind, option = ("symbolic", "--dereference") if link.is_symbolic else ("hard", "--hard-dereference")
    target = repr(link.target.decode(errors="backslashreplace"))
    why = "which leads back to it" if is_circle else "which is no file of this archive"
    if not is_circle and not link.is_symbolic:
        why += " before it"
    return f"a {kind} link to {target}, {why}: its bytes are not there; make the archive with `tar {option}`"
