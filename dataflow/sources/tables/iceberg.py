"""The files of an Iceberg table at a snapshot: `pyiceberg` reads its metadata, over the table's own store.

Metadata names files by their full URLs, those of the place where the table was written. Below the table's
`location` they are looked for below the folder where the metadata lies, so that a copied table is whole.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.manifest import DataFile, FileFormat, ManifestContent
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import StaticTable, Table
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil
from pyiceberg.transforms import IdentityTransform

from dataflow.sources.listing.expand import ICEBERG_METADATA
from dataflow.sources.tables.files import TableVersion, below, name_of
from prefetch.store.small_files import SmallFiles
from sharding.compression import HEAD_BYTES, compression_in, open_decompressed
from sharding.errors import CorruptShardError, DataflowError, ShardReadError
from sharding.formats.tables.fitting import TableFile
from sharding.redaction import identity_of
from sharding.urls import is_http, is_local, leaves_folder, local_path

_VERSIONED = re.compile(r"(?:v(\d+)|(\d+)-[0-9a-fA-F-]+)(\.gz)?\.metadata\.json")
_THREADS = 16
_MOST_BYTES = 512 << 20
"""Bytes of metadata, at most, that a file in gzip holds."""
_DELETES = (
    "has rows that are deleted by delete files, which are not read: CALL system.rewrite_data_files with "
    "'delete-file-threshold' => '1' writes the files anew; open the snapshot that it makes"
)


class _Places:
    """Tells where the files of a table are."""

    def __init__(self, location: str, folder: str, *, may_leave: bool, name: str) -> None:
        self._location, self._folder = location.rstrip("/"), folder
        self._may_leave, self._name = may_leave, name

    def of(self, path: str) -> str:
        """The URL of a file that metadata names. `ShardReadError` for one that lies elsewhere."""
        rest = _one_scheme(path).removeprefix(f"{_one_scheme(self._location)}/")
        if rest != _one_scheme(path) and not leaves_folder(rest):
            return below(self._folder, rest)
        if self._may_leave and "::" not in path:
            return local_path(path) if is_local(path) else path
        raise ShardReadError(
            identity_of(self._folder),
            f"{self._name} names the file {path!r}, which lies outside its location {self._location!r}: open "
            "it through its catalog (iceberg://catalog/namespace.table), or rewrite its files",
        )


def _one_scheme(path: str) -> str:
    """The URL with one name for S3, and one for this machine's files."""
    scheme, colon, rest = path.partition(":")
    if not colon or scheme in ("s3", "s3a", "s3n"):
        return f"s3:{rest}" if colon else path
    return f"/{rest.lstrip('/')}" if scheme == "file" else path


class _StoredFile:
    """A file as pyiceberg takes it for an `InputFile`."""

    def __init__(self, location: str, store: SmallFiles, places: _Places) -> None:
        self.location = location
        self._store, self._places = store, places

    def open(self, seekable: bool = True) -> io.BytesIO:
        """Read all of it."""
        return io.BytesIO(self._store.read(self._places.of(self.location)))


class _StoreIO:
    """The files of a store, as pyiceberg takes them for a `FileIO`; it writes none."""

    def __init__(self, store: SmallFiles, places: _Places) -> None:
        self.properties: dict[str, str] = {}
        self._store, self._places = store, places

    def new_input(self, location: str) -> _StoredFile:
        """Return a file that metadata names."""
        return _StoredFile(location, self._store, self._places)


