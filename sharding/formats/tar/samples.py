"""The members of an archive as samples: webdataset's grouping rule, vectorised.

A name splits at the first dot of its last component into key and extension
(`^((?:.*/|)[^.]+)[.]([^/]*)$`; extensions are lower-cased). Consecutive members with one key are one
sample; names without a key and names such as `__meta__` are passed over, and counted. Arrow applies these
expressions to all names at once, and numbers keys and extensions.

Two things differ from webdataset. Files whose name begins with a dot, and those in `__MACOSX/`, are never
samples: webdataset makes the key `d/` of `d/._0.jpg`, which a Mac puts beside `d/0.jpg`. And a key that comes
back behind other samples is an error: webdataset makes two halves of it.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
from msgspec import Struct
from numpy.typing import NDArray

from sharding.arrow_arrays import number_array
from sharding.errors import CorruptShardError
from sharding.formats.tar.links import link_targets
from sharding.formats.tar.members import Members

_SPLIT = r"(?P<key>(?:.*/|)[^.]+)[.](?P<extension>[^/]*)"
_PASSED_OVER = r"(?:[\s\S]*/|)\.[^/]*|(?:[\s\S]*/|)__MACOSX/[\s\S]*|__[^/]*__(?:\n|/[\s\S]*|)"
"""Hidden files; what lies in the folder in which a Mac's archives keep what its file system knows beside the
files' bytes; and names such as `__meta__`."""
_split, _passed_over = (re.compile(pattern.encode()).fullmatch for pattern in (_SPLIT, _PASSED_OVER))
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
    keys: pa.LargeBinaryArray
    """[n]."""
    key_start: NDArray[np.int64]
    """[n], where the key's bytes stand in the archive; -1 where they stand nowhere in one piece."""
    key_length: NDArray[np.int64]
    """The bytes of each key, [n]."""
    num_passed_over: int
    """Files without a key, hidden files, those in `__MACOSX/`, and `__meta__` files."""


class _Named(NamedTuple):
    """The members of an archive that belong to samples, [m], and the two parts of their names."""

    members: Members
    url: str
    """The URL that errors name."""
    rows: NDArray[np.int64]
    """The members, ascending."""
    keys: pa.LargeBinaryArray
    extensions: pa.LargeBinaryArray

    def shown(self, i: int) -> str:
        return repr(self.members.names[self.rows[i]].as_py().decode(errors="backslashreplace"))

    def fail(self, i: int, reason: str) -> NoReturn:
        """Raise `CorruptShardError` for a member, with its key and byte."""
        key = self.keys[i].as_py().decode(errors="backslashreplace")
        offset = int(self.members.header[self.rows[i]])
        raise CorruptShardError(self.url, reason, offset=offset, key=key)


def group_members(members: Members, url: str) -> Samples:
    """Group members into samples; in an unfinished archive, without a last one that is not whole.

    Raises:
        CorruptShardError: an extension occurs twice in one sample, is reserved, or is not UTF-8; a key comes
            back behind other samples; a link's target is not there. Names the key and the member's byte.
    """
    import pyarrow.compute as pc

    split = pc.extract_regex(members.names, pattern=f"^{_SPLIT}$")
    passed_over = pc.match_substring_regex(members.names, f"^(?:{_PASSED_OVER})$")
    rows = np.flatnonzero(_flags(pc.and_not(split.is_valid(), passed_over)))
    keys, extensions = (split.field(part).take(number_array(rows)) for part in ("key", "extension"))
    begins = np.append(np.ones(len(rows[:1]), np.bool_), _flags(pc.not_equal(keys[1:], keys[:-1])))
    named = _Named(members, url, rows, keys, extensions)
    if members.unfinished:
        end = _end_of_whole_samples(named, begins)
        rows, begins = rows[:end], begins[:end]
        named = _Named(members, url, rows, keys[:end], extensions[:end])
    sample, first = np.cumsum(begins) - 1, np.flatnonzero(begins)
    coded = named.extensions.dictionary_encode()
    texts = [text.decode(errors="surrogateescape").lower() for text in coded.dictionary.to_pylist()]
    number = _numbers(coded.indices)
    _refuse_misnamed(number, texts, named)
    columns = tuple(sorted(set(texts)))
    column = np.array([columns.index(text) for text in texts], np.int64)[number]
    if (twice := _first_repeated(number_array(sample * len(columns) + column))) is not None:
        reason = "the sample already has a member with this extension (duplicate file name in the archive)"
        named.fail(twice[0], reason)
    keys = named.keys.take(number_array(first))
    if (again := _first_repeated(keys)) is not None:
        late, early = first[list(again)].tolist()
        _fail_returning(named, late, early, column, sample)
    return Samples(
        columns=columns,
        member=rows,
        source=_sources(named),
        sample=sample,
        column=column,
        first=first,
        keys=keys,
        key_start=members.name_start[rows[first]],
        key_length=_numbers(pc.binary_length(keys)),
        num_passed_over=len(members) - len(rows),
    )


