"""The catalog of loose files: a folder of class folders, a folder of files, a glob, or a list of files.

A listing tells all that a catalog of them needs: names, sizes, versions. So nothing is opened, and a catalog
is kept only where `catalog=` says: whoever opens the files lists them again, as torchvision's `ImageFolder`
does, and knows at once what changed. Classes and the order of files are those of `ImageFolder`: classes are
the sorted names of folders, files come by class, folder and name. Links are followed as it follows them.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import Struct
from numpy.typing import NDArray

from sharding.blocks import DEFAULT_BLOCK_BYTES
from sharding.catalog.build import CATALOG_SUFFIX
from sharding.catalog.expand import braced
from sharding.catalog.file import BLOCK_TYPE, COLUMNS, text_column
from sharding.catalog.storage import VERSION_KEYS, open_url, store_errors, version_of
from sharding.catalog.table import Catalog
from sharding.errors import ShardReadError
from sharding.formats import format_of_suffix, has_suffix
from sharding.formats.files import NO_CLASS, FilesFormat, all_facts, ending_of, key_of, schema_of
from sharding.hub.names import is_hub
from sharding.printable import listed, printable_name
from sharding.redaction import identity_of
from sharding.urls import file_name, has_glob_signs, is_glob, is_http, is_local, local_path, naming_part

KINDS = {
    "images": ("jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp"),
    "sounds": ("wav", "flac", "mp3", "ogg", "opus", "m4a"),
    "videos": ("mp4", "mov", "mkv", "webm", "avi"),
}
"""Endings of files that are samples under `format="auto"`; images are those of torchvision."""
_KIND_OF = {ending: kind for kind, endings in KINDS.items() for ending in endings}
_KIND_ENDING = re.compile(rf"\.({'|'.join(_KIND_OF)}|{{({'|'.join(_KIND_OF)}|,)+}})$")
"""Ends names and patterns of such files, braces among them."""
_SPLITS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval"}
_NO_DATA = {"thumbs.db", "desktop.ini", "__macosx"}
_PER_SHARD = 100
"""Files of a kind for each shard that lies among them, at least: fewer are the pictures of a repository."""
_NAMED = 5

Entry = tuple[str, int, str]
"""Name, size and version of a file."""
Folders = dict[str, list[Entry]]
"""By path below a root ("": the root itself), the files of a folder."""


class LooseFiles(Struct, frozen=True, eq=False, kw_only=True):
    """Files in reading order, as a listing had them."""

    urls: list[str]
    sizes: NDArray[np.int64]
    versions: list[str]
    name_lengths: NDArray[np.int64]
    """[n] characters at the end of each URL that name the file below what was listed."""
    class_numbers: NDArray[np.int32]
    class_names: list[str]
    """Names of the classes by number; empty: the files have none."""
    num_left_out: int
    """Files and folders of the listing that are no samples."""

    def catalog(self, block_bytes: int = DEFAULT_BLOCK_BYTES) -> Catalog:
        """The catalog of the files, each a shard of one block and one sample."""
        names = [identity_of(url) for url in self.urls]
        for name in names:
            if not name.isascii():
                _check_text(name)
        endings = np.array([ending_of(url) for url in self.urls])
        sizes_of, missing = {}, {}
        for ending in np.unique(endings).tolist():
            own = endings == ending
            sizes_of[ending] = int(self.sizes[own].min()), int(self.sizes[own].max())
            if not own.all():
                missing[ending] = int(own.argmin()), ""
        catalog = Catalog(
            FilesFormat.name,
            {},
            block_bytes,
            [schema_of(sizes_of, self.class_names)],
            rows=self._rows(names),
            missing=missing,
        )
        return catalog.signed_by(self.urls)

    def _rows(self, names: Sequence[str]) -> pa.Table:
        n = len(names)
        facts = all_facts(self.class_numbers, self.name_lengths, self.num_left_out)
        offsets = np.arange(n + 1, dtype=np.int64)
        footers = [None, pa.py_buffer(offsets * facts.itemsize), pa.py_buffer(facts)]
        none = pa.nulls(n, pa.large_binary())
        sizes = pa.array(self.sizes)
        counts = [pa.array(np.zeros(n, np.int64)), sizes, sizes, pa.array(np.ones(n, np.int64))]
        blocks = pa.StructArray.from_arrays([*counts, none], fields=list(BLOCK_TYPE))
        columns = [
            text_column(names),
            sizes,
            text_column(self.versions),
            pa.LargeBinaryArray.from_buffers(pa.large_binary(), n, footers),
            pa.array(np.zeros(n, np.int32)),
            pa.LargeListArray.from_arrays(pa.array(offsets), blocks),
        ]
        return pa.Table.from_arrays(columns, schema=COLUMNS)


def find_loose(
    source: Any, options: Mapping[str, Any] | None = None, *, any_kind: bool = False
) -> LooseFiles | None:
    """The loose files that a source means; None: it means none.

    Args:
        source: a path, URL, glob, or a list of these.
        options: keyword arguments of the fsspec filesystem.
        any_kind: take files of every ending, of globs and folders; else images, sounds and videos.

    Raises:
        ShardReadError: nothing is there, links go in a circle, or a class has no file.
        ValueError: a folder of splits, two files of one name, or a name that is not UTF-8.
    """
    items = [source] if isinstance(source, (str, os.PathLike)) else source
    if not isinstance(items, (list, tuple)) or not items:
        return None
    texts = [os.fspath(item) for item in items if isinstance(item, (str, os.PathLike))]
    if len(texts) < len(items) or any(not isinstance(text, str) or is_http(text) for text in texts):
        return None
    if any(is_hub(text) or not text.endswith(naming_part(text)) for text in texts):
        return None
    patterns = [piece for text in texts for piece in braced(text, options)]
    if len(patterns) == 1 and _is_folder(patterns[0], options):
        return _of_folder(patterns[0], options, any_kind=any_kind)
    if any_kind or all(ending_of(file_name(pattern)) in _KIND_OF for pattern in patterns):
        return _of_patterns(patterns, options)
    return None


def may_be_loose(source: Any) -> bool:
    """Return whether a source may mean loose files, by its name and one listing of a folder of this machine.

    Whether a remote folder does, only its listing tells: the store is not asked for it here.
    """
    items = list(source) if isinstance(source, (list, tuple)) else [source]
    texts = [os.fspath(item) for item in items if isinstance(item, (str, os.PathLike))]
    if len(texts) == 1 and is_local(texts[0]) and os.path.isdir(path := local_path(texts[0])):
        return not any(has_suffix(name) and not name.startswith((".", "_")) for name in os.listdir(path))
    return bool(texts) and all(_KIND_ENDING.search(file_name(text).lower()) for text in texts)


def is_listed_alike(kept: Catalog, built: Catalog) -> bool:
    """Return whether a kept catalog is of the very files that another one was built of."""
    listing = ["url", "size", "version", "footer"]
    return (
        kept.format == built.format
        and list(kept.schemas) == list(built.schemas)
        and kept.rows.select(listing).equals(built.rows.select(listing))
    )


def _is_folder(url: str, options: Mapping[str, Any] | None) -> bool:
    if is_local(url):
        return os.path.isdir(local_path(url))
    if is_glob(url) or ending_of(file_name(url)) in _KIND_OF:
        return False
    fs, path = open_url(url, options)
    with store_errors(url):
        return bool(fs.isdir(path))


# ---- folders --------------------------------------------------------------------------------------------


def _of_folder(url: str, options: Mapping[str, Any] | None, *, any_kind: bool) -> LooseFiles | None:
    folders, num_hidden = _listing(url, options)
    is_sample = _chooser(folders, any_kind=any_kind)
    if is_sample is None:
        return None
    samples = {path: [one for one in files if is_sample(one[0])] for path, files in folders.items()}
    num_files = sum(map(len, folders.values())) + num_hidden
    top = sorted({path.partition("/")[0] for path in folders if path})
    filled = {path.partition("/")[0] for path, files in samples.items() if path and files}
    if not filled:
        files = [("", *one) for one in sorted(samples[""])]
        return _loose(url, files, [], [], num_files - len(files))
    if filled <= _SPLITS and not any(files for path, files in samples.items() if "/" not in path):
        one = next(name for name in top if name in filled)
        raise ValueError(
            f"{identity_of(url)} has a folder for each split ({listed(top)}): give one of them, such as "
            f"{identity_of(url).rstrip('/')}/{one}"
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
    if samples.get(""):
        first = printable_name(samples[""][0][0])
        warnings.warn(
            f"{len(samples[''])} files such as {first} lie in {identity_of(url)} beside the folders of "
            "classes, and are left out; give a glob such as '<folder>/**/*.jpg' to read all files, without "
            "classes",
            stacklevel=2,
        )
    by_class: dict[str, list[str]] = {name: [] for name in top}
    for path in samples:
        if path:
            by_class[path.partition("/")[0]].append(path)
    files, numbers = list[tuple[str, str, int, str]](), list[int]()
    for number, name in enumerate(top):
        for path in sorted(by_class[name]):
            files += ((path, *one) for one in sorted(samples[path]))
        numbers += [number] * (len(files) - len(numbers))
    return _loose(url, files, numbers, top, num_files - len(files))


def _chooser(folders: Folders, *, any_kind: bool) -> Callable[[str], bool] | None:
    """Return whether a file is a sample, by its name; None: the folder is not one of loose files."""
    if any_kind:
        return lambda name: ending_of(name) != ""
    endings = Counter(ending_of(name) for files in folders.values() for name, _, _ in files)
    kinds, num_in_shards = Counter[str](), 0
    for ending, count in endings.items():
        if ending in _KIND_OF:
            kinds[_KIND_OF[ending]] += count
        elif format_of_suffix("x." + ending):
            num_in_shards += count
    if not kinds or max(kinds.values()) <= _PER_SHARD * num_in_shards:
        return None
    wanted = KINDS[kinds.most_common(1)[0][0]]
    return lambda name: ending_of(name) in wanted


# ---- globs ----------------------------------------------------------------------------------------------


def _of_patterns(patterns: Sequence[str], options: Mapping[str, Any] | None) -> LooseFiles:
    """The files that match any of some patterns, in the order of the patterns, each once."""
    from fsspec.utils import glob_translate

    found: dict[str, tuple[int, str]] = {}
    listings: dict[tuple[str, int | None], dict[str, tuple[int, str]]] = {}
    num_left_out = 0
    for pattern in patterns:
        root, rest = _split_pattern(pattern, options)
        depth = None if "**" in rest else rest.count("/") + 1
        if (root, depth) not in listings:
            folders, num_hidden = _listing(root, options, depth=depth)
            num_left_out += num_hidden
            listings[root, depth] = {
                f"{path}/{one[0]}" if path else one[0]: one[1:]
                for path, files in folders.items()
                for one in files
                if ending_of(one[0])
            }
        there = listings[root, depth]
        is_match = re.compile(glob_translate(rest)).match
        names = [rest] if rest in there else sorted(filter(is_match, there))
        if not names:
            raise ShardReadError(pattern, f"no file matches this pattern among {len(there)}")
        for name in names:
            found[_below(root, name)] = there[name]
    roots = {root for root, _ in listings}
    return _listed(found, roots, num_left_out)


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


def _listed(found: Mapping[str, tuple[int, str]], roots: Collection[str], num_left_out: int) -> LooseFiles:
    urls = list(found)
    below = _common_length(roots)
    seen: dict[str, str] = {}
    for url in urls:
        key = key_of(url)
        if seen.setdefault(key, url) != url:
            raise ValueError(
                f"{identity_of(seen[key])} and {identity_of(url)} differ in their endings only, and each "
                "file is a sample of its own: give a glob of one ending, or write what belongs together as "
                "tar shards (dataflow.ShardWriter)"
            )
    return LooseFiles(
        urls=urls,
        sizes=np.array([size for size, _ in found.values()], np.int64),
        versions=[version for _, version in found.values()],
        name_lengths=np.array([len(url) for url in urls], np.int64) - below,
        class_numbers=np.full(len(urls), NO_CLASS, np.int32),
        class_names=[],
        num_left_out=num_left_out,
    )


def _common_length(roots: Collection[str]) -> int:
    """Characters of the folder that some folders have in common, and of the slash behind it."""
    paths = [root.rstrip("/").split("/") for root in roots]
    common = 0
    while all(len(path) > common and path[common] == paths[0][common] for path in paths):
        common += 1
    return len("/".join(paths[0][:common])) + 1


# ---- listings -------------------------------------------------------------------------------------------


def _listing(url: str, options: Mapping[str, Any] | None, *, depth: int | None = None) -> tuple[Folders, int]:
    """The files below a folder, `depth` levels deep, and how many hidden files and folders are left out."""
    with store_errors(url):
        if is_local(url):
            return _local_listing(local_path(url), depth)
        fs, root = open_url(url, options)
        return _remote_listing(fs, root, depth)


def _local_listing(root: str, depth: int | None) -> tuple[Folders, int]:
    folders, num_hidden = Folders(), 0
    status = os.stat(root)
    waiting: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", ((status.st_dev, status.st_ino),))]
    while waiting:
        path, above = waiting.pop()
        files = folders[path] = []
        with os.scandir(os.path.join(root, path)) as entries:
            for entry in entries:
                if is_hidden(entry.name):
                    num_hidden += 1
                elif entry.is_dir():
                    if depth is not None and len(above) >= depth:
                        continue
                    status = entry.stat()
                    own = status.st_dev, status.st_ino
                    if own in above:
                        reason = "is a link to a folder that it lies in: take the link away"
                        raise ShardReadError(entry.path, reason)
                    waiting.append((f"{path}/{entry.name}" if path else entry.name, (*above, own)))
                else:
                    files.append((entry.name, *_facts(entry)))
    return folders, num_hidden


def _facts(entry: os.DirEntry[str]) -> tuple[int, str]:
    try:
        status = entry.stat()
    except FileNotFoundError as error:
        what = "is a link to a file that is not there" if entry.is_symlink() else "no such file any more"
        raise ShardReadError(entry.path, what) from error
    return status.st_size, f"mtime:{status.st_mtime_ns}"


def _remote_listing(fs: Any, root: str, depth: int | None) -> tuple[Folders, int]:
    folders, num_hidden = Folders({"": []}), 0
    start = root.rstrip("/") + "/"
    version, is_checked = version_of, False
    for path, info in fs.find(root, maxdepth=depth, detail=True).items():
        name = path.removeprefix(start)
        if info["type"] == "directory" or path.endswith("/") or not path.startswith(start):
            continue
        *above, last = name.split("/")
        if any(map(is_hidden, [*above, last])):
            num_hidden += 1
        elif info.get("size") is None:
            raise ShardReadError(path, "the store does not say its size")
        else:
            if not is_checked and not _tell_alike(info, fs.info(path)):
                version = _no_version  # A read asks for its file alone, and would take it for another one.
            is_checked = True
            folders.setdefault("/".join(above), []).append((last, int(info["size"]), version(info)))
    return folders, num_hidden


def _tell_alike(listed_info: Mapping[str, Any], info: Mapping[str, Any]) -> bool:
    """Return whether a store says of a file alone what its listing said: some round times."""
    return all(listed_info.get(key) == info.get(key) for key in VERSION_KEYS)


def _no_version(info: Mapping[str, Any]) -> str:
    return ""


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is one that systems leave behind, and nobody's sample."""
    return name.startswith(".") or name.lower() in _NO_DATA or name.endswith(CATALOG_SUFFIX)


def _below(root: str, name: str) -> str:
    """The URL of a file by its path below a folder."""
    part = naming_part(root)
    return root.replace(part, f"{part.rstrip('/')}/{name}", 1)


def _check_text(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{printable_name(name)} has a name that is not UTF-8: rename the file") from error


def _loose(
    url: str,
    files: Sequence[tuple[str, str, int, str]],
    class_numbers: Sequence[int],
    class_names: list[str],
    num_left_out: int,
) -> LooseFiles:
    root = local_path(url) if is_local(url) else url
    prefix, _, suffix = _below(root, "\0").partition("\0")
    names = [f"{path}/{name}" if path else name for path, name, _, _ in files]
    return LooseFiles(
        urls=[f"{prefix}{name}{suffix}" for name in names],
        sizes=np.array([file[2] for file in files], np.int64),
        versions=[file[3] for file in files],
        name_lengths=np.array(list(map(len, names)), np.int64),
        class_numbers=np.array(class_numbers or [NO_CLASS] * len(names), np.int32),
        class_names=class_names,
        num_left_out=num_left_out,
    )
