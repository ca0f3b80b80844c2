"""The catalog of loose files, each a shard of one block and one sample, and the listing that has them.

Links are followed; hidden files and what systems leave behind are counted only.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from msgspec import Struct, structs
from numpy.typing import NDArray

from dataflow.progress.bar import ProgressBar
from dataflow.sources.indexing import REMOTE_INDEX_THREADS
from dataflow.sources.manifests import ManifestRows, first_missing
from dataflow.sources.opening import QUICK_S, OpenOptions, kept_catalog, save_catalog
from sharding.arrow_arrays import bytes_array, number_array, text_array
from sharding.blocks import DEFAULT_BLOCK_BYTES
from sharding.catalog.build import CATALOG_SUFFIX
from sharding.catalog.file import BLOCK_TYPE, COLUMNS
from sharding.catalog.storage import VERSION_KEYS, open_url, shard_info, store_errors, version_of
from sharding.catalog.table import Catalog
from sharding.errors import ShardReadError
from sharding.formats.files import FilesFormat, all_facts, ending_of, rows_of, schema_of
from sharding.printable import printable_name
from sharding.redaction import identity_of
from sharding.urls import is_http, is_local, local_path

UNKNOWN = -1
"""The size of a file that a listing does not tell, as pages of HTTP servers do not."""
_NO_DATA = {"thumbs.db", "desktop.ini", "__macosx"}

Files = dict[str, tuple[int, str]]
"""By path below a folder, the size (`UNKNOWN`: to be asked for) and version of a file."""


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
    numbering: str = ""
    """Tells classes that are numbered otherwise than the folder's own, sorted, would be."""
    num_left_out: int
    """Files and folders of the listing that are no samples."""
    manifest: ManifestRows | None = None
    """The rows of the manifest that names the files, in their order; None: none does."""

    def catalog_for(self, opening: OpenOptions) -> Catalog:
        """The catalog of the files, as a dataset is opened. One is kept where `catalog=` says."""
        files = self._sized(opening)
        built = files.catalog(opening.block_bytes)
        if opening.asked.catalog is None:
            return built
        path, places = os.fspath(opening.asked.catalog), opening.places
        catalog = kept_catalog(path, places)
        if catalog is not None and _is_listed_alike(catalog, built):
            return catalog.signed_by(built.locations)
        save_catalog(built, path, places.options, places.retrier)
        return built

    def _sized(self, opening: OpenOptions) -> LooseFiles:
        """The files with sizes and versions, for which the store is asked where no listing told them.

        Raises `ShardReadError` for the first that cannot be had; a note counts the others.
        """
        unknown = np.flatnonzero(self.sizes == UNKNOWN).tolist()
        if not unknown:
            return self
        retrier, options, title = opening.places.retrier, opening.places.options, "asking for sizes"

        def ask(opened: tuple[str, Any, str]) -> tuple[int, str] | ShardReadError:
            try:
                info = retrier(lambda: shard_info(*opened), opened[0])
            except ShardReadError as error:
                return error
            return int(info["size"]), version_of(info)

        sizes, versions, failures = self.sizes.copy(), list(self.versions), list[ShardReadError]()
        opened_urls = [(self.urls[number], *open_url(self.urls[number], options)) for number in unknown]
        with (
            ProgressBar(
                title, total=len(unknown), unit="file", visible=opening.progress, after_s=QUICK_S
            ) as bar,
            retrier.pool(REMOTE_INDEX_THREADS, "dataflow-index") as pool,
        ):
            for number, answer in zip(unknown, bar.each(pool.map(ask, opened_urls)), strict=True):
                if isinstance(answer, ShardReadError):
                    failures.append(answer)
                else:
                    sizes[number], versions[number] = answer
        if failures:
            if len(failures) > 1:
                failures[0].add_note(f"so it is with {len(failures) - 1} more of {len(unknown):,} files")
            raise failures[0]
        return structs.replace(self, sizes=sizes, versions=versions)

    def catalog(self, block_bytes: int = DEFAULT_BLOCK_BYTES) -> Catalog:
        """The catalog of the files, each a shard of one block and one sample."""
        names = [identity_of(url) for url in self.urls]
        for name in names:
            if not name.isascii():
                _check_text(name)
        endings = np.array([ending_of(name) for name in names])
        sizes_of, missing = {}, {}
        for ending in np.unique(endings).tolist():
            mask = endings == ending
            sizes_of[ending] = int(self.sizes[mask].min()), int(self.sizes[mask].max())
            if not mask.all():
                missing[ending] = int(mask.argmin()), ""
        schema = schema_of(sizes_of, self.class_names)
        if self.manifest is not None:
            if both := schema.keys() & self.manifest.schema.keys():
                raise ValueError(
                    f"the manifest {identity_of(self.manifest.url)} has a column {min(both)!r}, as the "
                    "column of files with that ending is called: rename it"
                )
            schema |= self.manifest.schema
            missing |= first_missing(self.manifest.columns)
        options, rows = FilesFormat(classes=self.numbering).options(), self._rows(names)
        catalog = Catalog(FilesFormat.name, options, block_bytes, [schema], rows=rows, missing=missing)
        return catalog.signed_by(self.urls)

    def _rows(self, names: Sequence[str]) -> pa.Table:
        n = len(names)
        facts = all_facts(self.class_numbers, self.name_lengths, self.num_left_out)
        offsets = np.arange(n + 1, dtype=np.int64)
        footers = [None, pa.py_buffer(offsets * facts.itemsize), pa.py_buffer(facts)]
        index = pa.nulls(n, pa.large_binary())
        if self.manifest is not None and self.manifest.columns:
            index = bytes_array(list(rows_of(self.manifest.columns, n)))
        sizes, zeros, ones = map(number_array, (self.sizes, np.zeros(n, np.int64), np.ones(n, np.int64)))
        counts = [zeros, sizes, sizes, ones]
        blocks = pa.StructArray.from_arrays([*counts, index], fields=list(BLOCK_TYPE))
        columns = [
            text_array(names),
            sizes,
            text_array(self.versions),
            pa.LargeBinaryArray.from_buffers(pa.large_binary(), n, footers),
            number_array(np.zeros(n, np.int32)),
            pa.LargeListArray.from_arrays(number_array(offsets), blocks),
        ]
        return pa.Table.from_arrays(columns, schema=COLUMNS)


