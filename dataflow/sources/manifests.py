"""Manifests: tables that name files, with labels, captions or numbers for each.

A CSV, TSV, JSON Lines or Parquet file with a column of file names, as `metadata.csv` of Hugging Face's
ImageFolder. It is read whole, once: its columns are kept in the catalog, a row with each file
(`sharding.formats.files`). Which files there are, `dataflow.sources.loose` finds out.
"""

from __future__ import annotations

import io
import os
import posixpath
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import Struct
from numpy.typing import NDArray

from sharding.blocks import Block, Column, Columns, ColumnSpec, Masked, Shard, Spans, spec_text
from sharding.catalog.build import catalog_of
from sharding.catalog.storage import open_url, read_file, shard_info
from sharding.errors import CorruptShardError, ShardReadError
from sharding.formats.files import KEY_COLUMN, class_label
from sharding.formats.tables.separated import Dialect, read_separated
from sharding.printable import listed, printable_name
from sharding.redaction import identity_of
from sharding.urls import file_name, is_local, local_path, naming_part

ENDINGS = ("csv", "tsv", "jsonl", "ndjson", "json", "parquet")
_MOST_BYTES, _MOST_ROWS = (1 << 31) - 1, 50_000_000
_BYTE_ORDER_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_RESERVED = {KEY_COLUMN, "__url__"}


@dataclass(frozen=True)
class Manifest(Dialect):
    """A table that says which files a dataset consists of, and more about each: `ShardedDataset(manifest=)`.

    A row is a sample, in the order of the table; a file may have several rows. Its columns are delivered
    beside the file: numbers as tensors, text as text, nested values of JSON as Python objects.

    Args:
        path: a CSV, TSV, JSON Lines (`.jsonl`, `.json`) or Parquet file, anywhere; a relative path is also
            looked for in the folder of the files.
        file: the column of file names, relative to the folder.
        classes: a column of text that is delivered as class numbers; `dataset.features` has their names,
            which are sorted. A mapping of the column to a list of names fixes them: for several splits.
        size: the column of the files' bytes. "": the store is asked for them, by a request each over HTTP.
        separator: between cells of CSV and TSV; "": of CSV "," or ";" or a tab, as the header shows.
        quote: around cells with separators in them; "": none; None: '"' in CSV, none in TSV.
        encoding: of CSV and TSV.
        types: of columns of CSV and TSV: "text", "int", "float" or the name of one of Arrow's types.

    Raises:
        ValueError: an ending that is no manifest's.

    Examples:
        >>> import csv
        >>> with open("labels.csv", "w", newline="") as table:
        ...     csv.writer(table).writerows([("file", "label"), ("1.jpg", "cat"), ("2.jpg", "dog")])
        >>> manifest = Manifest("labels.csv", file="file", classes="label")
        >>> dataset = ShardedDataset("photos/", manifest=manifest)
        >>> dataset[1]["label"], dataset.features["label"]["names"]
        (1, ['cat', 'dog'])
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    file: str = "file_name"
    classes: str | Mapping[str, Sequence[str]] = ""
    size: str = ""

    def __post_init__(self) -> None:
        if ending_of_table(os.fspath(self.path)) not in ENDINGS:
            raise ValueError(
                f"a manifest must be a file that ends in {listed(ENDINGS)}, got {str(self.path)!r}"
            )
        if not isinstance(self.classes, str) and len(self.classes) != 1:
            raise ValueError(f"classes must be a column, or one with its names, got {self.classes!r}")


class ManifestRows(Struct, frozen=True, eq=False, kw_only=True):
    """The rows of a manifest, in its order."""

    url: str
    names: list[str]
    """[n] paths of the files below the folder, as the table has them."""
    columns: Columns
    """Name -> [n] values."""
    schema: dict[str, ColumnSpec]
    sizes: NDArray[np.int64] | None
    """[n] bytes of the files; None: the table does not say."""
    numbers: Sequence[int]
    """[n] rows of the table, from 1 on."""

    def told(self, row: int) -> str:
        """The name in a row, for messages."""
        return f"row {self.numbers[row]} names {printable_name(self.names[row])!r}"


def ending_of_table(url: str) -> str:
    """The ending of a file's name, in lower case."""
    return file_name(url).rpartition(".")[2].lower()


