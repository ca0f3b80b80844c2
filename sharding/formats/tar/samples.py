"""The members of an archive as samples: webdataset's grouping rule, vectorised.

A name splits at the first dot of its last component into key and extension
(`^((?:.*/|)[^.]+)[.]([^/]*)$`; extensions are lower-cased). Consecutive members with one key are one
sample; names without a key and names such as `__meta__` are passed over, and counted. Most names are
split by comparing bytes in bulk; those where the regular expression has more to say (line ends, a leading
"__", names from extension headers) go through it one by one.

Two things differ from webdataset. Files whose name begins with a dot, and those in `__MACOSX/`, are never
samples: webdataset makes the key `d/` of `d/._0.jpg`, which a Mac puts beside `d/0.jpg`. And a key that comes
back behind other samples is an error: webdataset makes two halves of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import NoReturn

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sharding.errors import CorruptShardError
from sharding.formats.tar.header import NAME
from sharding.formats.tar.links import link_targets
from sharding.formats.tar.members import Location, Members

_SPLIT = re.compile(rb"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META = re.compile(rb"__[^/]*__($|/)")
_APPLE = b"__MACOSX"
"""The folder in which a Mac's archives keep what its file system knows beside the files' bytes."""
_RESERVED = {"__key__", "__url__", "__bad__", "__local_path__"}
"""Names webdataset uses in the sample itself."""
_MAX_COLUMNS = 1 << 16


class Samples(Struct, frozen=True, kw_only=True):
    """m members in n samples."""

    columns: tuple[str, ...]
    """The extensions of all samples, sorted."""
    member: NDArray[np.int64]
    """[m], rows of the archive's `Members` that belong to samples, ascending."""
    source: NDArray[np.int64]
    """[m], rows whose bytes these are: the same, but for links."""
    sample: NDArray[np.int64]
    """[m], the sample each belongs to, ascending."""
    column: NDArray[np.int64]
    """[m], which extension it is."""
    first: NDArray[np.int64]
    """[n], position in `member` of each sample's first member."""
    key_start: NDArray[np.int64]
    """[n], where the key's bytes stand in the archive; -1 where they stand nowhere in one piece."""
    key_length: NDArray[np.int64]
    """The bytes of each key, [n]."""
    key: Callable[[int], bytes]
    """The key of one sample."""
    num_passed_over: int
    """Files without a key, hidden files, those in `__MACOSX/`, and `__meta__` files."""


class _Names(Struct, frozen=True, kw_only=True):
    """The split names of n members."""

    members: Members
    url: str
    """The URL that errors name."""
    text: NDArray[np.uint8]
    """[n, 100], zeros behind the name's end."""
    length: NDArray[np.int64]
    """The bytes of each name, [n]."""
    key_length: NDArray[np.int64]
    """The bytes of each key, [n]; -1: no key."""
    special: dict[int, tuple[bytes, bytes, int | None] | None]
    """By row: key, extension and where the key stands (None: nowhere in one piece); None: no key."""

    def key(self, row: int) -> bytes:
        special = self.special.get(row)
        return special[0] if special else self.text[row, : self.key_length[row]].tobytes()

    def extension(self, row: int) -> bytes:
        special = self.special.get(row)
        plain = self.text[row, self.key_length[row] + 1 : self.length[row]]
        return (special[1] if special else plain.tobytes()).lower()

    def specials_among(self, rows: NDArray[np.int64]) -> dict[int, tuple[bytes, bytes, int | None]]:
        """Return the names of `rows`, which have keys, that were split one by one: by index in `rows`."""
        at = np.flatnonzero(np.isin(rows, np.fromiter(self.special, np.int64, len(self.special)))).tolist()
        return {i: split for i in at if (split := self.special[int(rows[i])]) is not None}

    def name(self, row: int) -> bytes:
        located = self.members.located.get(row)
        return located.name if located else self.text[row, : self.length[row]].tobytes()

    def shown(self, row: int) -> str:
        return repr(self.name(row).decode(errors="backslashreplace"))

    def fail(self, row: int, reason: str) -> NoReturn:
        """Raise `CorruptShardError` for a member, with its key and byte."""
        key = self.key(row).decode(errors="backslashreplace")
        raise CorruptShardError(self.url, reason, offset=int(self.members.header[row]), key=key)