def _is_listed_alike(catalog: Catalog, built: Catalog) -> bool:
    """Return whether a kept catalog is of the very files that another one was built of."""
    listing = ["url", "size", "version", "footer", "blocks"]
    return (
        catalog.format == built.format
        and list(catalog.schemas) == list(built.schemas)
        and catalog.rows.select(listing).equals(built.rows.select(listing))
    )


def _check_text(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{printable_name(name)} has a name that is not UTF-8: rename the file") from error


# ---- listings -------------------------------------------------------------------------------------------


class FolderListing(NamedTuple):
    """The contents of a folder."""

    files: Files
    folders: set[str]
    """The names of the folders that lie in it."""
    num_hidden: int
    """Hidden files and folders, which are left out."""


def listing(url: str, options: Mapping[str, Any] | None, *, depth: int | None = None) -> FolderListing:
    """The files below a folder, `depth` levels deep."""
    with store_errors(url):
        if is_local(url):
            return _local_listing(local_path(url), depth)
        fs, root = open_url(url, options)
        return _remote_listing(fs, root, depth)


def _local_listing(root: str, depth: int | None) -> FolderListing:
    files, folders, num_hidden = Files(), set[str](), 0
    status = os.stat(root)
    waiting: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", ((status.st_dev, status.st_ino),))]
    while waiting:
        path, above = waiting.pop()
        with os.scandir(os.path.join(root, path)) as entries:
            for entry in entries:
                name = f"{path}/{entry.name}" if path else entry.name
                if is_hidden(entry.name):
                    num_hidden += 1
                elif entry.is_dir():
                    if depth is not None and len(above) >= depth:
                        continue
                    status = entry.stat()
                    inode = status.st_dev, status.st_ino
                    if inode in above:
                        reason = "is a link to a folder that it lies in: take the link away"
                        raise ShardReadError(entry.path, reason)
                    waiting.append((name, (*above, inode)))
                    folders.add(name.partition("/")[0])
                elif (facts := _facts(entry)) is None:
                    num_hidden += 1
                else:
                    files[name] = facts
    return FolderListing(files, folders, num_hidden)


def _facts(entry: os.DirEntry[str]) -> tuple[int, str] | None:
    """Size and version of a file; None: it is a pipe, a socket or a device, which nobody reads by name."""
    try:
        status = entry.stat()
    except FileNotFoundError as error:
        what = "is a link to a file that is not there" if entry.is_symlink() else "no such file any more"
        raise ShardReadError(entry.path, what) from error
    return (status.st_size, f"mtime:{status.st_mtime_ns}") if stat.S_ISREG(status.st_mode) else None


def _remote_listing(fs: Any, root: str, depth: int | None) -> FolderListing:
    files, num_hidden = Files(), 0
    start, is_page = root.rstrip("/") + "/", is_http(root)
    is_checked, has_versions = False, True
    for path, info in fs.find(root, maxdepth=depth, detail=True).items():
        name = path.removeprefix(start)
        if info["type"] == "directory" or path.endswith("/") or not path.startswith(start):
            continue
        if is_page and ("?" in name or "#" in name):
            continue  # a link that sorts the page
        if any(map(is_hidden, name.split("/"))):
            num_hidden += 1
        elif info.get("size") is None:
            files[name] = UNKNOWN, ""
        else:
            if not is_checked:  # a read asks for its file alone, and would take it for another one
                alone, is_checked = fs.info(path), True
                has_versions = all(info.get(key) == alone.get(key) for key in VERSION_KEYS)
            files[name] = int(info["size"]), version_of(info) if has_versions else ""
    return FolderListing(files, {name.partition("/")[0] for name in files if "/" in name}, num_hidden)


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is one that systems leave behind, and nobody's sample."""
    return name.startswith(".") or name.lower() in _NO_DATA or name.endswith(CATALOG_SUFFIX)
