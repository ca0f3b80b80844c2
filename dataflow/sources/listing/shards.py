"""Say which files of a folder are the shards that its writer meant: of one format, one split, one writing.

Names tell. Pure: names in, names out, in the order given.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Sequence

from sharding.errors import ShardReadError
from sharding.formats import ENTRIES, format_of_suffix, has_suffix, suffix_of
from sharding.hub.names import KEYWORDS
from sharding.printable import listed

_SIGN = "[-._ 0-9]"
_IN_NAME = {
    split: re.compile(rf"(?:^|{_SIGN})(?:{'|'.join(words)}){_SIGN}") for split, words in KEYWORDS.items()
}
"""Signs of each split in file names, as `datasets` knows them."""
_OF_SET = re.compile(r"(.*?)-?(\d{5,})-of-(\d{5,})(.*)")
_OF_RUN = re.compile(r"(?:shard-\d{6}|shard\.\d{5})(?P<run>-r\d+)?\..+")
"""Shards of `convert`, and which of the conversions into a folder they are of."""
_NAMED = 3


def shards_in(names: Collection[str], format: str = "auto") -> list[str]:  # noqa: A002
    """The shards among the files of a folder: by the endings of a format, or of any; else those without one.

    Beside tars that img2dataset wrote, its tables of what became of each URL are none.
    """
    endings = {name: suffix_of(name) for name in names if not name.startswith((".", "_"))}
    choices = ENTRIES[format].suffixes if format in ENTRIES else ()
    there = {*endings.values()}
    known = there.intersection(choices) or {ending for ending in there if ending and has_suffix(f"x{ending}")}
    if not known:
        return [name for name, ending in endings.items() if not ending] if choices else []
    if known == {".tar", ".parquet"}:
        stems = [name.removesuffix(".tar") for name, ending in endings.items() if ending == ".tar"]
        if {f"{stem}{end}" for stem in stems for end in ("_stats.json", ".parquet")} <= endings.keys():
            known = {".tar"}
    return [name for name, ending in endings.items() if ending in known]


def splits_in(names: Sequence[str]) -> dict[str, list[str]]:
    """The files of each split that the names of some tell."""
    matches = {split: [name for name in names if sign.search(name)] for split, sign in _IN_NAME.items()}
    return {split: files for split, files in matches.items() if files}


def check_one_split(names: Sequence[str], where: str) -> None:
    """Raise `ValueError` where the names of a folder's shards tell of several splits, and of nothing else."""
    splits = splits_in(names)
    if not splits:
        return
    first, files = next(iter(splits.items()))
    others = [name for name in names if not any(sign.search(name) for sign in _IN_NAME.values())]
    cure = f"name one, as in split={first!r}, or files by a pattern, as in '{where}/*.*'"
    if others:
        text = f"{where} holds {files[0]!r}, of the split {first!r}, and {len(others):,} shards of none"
        warnings.warn(f"{text}, such as {others[0]!r}: all are read. If not so meant, {cure}", stacklevel=2)
    elif len({*map(tuple, splits.values())}) > 1:
        raise ValueError(f"{where} holds the shards of several splits ({listed(splits)}): {cure}")


def check_sets(names: Collection[str], where: str) -> None:
    """Raise `ShardReadError` where shards called `x-00001-of-00004` are not whole, or of two writings."""
    runs = {match["run"]: name for name in names if (match := _OF_RUN.fullmatch(name))}
    if len(runs) > 1:
        names = listed(sorted(runs.values()))
        cure = "open dataset.catalog, which is whole, or start the one that was not finished again"
        raise ShardReadError(where, f"holds shards of two conversions, such as {names}: {cure}")
    sets = defaultdict[tuple[str, str], dict[str, list[int]]](lambda: defaultdict(list))
    for name in names:
        if match := _OF_SET.fullmatch(name):
            stem, number, total, rest = match.groups()
            sets[stem, format_of_suffix(name) or rest][total].append(int(number))
    for (stem, _), numbers in sets.items():
        if len(numbers) > 1:
            totals = " beside ".join(f"-of-{total}" for total in sorted(numbers))
            raise ShardReadError(
                where,
                f"holds shards {stem}-*{totals}, of two writings: take one of them away, or name the other's "
                "files by a pattern",
            )
        ((total, there),) = numbers.items()
        lacking = sorted({*range(int(total))} - {*there}) if int(total) < 10 * len(there) + 1_000 else []
        if len(there) == int(total) and not lacking:
            continue
        more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
        which = f": {listed(map('{:05d}'.format, lacking[:_NAMED]))}{more} are not there" if lacking else ""
        raise ShardReadError(
            where,
            f"holds {len(there):,} shards {stem}-*-of-{total}{which}. Copy them again, or name those that "
            "count by a pattern",
        )