def open_iceberg(url: str, store: SmallFiles, revision: str | int | None) -> TableVersion:
    """An Iceberg table at a snapshot.

    Args:
        url: of its folder, or of a metadata file; or `iceberg://catalog/namespace.table`.
        store: reads it.
        revision: a snapshot's id, a branch or tag, or a time (ISO 8601) at which one was current; None: the
            current one.

    Raises:
        ValueError: there is no such snapshot, or it is no Iceberg table.
        ShardReadError: it cannot be read, has deletes, or names files outside of it.
        CorruptShardError: its metadata is damaged.
    """
    if url.startswith("iceberg://"):
        catalog_table = _from_catalog(url)
        metadata, folder, may_leave = catalog_table.metadata, catalog_table.metadata.location, True
        folder = local_path(folder) if is_local(folder) else folder
    else:
        file = url if url.endswith(".metadata.json") else _last_metadata(url, store)
        metadata = _parsed(store.read(file), file)
        folder, may_leave = _folder_of(file), False
    snapshot_id = _snapshot_of(metadata, revision, url)
    name = name_of("iceberg", url, str(snapshot_id))
    if snapshot_id is None:
        raise DataflowError(f"the Iceberg table {identity_of(url)} is empty: it has no snapshot")
    places = _Places(metadata.location, folder, may_leave=may_leave, name=name)
    table = StaticTable(
        identifier=("table",),
        metadata=metadata,
        metadata_location=url,
        io=_StoreIO(store, places),
        catalog=_no_catalog(),
    )
    try:
        files = _files(table, store, snapshot_id, places, name)
    except DataflowError:
        raise
    except Exception as error:  # avro files are decoded by code that raises whatever it meets
        raise CorruptShardError(
            identity_of(url),
            f"the manifests of {name} cannot be read by pyiceberg: {type(error).__name__}: {error}; restore "
            "them, or open another snapshot",
        ) from error
    return TableVersion(
        format="iceberg", url=url, version=str(snapshot_id), files=dict(sorted(files.items()))
    )


def _from_catalog(url: str) -> Table:
    from pyiceberg.catalog import load_catalog

    catalog, _, identifier = url.removeprefix("iceberg://").partition("/")
    if not catalog or "." not in identifier:
        raise ValueError(f"a table of a catalog is 'iceberg://catalog/namespace.table', got {url!r}")
    try:
        return load_catalog(catalog).load_table(identifier)
    except NoSuchTableError as error:
        raise ValueError(f"there is no table {identifier!r} in the catalog {catalog!r}: {error}") from error
    except Exception as error:
        raise ShardReadError(
            url, f"the catalog cannot be asked: {type(error).__name__}: {error}; see ~/.pyiceberg.yaml"
        ) from error


def _no_catalog() -> Any:
    from pyiceberg.catalog.noop import NoopCatalog

    return NoopCatalog("table")


def _last_metadata(url: str, store: SmallFiles) -> str:
    """The metadata file of a folder: what a hint says, else the one with the highest number."""
    if is_http(url):
        raise ValueError(
            f"folders cannot be listed over HTTP: give the metadata file, got {identity_of(url)!r}"
        )
    folder = below(url, ICEBERG_METADATA)
    names = store.names(folder)
    if "version-hint.text" in names:
        hint = store.read(below(folder, "version-hint.text")).decode(errors="replace").strip()
        for name in (hint, f"v{hint}.metadata.json", f"{hint}.metadata.json", f"v{hint}.gz.metadata.json"):
            if name in names and name.endswith(".metadata.json"):
                return below(folder, name)
    numbered = sorted(
        (int(match[1] or match[2]), name) for name in names if (match := _VERSIONED.fullmatch(name))
    )
    if not numbered:
        raise ValueError(f"{identity_of(url)} is no Iceberg table: no *.metadata.json in {ICEBERG_METADATA}/")
    last = [name for number, name in numbered if number == numbered[-1][0]]
    if len(last) > 1:
        raise ValueError(
            f"which metadata of {identity_of(url)} is current, only its catalog knows: {' and '.join(last)} "
            "have one number; give one of these files, or iceberg://catalog/namespace.table"
        )
    return below(folder, last[0])


def _folder_of(file: str) -> str:
    """The folder of a table by its metadata file, which lies in a folder of it."""
    part, _, rest = file.partition("?")
    if rest:
        raise ValueError(f"a metadata file with a query cannot be read: {identity_of(file)!r}")
    above = part.rsplit("/", 2)
    if len(above) < 3:
        raise ValueError(f"a metadata file lies in TABLE/{ICEBERG_METADATA}/, got {identity_of(file)!r}")
    return above[0]


def _parsed(content: bytes, url: str) -> TableMetadata:
    try:
        if compression_in(content[:HEAD_BYTES]) == "gzip":
            content = open_decompressed(
                io.BytesIO(content), identity_of(url), limit_bytes=_MOST_BYTES, kind="gzip"
            ).read()
        return TableMetadataUtil.parse_raw(content.decode())
    except Exception as error:  # pydantic's, zlib's, pyiceberg's own
        first = str(error).strip().splitlines()[0]
        raise CorruptShardError(
            identity_of(url), f"is no metadata of an Iceberg table: {type(error).__name__}: {first}"
        ) from error


