"""The catalog of loose files: each is a shard of one block and one sample, as a listing had it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import Struct, structs
from numpy.typing import NDArray

from dataflow.progress.bar import ProgressBar
from dataflow.sources.folders import UNKNOWN
from dataflow.sources.indexing import REMOTE_INDEX_THREADS
from dataflow.sources.manifests import ManifestRows, first_missing
from dataflow.sources.opening import QUICK_S, OpenOptions, kept_catalog, save_catalog
from sharding.arrow_arrays import bytes_array, number_array, text_array
from sharding.blocks import DEFAULT_BLOCK_BYTES
from sharding.catalog.file import BLOCK_TYPE, COLUMNS
from sharding.catalog.storage import open_url, shard_info, version_of
from sharding.catalog.table import Catalog
from sharding.errors import ShardReadError
from sharding.formats.files import FilesFormat, all_facts, ending_of, rows_of, schema_of
from sharding.printable import printable_name
from sharding.redaction import identity_of


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
        kept = kept_catalog(path, places)
        if kept is not None and _is_listed_alike(kept, built):
            return kept.signed_by(built.locations)
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
            for number, found in zip(unknown, bar.each(pool.map(ask, opened_urls)), strict=True):
                if isinstance(found, ShardReadError):
                    failures.append(found)
                else:
                    sizes[number], versions[number] = found
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
            own = endings == ending
            sizes_of[ending] = int(self.sizes[own].min()), int(self.sizes[own].max())
            if not own.all():
                missing[ending] = int(own.argmin()), ""
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


def _is_listed_alike(kept: Catalog, built: Catalog) -> bool:
    """Return whether a kept catalog is of the very files that another one was built of."""
    listing = ["url", "size", "version", "footer", "blocks"]
    return (
        kept.format == built.format
        and list(kept.schemas) == list(built.schemas)
        and kept.rows.select(listing).equals(built.rows.select(listing))
    )


def _check_text(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{printable_name(name)} has a name that is not UTF-8: rename the file") from error