def group_members(members: Members, url: str) -> Samples:
    """Group members into samples; in an unfinished archive, without a last one that is not whole.

    Raises:
        CorruptShardError: an extension occurs twice in one sample, is reserved, or is not UTF-8; a key comes
            back behind other samples; a link's target is not there. Names the key and the member's byte.
    """
    names = _split_names(members, url)
    rows = np.flatnonzero(names.key_length >= 0)
    begins = _begins_sample(names, rows)
    if members.unfinished:
        end = _end_of_whole_samples(names, rows, begins)
        rows, begins = rows[:end], begins[:end]
    sample = np.cumsum(begins) - 1
    number, texts = _extensions(names, rows)
    _refuse_misnamed(number, texts, rows, names)
    columns = tuple(sorted(set(texts)))
    column = np.array([columns.index(text) for text in texts], np.int64)[number]
    _refuse_duplicates(sample * len(columns) + column, rows, names)
    first = np.flatnonzero(begins)
    first_row = rows[first]
    _refuse_returning(names, rows, first, column)
    key_start = members.header[first_row].copy()  # the name is the first field of a header
    for i, (_, _, start) in names.specials_among(first_row).items():
        key_start[i] = -1 if start is None else start
    return Samples(
        columns=columns,
        member=rows,
        source=_sources(names, rows),
        sample=sample,
        column=column,
        first=first,
        key_start=key_start,
        key_length=names.key_length[first_row],
        key=lambda i: names.key(int(first_row[i])),
        num_passed_over=len(members) - len(rows),
    )


def split_name(name: bytes) -> tuple[bytes, bytes] | None:
    """Key and extension of a member's name, or None where it is of no sample."""
    folder, _, last = name.rpartition(b"/")
    if last.startswith(b".") or _APPLE in folder.split(b"/"):
        return None
    match = _SPLIT.match(name)
    return None if match is None or _META.match(name) else (match[1], match[2])


def _split_names(members: Members, url: str) -> _Names:
    text, length = _trimmed(members.name_field)
    last_slash = np.full(len(text), -1, np.int64)
    rows, columns = np.nonzero(text == ord("/"))
    last_slash[rows] = columns  # of several, the last assignment stays
    rows, columns = np.nonzero(text == ord("."))
    behind = columns > last_slash[rows]
    dot = np.full(len(text), -1, np.int64)
    dot[rows[behind][::-1]] = columns[behind][::-1]  # backwards: the first dot is assigned last
    dot[dot == last_slash + 1] = -1  # hidden files
    # The regular expression does not split these at that dot: line ends, which its "." does not match; names
    # like `__meta__`.
    odd = (text == ord("\n")).any(axis=1) | (text[:, :2] == ord("_")).all(axis=1)
    rows, columns = np.nonzero(text[:, 2:] == ord("M"))
    odd[rows[(text[rows, columns] == ord("_")) & (text[rows, columns + 1] == ord("_"))]] = True
    special = {row: _special(members, text, row) for row in {*np.flatnonzero(odd).tolist(), *members.located}}
    for row, split in special.items():
        dot[row] = -1 if split is None else len(split[0])
    return _Names(members=members, url=url, text=text, length=length, key_length=dot, special=special)