def split_name(name: bytes) -> tuple[bytes, bytes] | None:
    """Key and extension of a member's name, or None where it is of no sample."""
    match = _split(name)
    return None if match is None or _passed_over(name) else (match[1], match[2])


def _flags(array: pa.BooleanArray) -> NDArray[np.bool_]:
    return _numbers(array.cast(pa.uint8())).view(np.bool_)


def _numbers(array: pa.Array) -> NDArray[Any]:
    return np.from_dlpack(array)  # no copy; `to_numpy` would import pandas


def _first_repeated(array: pa.Array) -> tuple[int, int] | None:
    """The first value that was there before: its place, and that of the one before it; None: all differ."""
    numbers = _numbers(array.dictionary_encode().indices)  # in the order of their first places
    repeated = np.flatnonzero(numbers != np.arange(len(numbers)))
    return (int(repeated[0]), int(numbers[repeated[0]])) if len(repeated) else None


def _fail_returning(
    named: _Named, late: int, early: int, column: NDArray[np.int64], sample: NDArray[np.int64]
) -> NoReturn:
    """Raise for the member that begins a sample again, which began at an earlier one."""
    there = f"its sample begins at byte {named.members.header[named.rows[early]]}, and others follow it"
    cure = "make the archive anew, in the order of names (`tar --sort=name`)"
    if column[late] in column[sample == sample[early]]:
        reason = f"the key comes again: the member {named.shown(late)} is in the archive twice; {there}"
        named.fail(late, f"{reason}; {cure}, with each file once")
    reason = f"the members of a sample are not neighbours: {named.shown(late)} comes late; {there}; {cure}"
    named.fail(late, reason)


def _sources(named: _Named) -> NDArray[np.int64]:
    """The rows whose bytes the members have: their own, or what their link points to."""
    source, links = named.rows.copy(), named.members.links
    if links:
        targets = link_targets(links, named.members.names.to_pylist())
        for i in np.flatnonzero(np.isin(named.rows, [*links])).tolist():
            target = targets[int(named.rows[i])]
            if isinstance(target, str):
                named.fail(i, f"the member {named.shown(i)} is {target}")
            source[i] = target
    return source


def _end_of_whole_samples(named: _Named, begins: NDArray[np.bool_]) -> int:
    """Count the members without a last sample that lacks what the one before it has, or is cut."""
    rows = named.rows
    if not len(rows):
        return 0
    starts = [0, *np.flatnonzero(begins).tolist()]  # of one sample alone, nothing tells what it lacks
    before, last = (
        {extension.lower() for extension in named.extensions[slice(*ends)].to_pylist()}
        for ends in ((starts[-2], starts[-1]), (starts[-1], None))
    )
    is_cut = named.members.last_is_cut and rows[-1] == len(named.members) - 1
    return starts[-1] if is_cut or not before <= last else len(rows)


def _refuse_misnamed(number: NDArray[np.integer], texts: list[str], named: _Named) -> None:
    for i, text in enumerate(texts):
        not_text = any("\ud800" <= sign <= "\udfff" for sign in text)
        if not_text or text in _RESERVED:
            reason = f"the extension {text!r} is {'not UTF-8' if not_text else 'reserved'}"
            named.fail(int(np.argmax(number == i)), reason)
    if len(set(texts)) > _MAX_COLUMNS:
        reason = f"{len(set(texts))} different extensions, more than {_MAX_COLUMNS}; are keys without dots?"
        raise CorruptShardError(named.url, reason)