def _snapshot_of(metadata: TableMetadata, revision: str | int | None, url: str) -> int | None:
    if revision is None:
        current: int | None = metadata.current_snapshot_id
        return current
    ids = [snapshot.snapshot_id for snapshot in metadata.snapshots]
    if isinstance(revision, int) or revision.isdigit():
        if int(revision) in ids:
            return int(revision)
    elif revision in metadata.refs:
        return int(metadata.refs[revision].snapshot_id)
    else:
        try:
            time = datetime.fromisoformat(revision)
        except ValueError:
            time = None
        if time is not None:
            time_ms = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1e3
            earlier = [entry for entry in metadata.snapshot_log if entry.timestamp_ms <= time_ms]
            if earlier and earlier[-1].snapshot_id in ids:
                return int(earlier[-1].snapshot_id)
            raise ValueError(f"revision={revision!r} is before the first snapshot of {identity_of(url)}")
    known = ", ".join([*map(str, ids[-5:]), *(ref for ref in metadata.refs if ref != "main")])
    raise ValueError(
        f"revision of an Iceberg table is a snapshot, a branch or tag, or a time such as "
        f"'2026-01-31T12:00:00Z'; {identity_of(url)} has {known or 'none'}, got {revision!r}"
    )


def _files(
    table: StaticTable, store: SmallFiles, snapshot_id: int, places: _Places, name: str
) -> dict[str, TableFile]:
    metadata = table.metadata
    snapshot = metadata.snapshot_by_id(snapshot_id)
    assert snapshot is not None
    folder = identity_of(table.metadata_location)
    manifests = snapshot.manifests(table.io)
    if any(one.content == ManifestContent.DELETES and one.has_existing_files() for one in manifests) or any(
        one.content == ManifestContent.DELETES and one.has_added_files() for one in manifests
    ):
        raise ShardReadError(folder, f"{name} {_DELETES}")
    schema = table.scan(snapshot_id=snapshot_id).projection()
    mapping = metadata.name_mapping()
    own_names = {field.field_id: list(field.names) for field in mapping.root} if mapping else {}
    columns = _arrow_schema(schema)
    stored_names = {
        field.name: own_names[field.field_id] for field in schema.fields if field.field_id in own_names
    }
    defaults = {
        field.name: _scalar(field.initial_default, columns.field(field.name).type)
        for field in schema.fields
        if getattr(field, "initial_default", None) is not None
    }
    specs = metadata.specs()
    files = {}
    # Not by `plan_files`: its threads stay, and workers could no longer be forked from this process.
    with store.retrier.pool(_THREADS, "dataflow-iceberg") as pool:
        entries = list(pool.map(lambda manifest: manifest.fetch_manifest_entry(table.io), manifests))
    for file in (entry.data_file for part in entries for entry in part):
        if file.file_format != FileFormat.PARQUET:
            raise ShardReadError(
                folder,
                f"{name} has files of {file.file_format.name}, and Parquet is read: set "
                "'write.format.default' to 'parquet' and CALL system.rewrite_data_files",
            )
        same = _partition_values(file, specs[file.spec_id], schema, columns)
        files[places.of(file.file_path)] = TableFile(
            table=name,
            schema=columns,
            size=file.file_size_in_bytes,
            num_rows=file.record_count,
            constants={},
            defaults={**defaults, **same},
            stored_names=stored_names,
            by_id=True,
        )
    return files


def _arrow_schema(schema: Schema) -> pa.Schema:
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    return pa.schema([field.with_nullable(True) for field in schema_to_pyarrow(schema)])


def _partition_values(
    file: DataFile, spec: PartitionSpec, schema: Schema, columns: pa.Schema
) -> Mapping[str, pa.Scalar]:
    """Return by column the value that all rows of a file have, where files are parted by the value itself."""
    values = {}
    for number, field in enumerate(spec.fields):
        if isinstance(field.transform, IdentityTransform):
            name = schema.find_column_name(field.source_id)
            if name in columns.names:
                values[name] = _scalar(file.partition[number], columns.field(name).type)
    return values


def _scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    """A value as metadata has it: times are integers."""
    if isinstance(value, int) and pa.types.is_temporal(kind):
        return pa.scalar(value, pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind)
    return pa.scalar(value, kind)
