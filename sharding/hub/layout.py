"""Find the files of a split of a dataset in the Hub's layout, as `datasets` (5.2) finds them.

A README may say it (`configs` in its YAML head); else the names of files and folders do: shards called
`data/train-00000-of-00010.parquet`, then folders called like a split, then files, then all are "train". The
patterns mean what they mean in `datasets` (`matcher`); that both give the same files is tested side by side
(tests/ecosystem). Pure: paths in, paths out, relative to the repository.

Differences, on purpose: a file that two patterns match is taken once; of files of several formats those of
the most frequent one are taken, and an error says so if that is one we do not read.
"""

from __future__ import annotations

import fnmatch
import mimetypes
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from glob import has_magic
from pathlib import PurePosixPath
from typing import Any

from sharding.errors import DataflowError
from sharding.formats import ENTRIES, format_of_suffix, suffix_of
from sharding.hub.names import KEYWORDS
from sharding.printable import listed

_SHARDED = "data/{split}-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9]*.*"
_SHARD_NAME = re.compile(r"data/(.+?)-[0-9]{5}-of-[0-9]{5}.*\..*")
_SPLIT_NAME = re.compile(r"\w+(\.\w+)*")
_SEPARATORS = "-._ 0-9"
_IN_FOLDER_NAME = (
    "**/{keyword}/**",
    "**/{keyword}[{sep}]*/**",
    "**/*[{sep}]{keyword}/**",
    "**/*[{sep}]{keyword}[{sep}]*/**",
)
_IN_FILE_NAME = ("**/{keyword}[{sep}]*", "**/*[{sep}]{keyword}[{sep}]*")
_NO_DATA = {
    "README.md",
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dummy_data.zip",
    "dataset_dict.json",
}
_MOST_MATCHES = 50_000_000
"""The matches of patterns by paths, at most; a million take a second."""
_METADATA = {f"metadata.{ending}" for ending in ("csv", "jsonl", "parquet")}
_OTHER_DATA = {
    *(".csv", ".tsv", ".txt", ".json", ".xml", ".h5", ".hdf5", ".lance", ".vortex", ".zip", ".npz"),
    *(".pdf", ".nii", ".glb", ".ply", ".stl", ".pkl", ".safetensors"),
}
"""Endings of data that we do not read, besides pictures, sound and video."""


def split_files(
    paths: Iterable[str],
    configs: Sequence[Mapping[str, Any]],
    *,
    where: str,
    config: str | None = None,
    split: str | None = None,
    format: str = "auto",  # noqa: A002
) -> list[str]:
    """The files of a split, in reading order.

    Args:
        paths: all files, relative to the repository or folder.
        configs: of the README, as `card_configs` gives them; empty: there are none.
        where: what it is, for messages.
        config: name of the configuration; None: the default one.
        split: name of the split; None: the only one.
        format: name of the format, if the endings do not tell.

    Raises:
        ValueError: no such config or split, or several and none is named; a README that contradicts itself.
        DataflowError: the split has no files, or files of a format that is not read.
    """
    paths = sorted(paths)
    config, settings = _config(configs, config, where)
    data_dir = str(settings.get("data_dir") or "")
    if format == "auto" and not any(map(format_of_suffix, paths)):
        _refuse_unsupported(paths, where)
    splits = _patterns(settings.get("data_files"), paths, data_dir, where, config)
    if split is None and len(splits) > 1:
        raise ValueError(f"split must be one of {listed(splits)}: {where} has several; got None")
    name = next(iter(splits), "train") if split is None else split
    if name not in splits:
        cure = "; for a part of one, use .subset, .take or .split" if "[" in name else ""
        raise ValueError(f"split must be one of {listed(splits)} in {where}, got {name!r}{cure}")
    files = _matching_all(splits[name], paths, data_dir, where)
    label = f"split {name!r} of {where}" + (f", config {config!r}" if configs else "")
    return _of_one_format(files, format, label)