def _trimmed(field: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    zero = field == 0
    length = np.where(zero.any(axis=1), zero.argmax(axis=1), NAME.stop)
    return np.where(np.arange(NAME.stop) < length[:, None], field, np.uint8(0)), length


def _special(members: Members, text: NDArray[np.uint8], row: int) -> tuple[bytes, bytes, int | None] | None:
    plain = Location(text[row].tobytes().rstrip(b"\0"), int(members.header[row]))
    name, start = members.located.get(row, plain)
    split = split_name(name)
    return None if split is None else (*split, start)


def _begins_sample(names: _Names, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which members, all with keys, have another key than the one before."""
    if not len(rows):
        return np.zeros(0, np.bool_)
    key_length = names.key_length[rows]
    keys = np.where(np.arange(NAME.stop) < key_length[:, None], names.text[rows], np.uint8(0))
    key = np.ascontiguousarray(keys).view(f"S{NAME.stop}")[:, 0]
    begins = np.append(True, key[1:] != key[:-1])
    special = np.array([*names.specials_among(rows)], np.int64)
    for i in np.unique(np.concatenate([special, special + 1])).tolist():
        if 0 < i < len(rows):
            begins[i] = names.key(int(rows[i])) != names.key(int(rows[i - 1]))
    return begins


def _refuse_returning(
    names: _Names, rows: NDArray[np.int64], first: NDArray[np.int64], column: NDArray[np.int64]
) -> None:
    """Raise where a key comes again behind other samples.

    Keys with one hash are compared, so a million different ones cost a sort of numbers.
    """
    hashes = _key_hashes(names, rows[first])
    order = np.argsort(hashes, kind="stable")
    again = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
    seen: dict[bytes, int] = {}
    for sample in np.unique(order[np.concatenate([again, again + 1])]).tolist():
        row = int(rows[first[sample]])
        before = seen.setdefault(names.key(row), sample)
        if before != sample:
            end = first[before + 1]
            _fail_returning(
                names, row, int(rows[first[before]]), column[first[sample]], column[first[before] : end]
            )


def _fail_returning(
    names: _Names, row: int, first_row: int, column: np.int64, columns: NDArray[np.int64]
) -> NoReturn:
    there = f"its sample begins at byte {names.members.header[first_row]}, and others follow it"
    cure = "make the archive anew, in the order of names (`tar --sort=name`)"
    if column in columns:
        reason = f"the key comes again: the member {names.shown(row)} is in the archive twice; {there}"
        names.fail(row, f"{reason}; {cure}, with each file once")
    names.fail(
        row, f"the members of a sample are not neighbours: {names.shown(row)} comes late; {there}; {cure}"
    )


_HASH_WORDS = -(-NAME.stop // 8)


@cache
def _hash_factors() -> NDArray[np.uint64]:
    """[words] odd numbers."""
    return np.random.default_rng(0).integers(1 << 63, size=_HASH_WORDS).astype(np.uint64) * 2 + 1


def _key_hashes(names: _Names, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A number for the key of each row; equal keys have equal ones."""
    text = np.zeros((len(rows), 8 * _HASH_WORDS), np.uint8)
    text[:, : NAME.stop] = names.text[rows]
    text *= np.arange(text.shape[1]) < names.key_length[rows][:, None]
    long: dict[int, int] = {}
    for i, (key, _, _) in names.specials_among(rows).items():
        text[i] = 0
        if len(key) > NAME.stop:
            long[i] = hash(key) % (1 << 64)
        else:
            text[i, : len(key)] = np.frombuffer(key, np.uint8)
    hashes = text.view(np.uint64) @ _hash_factors()
    hashes[np.array([*long], np.int64)] = np.array([*long.values()], np.uint64)
    return hashes


def _sources(names: _Names, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows whose bytes the members in `rows` have: their own, or what their link points to."""
    source = rows.copy()
    links = np.flatnonzero(
        np.isin(rows, np.fromiter(names.members.links, np.int64, len(names.members.links)))
    )
    if len(links):
        targets = link_targets(names.members.links, map(names.name, range(len(names.members))))
        for i in links.tolist():
            row = int(rows[i])
            found = targets[row]
            if isinstance(found, str):
                names.fail(row, f"the member {names.shown(row)} is {found}")
            source[i] = found
    return source


def _end_of_whole_samples(names: _Names, rows: NDArray[np.int64], begins: NDArray[np.bool_]) -> int:
    """Count the `rows` without a last sample that lacks what the one before it has, or is cut."""
    if not len(rows):
        return 0
    starts = [0, *np.flatnonzero(begins).tolist()]  # of one sample alone, nothing tells what it lacks
    before, last = (
        {names.extension(row) for row in rows[slice(*ends)].tolist()}
        for ends in ((starts[-2], starts[-1]), (starts[-1], None))
    )
    is_cut = names.members.last_is_cut and rows[-1] == len(names.members) - 1
    return starts[-1] if is_cut or not before <= last else len(rows)


def _extensions(names: _Names, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[str]]:
    """Return for every member the number of its extension's text; the texts, lower-cased, may repeat."""
    specials = names.specials_among(rows)
    is_plain = np.ones(len(rows), np.bool_)
    is_plain[[*specials]] = False
    distinct, inverse = np.unique(_plain_extensions(names, rows[is_plain]), return_inverse=True)
    number_of = {text: i for i, text in enumerate(distinct.tolist())}
    number = np.empty(len(rows), np.int64)
    number[is_plain] = inverse
    for i, (_, extension, _) in specials.items():
        number[i] = number_of.setdefault(extension, len(number_of))
    return number, [text.decode(errors="surrogateescape").lower() for text in number_of]


def _plain_extensions(names: _Names, rows: NDArray[np.int64]) -> NDArray[np.bytes_]:
    start = names.key_length[rows] + 1
    width = max(1, int((names.length[rows] - start).max(initial=0)))
    ended = np.append(names.text[rows], np.zeros((len(rows), 1), np.uint8), axis=1)
    texts = np.take_along_axis(ended, np.minimum(start[:, None] + np.arange(width), NAME.stop), axis=1)
    return np.ascontiguousarray(texts).view(f"S{width}")[:, 0]


def _refuse_misnamed(
    number: NDArray[np.int64], texts: list[str], rows: NDArray[np.int64], names: _Names
) -> None:
    for i, text in enumerate(texts):
        not_text = any("\ud800" <= sign <= "\udfff" for sign in text)
        if not_text or text in _RESERVED:
            reason = f"the extension {text!r} is {'not UTF-8' if not_text else 'reserved'}"
            names.fail(int(rows[np.argmax(number == i)]), reason)
    if len(set(texts)) > _MAX_COLUMNS:
        reason = f"{len(set(texts))} different extensions, more than {_MAX_COLUMNS}; are keys without dots?"
        raise CorruptShardError(names.url, reason)


def _refuse_duplicates(code: NDArray[np.int64], rows: NDArray[np.int64], names: _Names) -> None:
    """`code` is one number for each pair of sample and column."""
    order = np.argsort(code, kind="stable")
    repeated = order[1:][code[order[1:]] == code[order[:-1]]]
    if len(repeated):
        reason = "the sample already has a member with this extension (duplicate file name in the archive)"
        names.fail(int(rows[repeated.min()]), reason)