def folder_of(url: str) -> str:
    """The folder of a file, spelled as the file is."""
    part = naming_part(url)
    folder, slash, _ = part.rpartition("/")
    return url.replace(part, folder or slash or ".", 1)


def read_manifest(
    manifest: Manifest,
    folder: str,
    options: Mapping[str, Any] | None,
    *,
    within: str = "",
) -> ManifestRows | None:
    """Read a manifest of the files below a folder; None: no row is about a folder `within` it.

    Args:
        manifest: how it is to be read.
        folder: path or URL; a relative path of the manifest may lie below it.
        options: keyword arguments of the fsspec filesystem.
        within: a folder below that one, whose files alone count, by their names there.

    Raises:
        ShardReadError: it cannot be read.
        CorruptShardError: it breaks the rules of its kind, or is empty.
        ValueError: it has no such columns.
    """
    url = _found(os.fspath(manifest.path), folder, options)
    data = _read(url, options)
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if data.startswith(mark) and manifest.encoding == "utf-8":
            cure = f"save it as UTF-8, or give encoding={encoding!r}"
            raise CorruptShardError(url, f"the manifest is {encoding} text: {cure}")
    table = _table(url, data, manifest)
    names = table.column_names
    if manifest.file not in names:
        raise ValueError(
            f"the manifest {identity_of(url)} has no column {manifest.file!r} of file names; it has "
            f"{listed(names) or 'none'}: name the column, as in ShardedDataset(folder, "
            "manifest=Manifest(path, file='filename')), or take the table out of the folder"
        )
    twice = [name for name, count in Counter(names).items() if count > 1 and name]
    if twice:
        raise ValueError(f"the manifest {identity_of(url)} has two columns {twice[0]!r}: rename one")
    if not table.num_rows:
        raise CorruptShardError(url, "the manifest has no row")
    files = _texts(url, table.column(manifest.file), manifest.file)
    numbers = list(range(1, len(files) + 1))
    if within:
        paths = [_below(name, folder) for name in files]
        rows = [row for row, name in enumerate(paths) if name.startswith(f"{within}/")]
        if not rows:
            return None
        table, numbers = table.take(rows), [row + 1 for row in rows]
        files = [paths[row].removeprefix(f"{within}/") for row in rows]
    rest = [name for name in names if name and name not in (manifest.file, manifest.size)]
    columns, schema = _columns(url, table.select(rest))
    if manifest.classes:
        _number_classes(url, manifest.classes, columns, schema)
    sizes = _sizes(url, table, manifest.size) if manifest.size else None
    return ManifestRows(url=url, names=files, columns=columns, schema=schema, sizes=sizes, numbers=numbers)


def _found(path: str, folder: str, options: Mapping[str, Any] | None) -> str:
    """The manifest's URL: a relative path that is not there is one below the folder."""
    if not is_local(path):
        return path
    if os.path.exists(local := local_path(path)):
        return local
    if "://" in path or os.path.isabs(path):
        raise ShardReadError(local, "no such file")
    if is_local(folder):
        inside = os.path.join(local_path(folder), path)
        if os.path.exists(inside):
            return inside
        raise ShardReadError(local, f"no such file, nor is there {inside}")
    part = naming_part(folder)
    return folder.replace(part, f"{part.rstrip('/')}/{path}", 1)


def _read(url: str, options: Mapping[str, Any] | None) -> bytes:
    fs, path = open_url(url, options)
    if (size := shard_info(url, fs, path)["size"]) > _MOST_BYTES:
        raise CorruptShardError(url, f"a manifest has at most 2 GiB, and this is {size:,} bytes")
    return read_file(url, options)


# ---- tables ---------------------------------------------------------------------------------------------


def _table(url: str, data: bytes, manifest: Manifest) -> pa.Table:
    """The manifest as Arrow has it, structs not flattened."""
    ending = ending_of_table(url)
    if not data:
        raise CorruptShardError(url, "the manifest is empty (0 bytes)")
    if ending in ("csv", "tsv"):
        return read_separated(url, data, ending, manifest.file, manifest)
    if any(getattr(manifest, field.name) != getattr(Dialect(), field.name) for field in fields(Dialect)):
        names = ", ".join(field.name for field in fields(Dialect))
        raise ValueError(f"{names} say how CSV and TSV are written, and {identity_of(url)} is neither")
    return _parquet(url, data) if ending == "parquet" else _lines(url, data.removeprefix(b"\xef\xbb\xbf"))


