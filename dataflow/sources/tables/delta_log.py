"""Read the log of a Delta table with `deltalake`, in a process of its own, and hand it to the one that asked.

deltalake starts a dozen threads that stay as long as their process: in a training, workers could no longer be
forked from it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from msgspec import Struct


class Log(Struct, frozen=True, eq=False, kw_only=True):
    """A table at a version, as its log has it."""

    schema: pa.Schema
    files: pa.Table
    """A row for each file: "path", "size_bytes", "num_records", "partition"."""
    features: Sequence[str]
    """The features that it asks of its readers."""
    mapping: str
    """The mode of its column mapping: "none", "name" or "id"."""
    has_deletion_vectors: bool


def main(place: str, number: int, out: int) -> None:
    """Write the pickled `Log` of a table in a local folder, or the text of an error, to a file descriptor."""
    answer: Log | str
    try:
        answer = _read(place, number)
    except Exception as error:  # deltalake's, Arrow's, the system's: told by the parent
        answer = f"{type(error).__name__}: {error}".strip().partition("\n")[0]  # stacks follow
    with os.fdopen(out, "wb") as file:
        pickle.dump(answer, file)


def _read(place: str, number: int) -> Log:
    from deltalake import DeltaTable

    table = DeltaTable(place, version=number)
    features = table.protocol().reader_features or ()
    return Log(
        schema=pa.schema(table.schema()),
        files=pa.table(table.get_add_actions(flatten=False)),
        features=list(features),
        mapping=table.metadata().configuration.get("delta.columnMapping.mode", "none"),
        has_deletion_vectors="deletionVectors" in features and _has_deletion_vectors(table),
    )


def _has_deletion_vectors(table: Any) -> bool:
    from deltalake.exceptions import DeltaError

    try:
        return any(batch.num_rows for batch in table.deletion_vectors())
    except DeltaError:  # there are some, and they cannot be read here
        return True