def _refuse_unsupported(paths: Iterable[str], label: str) -> None:
    """Raise for files of a kind that is known, and not read."""
    from sharding.formats.unsupported import unsupported_text

    reader = "datasets.load_dataset" if "hf://" in label else ""
    if (unsupported := unsupported_text(paths, reader)) is not None:
        raise DataflowError(f"{label}: {unsupported}")


def _config(
    configs: Sequence[Mapping[str, Any]], name: str | None, where: str
) -> tuple[str, Mapping[str, Any]]:
    """The config of a name, or the default one: what it is called, and what it says."""
    for config in configs:
        if not isinstance(config.get("data_files"), (str, list, dict, type(None))):
            what = f"data_files of config {config['config_name']!r} of {where}"
            raise ValueError(f"{what} is {config['data_files']!r}")
    known = {str(config["config_name"]): config for config in configs} or {"default": {}}
    if name is None:
        default = [n for n, c in known.items() if len(known) == 1 or n == "default" or c.get("default")]
        if len(default) != 1:
            several = f"has {len(default)} default configs" if default else "has no default config"
            raise ValueError(f"config must be one of {listed(known)}, as {where} {several}; got None")
        name = default[0]
    if name not in known:
        raise ValueError(f"config must be one of {listed(known)} in {where}, got {name!r}")
    return name, known[name]


def _patterns(
    data_files: Any, paths: Sequence[str], data_dir: str, where: str, config: str
) -> dict[str, list[str]]:
    """Return the patterns of each split.

    `data_files` is as in YAML: pattern, patterns, or patterns of each split; None: the default patterns.
    """
    if data_files is None:
        if defaults := _default_patterns(paths, data_dir):
            return defaults
        raise DataflowError(f"{where} holds no data files" + f" in {data_dir}" * bool(data_dir))
    if isinstance(data_files, str):
        return {"train": [data_files]}
    if isinstance(data_files, Mapping):
        return {str(split): _listed(patterns) for split, patterns in data_files.items()}
    if not any(isinstance(entry, Mapping) for entry in data_files):
        return {"train": [str(entry) for entry in data_files]}
    splits: dict[str, list[str]] = {}
    for entry in data_files:
        if not isinstance(entry, Mapping) or set(entry) != {"split", "path"} or str(entry["split"]) in splits:
            raise ValueError(
                f"data_files of config {config!r} of {where} must name each split once, with path; "
                f"got {entry!r}"
            )
        splits[str(entry["split"])] = _listed(entry["path"])
    return splits


def _listed(patterns: Any) -> list[str]:
    return [str(pattern) for pattern in patterns] if isinstance(patterns, (list, tuple)) else [str(patterns)]


def _default_patterns(paths: Sequence[str], data_dir: str) -> dict[str, list[str]]:
    shards = _matching(_SHARDED.replace("{split}", "*"), paths, data_dir)
    if shards:
        names = set()
        for path in shards:
            match = _SHARD_NAME.fullmatch(posixpath.relpath(path, data_dir) if data_dir else path)
            name = match[1] if match else ""
            if not _SPLIT_NAME.fullmatch(name):
                raise ValueError(
                    f"the name of a split must be letters, digits, '_' and '.', got {name!r} by {path!r}"
                )
            names.add(name)
        ordered = [name for name in KEYWORDS if name in names] + sorted(names - KEYWORDS.keys())
        return {name: [_SHARDED.format(split=name)] for name in ordered}
    for shapes in (_IN_FOLDER_NAME, _IN_FILE_NAME):
        splits = {}
        for split, words in KEYWORDS.items():
            patterns = [shape.format(keyword=word, sep=_SEPARATORS) for word in words for shape in shapes]
            if any(_matching(pattern, paths, data_dir) for pattern in patterns):
                splits[split] = patterns
        if splits:
            return splits
    return {"train": ["**"]} if _matching("**", paths, data_dir) else {}


