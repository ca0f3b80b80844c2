"""The catalog of loose files: a folder of class folders, a folder of files, a manifest, a glob, or a list.

A listing tells all that a catalog of them needs: names, sizes, versions. So nothing is opened, and a catalog
is kept only where `catalog=` says: whoever opens the files lists them again, as torchvision's `ImageFolder`
does, and knows at once what changed. Classes and the order of files are those of `ImageFolder`: classes are
the sorted names of folders, files come by class, folder and name. Links are followed as it follows them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import methodcaller
from typing import Any
from urllib.parse import quote

import numpy as np
from msgspec import structs

from dataflow.sources.file_catalogs import UNKNOWN, Files, FolderListing, LooseFiles, is_hidden, listing
from dataflow.sources.listing.claims import (
    KIND_OF,
    KINDS,
    MANIFESTS,
    Listing,
    SourceArguments,
    Spec,
    claim_shards,
)
from dataflow.sources.listing.expand import braced
from dataflow.sources.listing.places import Places
from dataflow.sources.manifests import (
    Manifest,
    ManifestRows,
    ending_of_table,
    folder_of,
    paths_of,
    raise_absent,
    read_manifest,
)
from sharding.catalog.listings import common_folder
from sharding.catalog.storage import open_url, read_file, store_errors
from sharding.errors import CorruptShardError, ShardReadError
from sharding.formats import format_of_suffix, has_suffix
from sharding.formats.files import (
    NO_CLASS,
    ending_of,
    key_of,
)
from sharding.formats.tables.separated import separator_of
from sharding.hub.names import KEYWORDS, is_hub
from sharding.printable import listed, printable_name
from sharding.redaction import identity_of
from sharding.urls import (
    below,
    file_name,
    has_glob_signs,
    is_glob,
    is_http,
    is_local,
    local_path,
    naming_part,
)

_PLAIN = "/~!$&'()*+,;=:@"
"""Signs that stand for themselves in the path of a URL."""
_PER_SHARD = 100
"""Files of a kind for each shard that lies among them, at least: fewer are the pictures of a repository."""
_NAMED = 5
_HEAD_BYTES, _HEAD_ROWS = 1 << 18, 100
_log = logging.getLogger("dataflow")


def find_loose(
    source: Any,
    options: Mapping[str, Any] | None = None,
    *,
    any_kind: bool = False,
    manifest: Manifest | None = None,
    split: str | None = None,
    classes: Sequence[str] | None = None,
) -> LooseFiles | None:
    """The loose files that a source means; None: it means none.

    Args:
        source: a path, URL, glob, or a list of these.
        options: keyword arguments of the fsspec filesystem.
        any_kind: take files of every ending, of globs and folders; else images, sounds and videos.
        manifest: names the files of a folder, which is the source.
        split: of a folder with a folder for each split, the one that is read.
        classes: names of folders, in the order of their numbers. None: sorted, those of all splits.

    Raises:
        ShardReadError: nothing is there, links go in a circle, or a class has no file.
        CorruptShardError: a manifest that breaks the rules of its kind, or names files outside the folder.
        ValueError: a folder of splits, two files of one name, a name that is not UTF-8, or a manifest without
            the columns.
    """
    if manifest is not None:
        return _of_manifest(_only_folder(source, split), manifest, options)
    items = [source] if isinstance(source, (str, os.PathLike)) else source
    if not isinstance(items, (list, tuple)) or not items:
        return None
    texts = [os.fspath(item) for item in items if isinstance(item, (str, os.PathLike))]
    if len(texts) < len(items) or not all(isinstance(text, str) for text in texts):
        return None
    if any(is_hub(text) or not text.endswith(naming_part(text)) for text in texts):
        return None
    patterns = [piece for text in texts for piece in braced(text, options)]
    if split is not None:
        return _of_split(patterns, options, split, any_kind=any_kind, classes=classes)
    if len(patterns) == 1 and _is_folder(patterns[0], options):
        return _of_folder(patterns[0], options, any_kind=any_kind, classes=classes)
    if classes is not None:
        raise ValueError("classes= are for a folder with a folder for each class")
    if not any_kind and any(ending_of(file_name(pattern)) not in KIND_OF for pattern in patterns):
        return None
    if not any(map(is_http, patterns)):
        return _of_patterns(patterns, options)
    if all(is_http(url) and not url.endswith("/") and not is_glob(url) for url in patterns):
        return _of_urls(patterns)
    return None  # HTTP has no patterns


def claim_files(spec: Spec, asked: SourceArguments, places: Places) -> Listing | None:
    """The files that are a sample each; None: the source means others."""
    if (asked.config, asked.revision) != (None, None) or spec.kind not in (
        "folder",
        "file",
        "pattern",
        "list",
    ):
        return None
    return _claimed(spec.source, asked, places, None)


def claim_manifest(spec: Spec, asked: SourceArguments, places: Places) -> Listing | None:
    """The files that a table names: `manifest=`, or a source of its own; else its rows are samples."""
    source, manifest = spec.source, asked.manifest
    manifest = Manifest(manifest) if isinstance(manifest, (str, os.PathLike)) else manifest
    if spec.kind in ("catalog", "opened") or asked.format not in ("auto", "files"):
        if manifest is not None:
            raise ValueError("manifest= is for a folder of files, not for a catalog or another format")
        return None
    if (asked.config, asked.revision) != (None, None):
        return None
    if manifest is None and asked.format == "auto" and not _names_files(spec.text, places):
        return structs.replace(claim_shards(spec, asked, places), format="csv")
    if manifest is None:
        source, manifest = folder_of(spec.text), Manifest(spec.text)
    return _claimed(source, asked, places, manifest)


def _names_files(url: str, places: Places) -> bool:
    """Return whether a table names files, or may have been meant to, as texts of its first rows do."""
    head = places.retrier(lambda: read_file(url, places.options, _HEAD_BYTES), url)
    lines = head.decode("utf-8-sig", "replace").splitlines()[:_HEAD_ROWS]
    separator, folder = separator_of(head, ending_of_table(url), "file_name"), folder_of(url)
    rows = [[cell.strip().strip('"') for cell in line.split(separator)] for line in lines]
    beside = {*places.names(folder)} - {file_name(url)}
    above = {*places.names(folder, "directory")}
    texts = {text.removeprefix("./") for row in rows[1:] for text in row}
    is_beside = any(text in beside or ("/" in text and text.partition("/")[0] in above) for text in texts)
    return is_beside or not rows or "file_name" in rows[0]


def _claimed(
    source: Any, asked: SourceArguments, places: Places, manifest: Manifest | None
) -> Listing | None:
    def find() -> LooseFiles | None:
        return find_loose(
            source,
            places.options,
            any_kind=asked.format == "files",
            manifest=manifest,
            split=asked.split,
            classes=asked.classes,
        )

    first = source[0] if isinstance(source, (list, tuple)) and source else source
    files = places.retrier(find, str(first), may_ask_nobody=True)
    return None if files is None else asked.listing(files.urls, files=files)


def _is_folder(url: str, options: Mapping[str, Any] | None) -> bool:
    if is_local(url):
        return os.path.isdir(local_path(url))
    if is_http(url):
        return url.endswith("/")
    if is_glob(url) or ending_of(file_name(url)) in KIND_OF:
        return False
    fs, path = open_url(url, options)
    with store_errors(url):
        return bool(fs.isdir(path))


# ---- folders --------------------------------------------------------------------------------------------


def _of_folder(
    url: str,
    options: Mapping[str, Any] | None,
    *,
    any_kind: bool,
    above: tuple[str, str] = ("", ""),
    classes: Sequence[str] | None = None,
) -> LooseFiles | None:
    """The loose files of a folder.

    `above`: the folder with a manifest for this one, and its name there. `classes`: all, in the order of
    their numbers; None: those of this folder.
    """
    try:
        contents = listing(url, options)
    except ShardReadError as error:
        if is_http(url) and error.reason.startswith("no such file"):
            return None  # a server without pages that list files
        raise
    is_sample = _chooser(contents.files, any_kind=any_kind)
    if is_sample is None:
        return None
    rows = _manifest_in(url, contents.files, options)
    if rows is None and above[0]:
        there = listing(above[0], options, depth=1)
        rows = _manifest_in(above[0], there.files, options, within=above[1])
    if rows is not None:
        named = sorted({name.removeprefix("./").partition("/")[0] for name in rows.names if "/" in name})
        if len({_split_of(name) for name in named} - {None}) > 1:
            raise _of_several_splits(url, named, f", or manifest={file_name(rows.url)!r} for all its files")
        return _in_order_of(rows, url, contents, is_found=True)
    samples = {path: facts for path, facts in contents.files.items() if is_sample(path)}
    num_files, top = len(contents.files) + contents.num_hidden, sorted(contents.folders)
    beside = sorted(path for path in samples if "/" not in path)
    filled = {path.partition("/")[0] for path in samples if "/" in path}
    _check_keys(samples)
    if not filled:
        return _loose(url, beside, [samples[path] for path in beside], num_files - len(beside))
    splits = {_split_of(name) for name in filled} - {None}
    is_split = filled == {name for name in filled if _split_of(name)}
    if len(splits) > 1 or (is_split and all(path.count("/") > 1 for path in samples)):
        raise _of_several_splits(url, top, "")
    if nested := [path for path in contents.files if path.rpartition("/")[2] in MANIFESTS]:
        raise ValueError(
            f"{identity_of(url)} has a manifest in a folder below, {nested[0]!r}: give that folder as the "
            f"source, or the table by manifest=, with names from {identity_of(url)} on"
        )
    empty = [name for name in top if name not in filled]
    if empty:
        more = f" and {len(empty) - _NAMED} more" if len(empty) > _NAMED else ""
        raise ShardReadError(
            url,
            f"no sample is in the folder of class {listed(empty[:_NAMED])}{more}. torchvision's ImageFolder "
            "refuses that too, as numbers of classes follow the sorted names of folders: remove the folder, "
            "fill it, or give a glob such as '<folder>/**/*.jpg', whose files have no class",
        )
    if beside:
        warnings.warn(
            f"{len(beside)} files such as {printable_name(beside[0])} lie in {identity_of(url)} beside the "
            "folders of classes, and are left out; give a glob such as '<folder>/**/*.jpg' to read all "
            "files, without classes",
            stacklevel=2,
        )
    if classes is not None and (unknown := sorted({*top} - {*classes})):
        raise ValueError(
            f"{identity_of(url)} has a folder {unknown[0]!r}, and classes= are {listed(classes)}"
        )
    names = top if classes is None else list(classes)
    number_of = {name: number for number, name in enumerate(names)}
    paths = sorted((path for path in samples if "/" in path), key=methodcaller("rpartition", "/"))
    numbers = np.array([number_of[path.partition("/")[0]] for path in paths], np.int32)
    by_class = np.argsort(numbers, kind="stable")
    paths = [paths[index] for index in by_class.tolist()]
    files = _loose(url, paths, [samples[path] for path in paths], num_files - len(paths))
    files = structs.replace(files, class_numbers=numbers[by_class], class_names=names)
    if names == top:
        return files
    digest = hashlib.blake2b(json.dumps(names).encode(), digest_size=8).hexdigest()
    return structs.replace(files, numbering=digest)


def _chooser(files: Files, *, any_kind: bool) -> Callable[[str], bool] | None:
    """Return whether a file is a sample, by its name; None: the folder is not one of loose files."""
    if any_kind:
        return lambda name: ending_of(name) != ""
    endings = Counter(map(ending_of, files))
    kinds, num_in_shards = Counter[str](), 0
    for ending, count in endings.items():
        if ending in KIND_OF:
            kinds[KIND_OF[ending]] += count
        elif format_of_suffix("x." + ending):
            num_in_shards += count
    num_in_shards -= sum(has_suffix(name) for name in MANIFESTS if name in files)
    if not kinds or max(kinds.values()) <= _PER_SHARD * num_in_shards:
        return None
    suffixes = KINDS[kinds.most_common(1)[0][0]]
    return lambda name: ending_of(name) in suffixes


# ---- manifests ------------------------------------------------------------------------------------------


def _only_folder(source: Any, split: str | None) -> str:
    if not isinstance(source, (str, os.PathLike)) or not isinstance(text := os.fspath(source), str):
        raise ValueError(f"manifest= is for one folder of files, got {source!r} as the source")
    if split is not None:
        raise ValueError("split= picks a folder, and manifest= names files: give each split its manifest")
    return text


def _manifest_in(
    url: str, files: Files, options: Mapping[str, Any] | None, within: str = ""
) -> ManifestRows | None:
    """The manifest that lies in a folder of files, of those `within` another one; None: there is none."""
    there = [name for name in MANIFESTS if name in files]
    if len(there) > 1:
        raise ValueError(
            f"{identity_of(url)} has several manifests ({listed(sorted(there))}): name one by manifest="
        )
    if not there:
        return None
    return read_manifest(Manifest(below(url, there[0])), url, options, within=within)


def _of_manifest(url: str, manifest: Manifest, options: Mapping[str, Any] | None) -> LooseFiles:
    """The files of a folder that a manifest names. What it says the size of, or HTTP has, is not listed."""
    rows = read_manifest(manifest, url, options)
    assert rows is not None
    if is_http(url) or rows.sizes is not None:
        if is_http(url) and "?" in url:
            raise ValueError(f"a manifest's folder must be a URL without '?', got {identity_of(url)!r}")
        sizes = np.full(len(rows.names), UNKNOWN) if rows.sizes is None else rows.sizes
        paths = paths_of(rows, url)
        if is_http(url):
            paths = [quote(path, safe=_PLAIN) for path in paths]
        return _of_rows(rows, url, paths, [(size, "") for size in sizes.tolist()], 0)
    if not _is_folder(url, options):
        raise ShardReadError(url, "no such folder, in which the manifest's files should be")
    return _in_order_of(rows, url, listing(url, options), is_found=False)


def _in_order_of(rows: ManifestRows, url: str, contents: FolderListing, *, is_found: bool) -> LooseFiles:
    """The files of a listing that a manifest names; the others are counted.

    `is_found`: whether the manifest was found in the folder, and nobody named it.
    """
    there, paths = contents.files, paths_of(rows, url)
    raise_absent(rows, [row for row, path in enumerate(paths) if path not in there], url)
    used = {*paths}
    endings = {ending_of(path) for path in used}
    others = [path for path in there if path not in used]
    unnamed = [path for path in others if ending_of(path) in endings]
    if unnamed:
        text = (
            f"{len(unnamed):,} files such as {printable_name(unnamed[0])} in {identity_of(url)} have no row "
            f"in {identity_of(rows.url)}, and are left out"
        )
        # Whoever names a manifest may mean a part of the files.
        warnings.warn(text, stacklevel=2) if is_found else _log.info("%s", text)
    return _of_rows(rows, url, paths, [there[path] for path in paths], len(others) + contents.num_hidden)


def _of_rows(
    rows: ManifestRows,
    url: str,
    paths: Sequence[str],
    facts: Sequence[tuple[int, str]],
    num_left_out: int,
) -> LooseFiles:
    for row, path in enumerate(paths):
        if not ending_of(path):
            raise CorruptShardError(
                rows.url,
                f"{rows.told(row)}, which has no ending, by which the column of a file is called",
            )
    return structs.replace(_loose(url, paths, facts, num_left_out), manifest=rows)


# ---- splits ---------------------------------------------------------------------------------------------


def _of_several_splits(url: str, names: Sequence[str], otherwise: str) -> ValueError:
    split = next(filter(None, map(_split_of, names)))
    reason = f"{identity_of(url)} has a folder for each split ({listed(names)})"
    return ValueError(f"{reason}: name one, as in split={split!r}{otherwise}")


def _of_split(
    patterns: Sequence[str],
    options: Mapping[str, Any] | None,
    split: str,
    *,
    any_kind: bool,
    classes: Sequence[str] | None,
) -> LooseFiles | None:
    """The loose files in the folder of a split; None: the source means others."""
    if len(patterns) != 1 or not _is_folder(url := patterns[0], options):
        return None
    names = _folders_in(url, options)
    splits = {key: name for name in reversed(names) if (key := _split_of(name))}
    name = split if split in names else splits.get(_split_of(split) or split)
    if name is not None:
        if classes is None:  # of all splits: one that lacks a class has the numbers of the others
            folders = {*_folders_in(below(url, name), options)}
            of_others = [
                _folders_in(below(url, peer), options) for peer in names if _split_of(peer) and peer != name
            ]
            classes = sorted(folders.union(*of_others)) if folders else None
        place = below(url, name)
        return _of_folder(place, options, any_kind=any_kind, above=(url, name), classes=classes)
    if any(_of_folder(below(url, folder), options, any_kind=any_kind) for folder in [*splits.values()][:1]):
        raise ValueError(
            f"split must be one of {listed(sorted(splits))}: {identity_of(url)} has the folders "
            f"{listed(names)}; got {split!r}"
        )
    return None


# ---- globs ----------------------------------------------------------------------------------------------


def _of_patterns(patterns: Sequence[str], options: Mapping[str, Any] | None) -> LooseFiles:
    """The files that match any of some patterns, in the order of the patterns, each once."""
    from fsspec.utils import glob_translate

    files, listings = Files(), dict[tuple[str, int | None], Files]()
    num_left_out = 0
    for pattern in patterns:
        root, rest = _split_pattern(pattern, options)
        depth = None if "**" in rest else rest.count("/") + 1
        if (root, depth) not in listings:
            here = listing(root, options, depth=depth)
            num_left_out += here.num_hidden
            listings[root, depth] = {path: facts for path, facts in here.files.items() if ending_of(path)}
        there = listings[root, depth]
        is_match = re.compile(glob_translate(rest)).match
        names = [rest] if rest in there else sorted(filter(is_match, there))
        if not names:
            raise ShardReadError(pattern, f"no file matches this pattern among {len(there)}")
        for name in names:
            files[below(root, name)] = there[name]
    roots = {root for root, _ in listings}
    return _listed(files, roots, num_left_out)


def _split_pattern(pattern: str, options: Mapping[str, Any] | None) -> tuple[str, str]:
    """The folder below which a glob looks, and the rest; folders may have glob signs in their names."""
    part = local_path(pattern) if is_local(pattern) else naming_part(pattern)
    pieces = part.split("/")
    end = 0
    while end < len(pieces) - 1 and (
        not has_glob_signs(pieces[end]) or _is_there("/".join(pieces[: end + 1]), pattern, part, options)
    ):
        end += 1
    root = "/".join(pieces[:end]) or "/"
    return (root if is_local(pattern) else pattern.replace(part, root, 1)), "/".join(pieces[end:])


def _is_there(folder: str, pattern: str, part: str, options: Mapping[str, Any] | None) -> bool:
    if is_local(pattern):
        return os.path.isdir(folder)
    fs, path = open_url(pattern.replace(part, folder, 1), options)
    with store_errors(pattern):
        return bool(fs.isdir(path))


def _listed(files: Files, roots: Iterable[str], num_left_out: int) -> LooseFiles:
    """Files by their URLs; what the folders that they were looked for in have in common is in no name."""
    common = len(common_folder(f"{root.rstrip('/')}/" for root in roots))
    names = list(map(identity_of, files))
    _check_keys(names)
    return _without_class(list(files), [len(name) - common for name in names], files.values(), num_left_out)


def _of_urls(urls: Sequence[str]) -> LooseFiles:
    """The files of a list of addresses over HTTP, each once."""
    names = {identity_of(url): url for url in urls}
    for name in names:
        if "?" in name or "#" in name:
            raise ValueError(
                f"loose files over HTTP must end in their names, as https://host/a.jpg does, got {name!r}; "
                "signatures may follow"
            )
    roots = {name.rpartition("/")[0] for name in names}
    return _listed(dict.fromkeys(names.values(), (UNKNOWN, "")), roots, 0)


def _check_keys(names: Iterable[str]) -> None:
    """Raise `ValueError` for files of different kinds that differ in their endings only.

    They look like the members of one sample, as in a tar. Two images of one name are two samples.
    """
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(key_of(name), name)
        if other != name and _kind(other) != _kind(name):
            raise ValueError(
                f"{printable_name(other)} and {printable_name(name)} differ in their endings only, and each "
                "file is a sample of its own: give a glob of one ending, or write what belongs together as "
                "tar shards (dataflow.ShardWriter)"
            )


def _kind(name: str) -> str:
    ending = ending_of(name)
    return KIND_OF.get(ending, ending)


# ---- what they have in common ----------------------------------------------------------------------------


def _loose(url: str, paths: Sequence[str], facts: Iterable[tuple[int, str]], num_left_out: int) -> LooseFiles:
    """The files at some paths below a folder, with sizes and versions."""
    prefix, _, suffix = below(local_path(url) if is_local(url) else url, "\0").partition("\0")
    urls = [f"{prefix}{path}{suffix}" for path in paths]
    return _without_class(urls, list(map(len, paths)), facts, num_left_out)


def _without_class(
    urls: list[str], name_lengths: Sequence[int], facts: Iterable[tuple[int, str]], num_left_out: int
) -> LooseFiles:
    sizes_versions = list(facts)
    return LooseFiles(
        urls=urls,
        sizes=np.array([size for size, _ in sizes_versions], np.int64),
        versions=[version for _, version in sizes_versions],
        name_lengths=np.array(name_lengths, np.int64),
        class_numbers=np.full(len(urls), NO_CLASS, np.int32),
        class_names=[],
        num_left_out=num_left_out,
    )


def _folders_in(url: str, options: Mapping[str, Any] | None) -> list[str]:
    """The names of the folders that lie in a folder, sorted."""
    with store_errors(url):
        if is_local(url):
            with os.scandir(local_path(url)) as entries:
                names = [entry.name for entry in entries if entry.is_dir()]
        else:
            fs, path = open_url(url, options)
            infos = fs.ls(path, detail=True)
            names = [file_name(info["name"]) for info in infos if info["type"] == "directory"]
    return sorted(name for name in names if not is_hidden(name))


def _split_of(name: str) -> str | None:
    """The split that a folder of this name holds; None: it is called like none."""
    return next((split for split, names in KEYWORDS.items() if name.lower() in names), None)