def _parquet(url: str, data: bytes) -> pa.Table:
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(pa.BufferReader(data))
        facts = file.metadata
        nbytes = sum(facts.row_group(number).total_byte_size for number in range(facts.num_row_groups))
        if nbytes > _MOST_BYTES or facts.num_rows > _MOST_ROWS:
            raise CorruptShardError(
                url,
                f"a manifest has at most 2 GiB and {_MOST_ROWS:,} rows, and this has {nbytes:,} bytes and "
                f"{facts.num_rows:,} rows",
            )
        return file.read()
    except (pa.ArrowException, OSError) as error:
        raise CorruptShardError(url, f"the manifest is no Parquet file: {error}") from error


def _lines(url: str, data: bytes) -> pa.Table:
    """The lines as shards of JSON Lines have them."""
    from sharding.formats.arrow.jsonl import JsonlFormat

    codec, shard = JsonlFormat(), Shard(identity_of(url), len(data), "")
    scan = codec.scan(io.BytesIO(data), shard, block_bytes=len(data))
    if not len(scan.offset):
        raise CorruptShardError(url, "the manifest has no row")
    catalog, content = catalog_of([url], codec, [(shard, scan)], block_bytes=len(data)), memoryview(data)
    blocks = map(catalog.block, range(catalog.num_blocks))
    return pa.concat_tables(
        [codec.table(block, content[block.offset : block.offset + block.length], None) for block in blocks]
    )


def _texts(url: str, column: pa.ChunkedArray, name: str) -> list[str]:
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise ValueError(f"column {name!r} of {identity_of(url)} must be text, and is {column.type}")
    texts: list[str] = column.to_pylist()
    for row, text in enumerate(texts):
        if not text:
            raise CorruptShardError(url, f"row {row + 1} names no file in column {name!r}")
    return texts


def _sizes(url: str, table: pa.Table, name: str) -> NDArray[np.int64]:
    if name not in table.column_names:
        raise ValueError(
            f"the manifest {identity_of(url)} has no column {name!r} of sizes; it has "
            f"{listed(table.column_names)}"
        )
    column = table.column(name)
    if not pa.types.is_integer(column.type) or column.null_count:
        raise ValueError(f"column {name!r} of {identity_of(url)} must have the bytes of each file")
    sizes = np.array(column.to_pylist(), np.int64)
    if sizes.min() < 0:
        raise ValueError(f"column {name!r} of {identity_of(url)} has a size below 0")
    return sizes


# ---- columns --------------------------------------------------------------------------------------------


def _columns(url: str, table: pa.Table) -> tuple[Columns, dict[str, ColumnSpec]]:
    """The columns of a table as samples have them; those without any value are left out."""
    from sharding.formats.arrow.columns import columns_of, flattened
    from sharding.formats.arrow.json_types import PROBLEM
    from sharding.formats.arrow.schema import spec_of

    flat = flattened(table)
    block = Block(
        Shard(identity_of(url), 0, ""), 0, 0, 0, first_sample=0, first_in_shard=0,
        num_samples=table.num_rows, number=0, number_in_shard=0,
    )  # fmt: skip
    schema = dict[str, ColumnSpec]()
    for field in flat.schema:
        spec = spec_of(field.type)
        if spec is not None and spec.kind == "null":
            continue
        if spec is None or spec.kind not in ("fixed", "text", "json", "list") or spec.shape:
            what = str(field.type) if spec is None else spec_text(spec)
            reason = f"column {field.name!r} is {what}, and manifests have numbers, text, lists and JSON"
            note = (field.metadata or {}).get(PROBLEM, reason.encode()).decode()
            schema[field.name] = ColumnSpec("unreadable", note=f"{note}; columns= may leave it out")
            continue
        if field.name in _RESERVED or "/" in field.name:
            raise ValueError(
                f"the manifest {identity_of(url)} has a column {field.name!r}, a name that files cannot "
                "have: rename it"
            )
        schema[field.name] = spec
    columns = columns_of(flat, [name for name in schema if schema[name].kind != "unreadable"], block)
    for name, column in columns.items():
        if _lacks(column).any():
            schema[name] = replace(schema[name], optional=True)
        if isinstance(column, Spans):
            sizes = column.lengths[column.lengths >= 0]
            both = (int(sizes.min()), int(sizes.max())) if len(sizes) else (0, 0)
            schema[name] = replace(schema[name], size_range=both)
        elif column_dtype(column).kind not in "biuf":
            raise ValueError(f"column {name!r} of the manifest {identity_of(url)} is {column_dtype(column)}")
    return columns, schema