def _matching_all(patterns: Sequence[str], paths: Sequence[str], data_dir: str, where: str) -> list[str]:
    if len(patterns) * len(paths) > _MOST_MATCHES:
        raise ValueError(
            f"{len(patterns):,} patterns for {len(paths):,} files are too many to look at (the README of "
            f"{where} has them); give the files as the source instead"
        )
    files: dict[str, None] = {}
    for pattern in patterns:
        matches = _matching(pattern, paths, data_dir)
        if not matches and not has_magic(pattern):
            raise DataflowError(
                f"{where} has no file {posixpath.join(data_dir, pattern)!r}, which its README names"
            )
        files |= dict.fromkeys(matches)
    return list(files)


def _matching(pattern: str, paths: Sequence[str], data_dir: str) -> list[str]:
    """Files that a glob matches; hidden ones, and those in folders called `__x`, only if it names them so."""
    if "://" in pattern or pattern.startswith("/"):
        raise ValueError(f"patterns of data files must be relative to the repository, got {pattern!r}")
    pattern = posixpath.normpath(posixpath.join(data_dir, pattern))
    ignored = _NO_DATA - {posixpath.basename(pattern)}
    matches = matcher(pattern) if has_magic(pattern) else pattern.__eq__
    hidden, special = _hidden(pattern), _special(pattern)
    return [
        path
        for path in paths
        if matches(path)
        and posixpath.basename(path) not in ignored
        and _special(path) == special
        and _hidden(path) == hidden
    ]


def matcher(pattern: str) -> Callable[[str], bool]:
    """A function that says whether a glob matches a path, as `datasets` means it.

    A part of a pattern between two "/" matches one name, `**` any number of them. fsspec's `glob_translate`
    makes one regular expression of all, in which `a*a*a*...` takes years over a name of fifty letters. Here
    each part is one of its own (`fnmatch.translate`, which never tries a star again), and `**` is looked for
    from part to part: the time grows with pattern and path only. That both match the same is tested.

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
    if text == "**":
        return None
    if "**" in text:
        raise ValueError(f"'**' must be a whole part of a pattern, between two '/', got {text!r}")
    if text == "*":
        return len  # of an empty name there is none
    return re.compile(fnmatch.translate(text)).match


def _hidden(path: str) -> int:
    return sum(part.startswith(".") and set(part) != {"."} for part in path.split("/"))


def _special(path: str) -> int:
    return sum(part.startswith("__") for part in PurePosixPath(path).parent.parts)


def _of_one_format(files: Sequence[str], format: str, label: str) -> list[str]:  # noqa: A002
    kinds = {path: _kind(path, format) for path in files}
    counts = Counter(
        kind
        for path, kind in kinds.items()
        if kind and (posixpath.basename(path) not in _METADATA or len(files) == 1)
    ) or Counter(kind for kind in kinds.values() if kind)
    if not counts:
        text = f"{label} has no data files among its {len(files)} files"
        raise DataflowError(f"{text}; give format= if those without an ending are some")
    names = list(ENTRIES)
    kind = max(counts, key=lambda ending: (counts[ending], ending == "parquet", ending in names, ending))
    if kind not in names and format == "auto":
        _refuse_unsupported([path for path, ending in kinds.items() if ending == kind], label)
        raise DataflowError(
            f"{label} consists of {counts[kind]:,} files that end in {kind!r}, which are not read "
            f"(read are: {', '.join(names)}); give format= if they are one of these"
        )
    return [path for path, ending in kinds.items() if ending == kind]


def _kind(path: str, format: str) -> str | None:  # noqa: A002
    """The format of a file, or its ending if that is data of another kind; None: it is no data.

    `format` is that of files without an ending.
    """
    known, ending = format_of_suffix(path), suffix_of(path)
    if known is not None:
        return known
    if not ending and format in ENTRIES:
        return None if posixpath.basename(path).startswith("_") else format
    kind = mimetypes.types_map.get(ending, "").partition("/")[0]
    return ending if ending in _OTHER_DATA or kind in ("image", "audio", "video") else None
