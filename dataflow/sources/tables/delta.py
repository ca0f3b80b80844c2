"""The files of a Delta table at a version: its log is read by `deltalake`, here or as a copy of its end.

A log on another machine is copied to a temporary folder from the last checkpoint on, by the store's own
reads: deltalake would ask the store with other credentials, and without our patience.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from dataflow.sources.listing.expand import DELTA_LOG
from dataflow.sources.tables.delta_log import Log
from dataflow.sources.tables.files import TableVersion, below, name_of
from prefetch.store.small_files import SmallFiles
from sharding.catalog.storage import version_of
from sharding.errors import CorruptShardError, ShardReadError
from sharding.formats.tables.fitting import FIELD_ID, TableFile
from sharding.redaction import identity_of
from sharding.urls import is_http, is_local, leaves_folder

_CHECKPOINT = ".checkpoint"
_WITH_SIDECARS = re.compile(r"\.checkpoint\.[0-9a-f-]{36}\.")
_LOGGED = re.compile(r"(\d{20})(\.json|\.checkpoint(\.\d{10}\.\d{10}|\.[0-9a-f-]{36})?\.(parquet|json))")
"""Names of commits and checkpoints in a log."""
_FEATURES = {
    "appendOnly",
    "columnMapping",
    "deletionVectors",
    "domainMetadata",
    "inCommitTimestamp",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
"""The features that a table may ask of its readers, so that files are still to be read as they are."""
_THREADS = 16
_LONGEST_S = 900.0
"""Seconds that reading a log may take."""
_SAID = 500
"""The characters of what that process said at last that an error shows."""
_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from dataflow.sources.tables.delta_log import main; main({place!r}, {number}, {out})"
)


def open_delta(url: str, store: SmallFiles, revision: str | int | None) -> TableVersion:
    """A Delta table at a version: its number, or what was valid at a time (ISO 8601); None: the last one.

    Raises:
        ImportError: deltalake is not installed.
        ValueError: there is no such version, or it is no Delta table.
        ShardReadError: the log cannot be read, files have deletion vectors, or lie outside the table.
        CorruptShardError: the log is damaged.
    """
    if find_spec("deltalake") is None:
        raise ImportError(
            f"{identity_of(url)}: reading Delta tables needs another package: "
            "pip install 'dataflow-loader[delta]'"
        )
    if is_http(url):
        raise ValueError(f"a Delta log cannot be listed over HTTP, got {identity_of(url)!r}")
    folder = below(url, DELTA_LOG)
    names = store.names(folder)
    versions = {name: int(match[1]) for name in names if (match := _LOGGED.fullmatch(name))}
    if not versions:
        raise ValueError(f"{identity_of(url)} is no Delta table: it has no commits in {DELTA_LOG}/")
    number = _number_of(revision, url, names, versions)
    with _local_table(url, folder, store, versions, number) as place:
        log = _read_log(place, number, url)
    return _version(log, url, str(number))


def _number_of(
    revision: str | int | None,
    url: str,
    names: Mapping[str, Any],
    versions: Mapping[str, int],
) -> int:
    first, last = min(versions.values()), max(versions.values())
    if revision is None:
        return last
    if isinstance(revision, int) or revision.isdigit():
        if not first <= int(revision) <= last:
            raise ValueError(
                f"revision must be a version of {identity_of(url)}, whose log has {first} to {last}, got "
                f"{revision!r}"
            )
        return int(revision)
    try:
        time = datetime.fromisoformat(revision)
    except ValueError as error:
        raise ValueError(
            f"revision of a Delta table is a version such as 3, or a time such as '2026-01-31T12:00:00Z', "
            f"got {revision!r}"
        ) from error
    time_ns = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1e9
    commits = sorted((number, name) for name, number in versions.items() if _CHECKPOINT not in name)
    earlier = [number for number, name in commits if _time_ns(names[name]) <= time_ns]
    if not earlier:
        raise ValueError(f"revision={revision!r} is before the first commit in the log of {identity_of(url)}")
    return earlier[-1]


def _time_ns(info: Mapping[str, Any]) -> int:
    """The time at which a commit was written, as the store has it."""
    kind, _, value = version_of({key: info[key] for key in info if "tag" not in key.lower()}).partition(":")
    if kind != "mtime" or not value.isdigit():
        raise ValueError(f"the store does not say when {info['name']} was written: give a version's number")
    return int(value)


@contextmanager
def _local_table(
    url: str, folder: str, store: SmallFiles, versions: Mapping[str, int], number: int
) -> Iterator[str]:
    """A folder of this machine whose log has what the version is made of."""
    if is_local(url):
        yield url
        return
    before = [n for name, n in versions.items() if _CHECKPOINT in name and n <= number]
    names = [name for name, n in versions.items() if max(before, default=0) <= n <= number]
    sidecars = below(folder, "_sidecars")
    copies = {below(folder, name): name for name in names}
    if any(map(_WITH_SIDECARS.search, names)):
        copies |= {below(sidecars, name): f"_sidecars/{name}" for name in store.names(sidecars)}
    with tempfile.TemporaryDirectory(prefix="dataflow-delta-") as root:
        os.makedirs(os.path.join(root, DELTA_LOG, "_sidecars"))

        def copy(place: tuple[str, str]) -> None:
            content = store.read(place[0])
            with open(os.path.join(root, DELTA_LOG, place[1]), "wb") as file:
                file.write(content)

        with store.retrier.pool(_THREADS, "dataflow-delta") as pool:
            list(pool.map(copy, copies.items()))
        yield root


def _read_log(place: str, number: int, url: str) -> Log:
    """The log as deltalake reads it, in a process of its own: its threads outlive every call."""
    here = str(Path(__file__).parents[3])
    path = [here, *(entry or os.getcwd() for entry in sys.path if entry != here)]
    name = name_of("delta", url, str(number))
    with tempfile.TemporaryFile() as out:  # what else the process prints is none of the answer
        try:
            done = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    _START.format(path=path, place=place, number=number, out=out.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[out.fileno()],
                timeout=_LONGEST_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            reason = f"{name} was not read: deltalake took more than {_LONGEST_S:.0f} s for its log"
            raise ShardReadError(identity_of(url), reason) from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()[-_SAID:]
            raise ShardReadError(
                identity_of(url),
                f"{name} was not read: the process with deltalake ended with code {done.returncode}"
                + (f": {said}" if said else ", maybe for want of memory"),
            )
        out.seek(0)
        answer = pickle.load(out)
    if isinstance(answer, str):
        raise CorruptShardError(
            identity_of(below(url, DELTA_LOG)),
            f"{name} cannot be read from its log by deltalake: {answer}; restore the log, or open another "
            "version",
        )
    log: Log = answer
    return log


def _version(log: Log, url: str, version: str) -> TableVersion:
    name = name_of("delta", url, version)
    if unknown := sorted(set(log.features) - _FEATURES):
        raise ShardReadError(
            identity_of(url),
            f"{name} needs {', '.join(unknown)} of its readers, which is not read: write it without "
            "(CREATE TABLE ... AS SELECT)",
        )
    if log.has_deletion_vectors:
        raise ShardReadError(
            identity_of(url),
            f"{name} has rows that are deleted by deletion vectors, which are not read: REORG TABLE ... "
            "APPLY (PURGE) writes the files anew; open the version that it makes",
        )
    schema = _with_stored_names(log.schema)
    is_mapped = log.mapping in ("name", "id")
    stored_names = {field.name: [_physical(field)] for field in schema} if is_mapped else {}
    partition = log.files.column("partition") if "partition" in log.files.column_names else None
    facts = [log.files.column(key).to_pylist() for key in ("path", "size_bytes", "num_records")]
    files = {}
    for row, (path, size, num_rows) in enumerate(zip(*facts, strict=True)):
        values = {} if partition is None else partition[row]
        files[_inside(url, path, name)] = TableFile(
            table=name,
            schema=schema,
            size=size,
            num_rows=num_rows,
            constants={key: values[key].cast(schema.field(key).type) for key in values},
            stored_names=stored_names,
            by_id=log.mapping == "id",
        )
    return TableVersion(format="delta", url=url, version=version, files=dict(sorted(files.items())))


def _with_stored_names(schema: pa.Schema) -> pa.Schema:
    """The schema, whose fields have the ids that Delta maps columns by where Parquet has them."""
    fields = []
    for field in schema:
        number = (field.metadata or {}).get(b"delta.columnMapping.id")
        metadata = {**(field.metadata or {}), **({FIELD_ID: number} if number else {})}
        fields.append(field.with_metadata(metadata).with_nullable(True))
    return pa.schema(fields)


def _physical(field: pa.Field) -> str:
    name = (field.metadata or {}).get(b"delta.columnMapping.physicalName")
    return str(field.name) if name is None else str(name, "utf-8")


def _inside(url: str, path: str, name: str) -> str:
    """The URL of a file by its path in the log, which must stay in the table's folder."""
    path = unquote(path)
    if leaves_folder(path):
        raise ShardReadError(
            identity_of(url),
            f"{name} lists the file {path!r}, which lies outside its folder, as in a shallow clone: make a "
            "deep clone, or copy the table (CREATE TABLE ... AS SELECT)",
        )
    return below(url, path)