def column_dtype(column: Column) -> np.dtype[Any]:
    """The type of a column's numbers."""
    if isinstance(column, Spans):
        return column.buffer.dtype
    return column.values.dtype if isinstance(column, Masked) else column.dtype


def _lacks(column: Column) -> NDArray[np.bool_]:
    """[n] whether a row lacks its value."""
    if isinstance(column, Spans):
        return column.lengths < 0
    return column.lacks != 0 if isinstance(column, Masked) else np.zeros(len(column), np.bool_)


def first_missing(columns: Columns) -> dict[str, tuple[int, str]]:
    """Return the first row that lacks each column that any lacks, as `Catalog.missing` has it."""
    lacks = {name: _lacks(column) for name, column in columns.items()}
    return {name: (int(where.argmax()), "") for name, where in lacks.items() if where.any()}


def _number_classes(
    url: str,
    classes: str | Mapping[str, Sequence[str]],
    columns: Columns,
    schema: dict[str, ColumnSpec],
) -> None:
    """Put numbers in place of the names of classes."""
    name, names = (classes, None) if isinstance(classes, str) else next(iter(classes.items()))
    if name not in columns:
        raise ValueError(f"classes names {name!r}; the manifest {identity_of(url)} has {listed(columns)}")
    column = columns[name]
    if schema[name].kind != "text" or not isinstance(column, Spans):
        raise ValueError(
            f"classes must be a column of text, and {name!r} of {identity_of(url)} is "
            f"{spec_text(schema[name])}: numbers are delivered as they are, so leave classes= out, or give "
            f"types={{{name!r}: 'text'}}"
        )
    values = [
        column.value(row).tobytes().decode() if there else ""
        for row, there in enumerate((column.lengths >= 0).tolist())
    ]
    known = sorted({*values} - {""}) if names is None else list(names)
    number_of = {label: number for number, label in enumerate(known)}
    for row, value in enumerate(values):
        if value not in number_of:
            what = f"class {value!r}, none of {listed(known)}" if value else "no class"
            raise ValueError(f"row {row + 1} of {identity_of(url)} has {what} in column {name!r}")
    columns[name] = np.array([number_of[value] for value in values], np.int64)
    schema[name] = ColumnSpec("fixed", "int64", feature=class_label(known))


# ---- names ----------------------------------------------------------------------------------------------


def paths_of(rows: ManifestRows, folder: str) -> list[str]:
    """[n] the paths of the files below the folder.

    Raises `CorruptShardError` for a name that leads out of it.
    """
    root = local_path(folder) if is_local(folder) else folder
    paths = []
    for row, name in enumerate(rows.names):
        path = _below(name, folder)
        if path.startswith("/") or "://" in path or ".." in path.split("/") or "\0" in path:
            raise CorruptShardError(
                rows.url,
                f"{rows.told(row)}, which leads out of {identity_of(root)}: give the folder that all files "
                "are in, and names below it",
            )
        if "./" in path or "//" in path:
            path = posixpath.normpath(path)
        paths.append(path)
    return paths


def _below(name: str, folder: str) -> str:
    """A name that may be spelled with its folder, without it."""
    inside = name.removeprefix(local_path(folder).rstrip("/") + "/") if is_local(folder) else name
    inside = inside.removeprefix(folder.rstrip("/") + "/").removeprefix("./")
    return inside if inside == name else inside.lstrip("/")


def raise_absent(rows: ManifestRows, absent: Sequence[int], folder: str) -> None:
    """Raise `ShardReadError` where rows name files that are not there."""
    if not absent:
        return
    more = f" ({len(absent) - 1} other rows name files that are not there, too)" if len(absent) > 1 else ""
    raise ShardReadError(
        rows.url,
        f"{rows.told(absent[0])}, and {identity_of(folder)} has no such file{more}: correct the table, or "
        "give the folder in which its names begin",
    )
