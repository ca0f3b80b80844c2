"""What a source means: rows are asked in one order, few of them, and the first that claims it lists it."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from programs_kit import run_script

from dataflow import ShardedDataset, ShardReadError
from dataflow.sources.energon.folder import EnergonPart
from dataflow.sources.listing.claims import ROWS, Listing, SourceArguments, Spec, resolve, spec_of
from dataflow.sources.listing.places import Places
from prefetch.store.retrier import Retrier
from sharding.formats import ENTRIES, FormatEntry
from sharding.formats.tables.fitting import TableFile
from sharding.formats.tables.format import TableFormat

DOCS = Path(__file__).parents[3] / "docs/reference/formats.md"


def table(path: Path, *values: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"x": list(values)}), path)


def asked_of(source: Any, **given: Any) -> list[str]:
    """The names of the rows that are asked about a source, the one that claims it last."""
    asked = SourceArguments(**given)
    with Retrier() as retrier:
        places = Places({}, retrier)
        spec = spec_of(source, asked, places)
        rows = [row for row in ROWS if row.is_asked(spec, asked)]
        claimed = next(
            row
            for row in rows
            if (not row.folder or row.has_folder(spec, places)) and row.may_claim(spec, asked, places)
        )
    return [row.name for row in rows[: rows.index(claimed) + 1]]


@pytest.mark.parametrize(
    ("source", "given", "claimed"),
    [
        ("x.catalog", {}, "catalog"),
        ("hf://datasets/a/b", {}, "Hub"),
        ("x.tar", {}, "shards"),
        ("s3://bucket/x-{000..999}.tar", {}, "shards"),
        (["a.tar", "b.tar"], {}, "shards"),
        ("labels.csv", {}, "table"),
        ("lines.txt", {}, "text"),
        ("photos/**/*.jpg", {}, "files"),
        ("a.png", {}, "files"),
        ("x.tar", {"format": "files"}, "files"),
        ("x", {"manifest": "labels.csv"}, "manifest"),
        ("x", {"format": "lerobot"}, "LeRobot"),
        ("x", {"format": "energon"}, "Megatron-Energon"),
        (EnergonPart(path="x"), {}, "Megatron-Energon"),
        ("x", {"format": "delta"}, "Delta table"),
        ("iceberg://catalog.table", {}, "Iceberg table"),
        ("x/metadata/00.metadata.json", {}, "Iceberg table"),
        (".", {"split": "train"}, "files"),
        ("x", {"split": "train"}, "splits"),
        ("x", {"config": "one"}, "splits"),
        ("x", {"split": "train", "format": "parquet"}, "splits"),
    ],
)
def test_names_and_arguments_tell_first(source: Any, given: Any, claimed: str) -> None:
    assert asked_of(source, **given)[-1] == claimed


FOLDERS: dict[str, list[str]] = {
    "Megatron-Energon": [".nv-meta/.info.json", "_delta_log/0.json", "a.tar"],
    "Delta table": ["_delta_log/0.json", "metadata/0.metadata.json", "a.parquet"],
    "Iceberg table": ["metadata/0.metadata.json", "a.jpg"],
    "files": ["cat/a.jpg", "b.jpg"],
    "shards": ["a.parquet", "b.jpg"],
}
"""By the row that claims it, the files of a folder, those of rows behind it among them."""


@pytest.mark.parametrize("row", FOLDERS)
@pytest.mark.parametrize("place", ["here", "a store"])
def test_what_lies_in_a_folder_tells_then(row: str, place: str, tmp_path: Path) -> None:
    for name in FOLDERS[row]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    source = str(tmp_path)
    if place == "a store":
        source = f"memory:/{tmp_path}"
        for name in FOLDERS[row]:
            fsspec.filesystem("memory").put(str(tmp_path / name), f"{source}/{name}")
    assert asked_of(source)[-1] == row


def test_the_documented_table_is_the_one_that_is_asked() -> None:
    rows = re.findall(r"^\| \d+ \| \[?([^|\]]+?)(?:\]\(.*?\))? \|", DOCS.read_text(), re.MULTILINE)
    assert rows == list(dict.fromkeys(row.name for row in ROWS))


def test_a_plain_tar_asks_at_most_four_rows(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"")
    assert len(asked_of(str(tmp_path / "a.tar"))) <= 4


def test_a_folder_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table(tmp_path / "a.parquet", 1)
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path / "a.parquet"), f"{tmp_path}/a.parquet")
    asked = []
    for name in ("ls", "info", "find", "glob"):
        real = getattr(type(store), name)

        def counting(
            self: Any, path: str, *more: Any, real: Any = real, name: str = name, **options: Any
        ) -> Any:
            asked.append((name, path))
            return real(self, path, *more, **options)

        monkeypatch.setattr(type(store), name, counting)
    with Retrier() as retrier:
        assert len(resolve(f"memory:/{tmp_path}", SourceArguments(), Places({}, retrier)).urls) == 1
        assert [name for name, path in asked if path == str(tmp_path)] == ["info", "ls"]
        asked.clear()
        source = f"memory:/{tmp_path}/a.parquet"
        assert resolve(source, SourceArguments(), Places({}, retrier)).urls == [source]
    assert [name for name, _ in asked] == ["info"]  # whether it is a folder


def test_an_error_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.md").touch()
    (tmp_path / "sub").mkdir()
    fsspec.filesystem("memory").put(str(tmp_path / "notes.md"), f"{tmp_path}/notes.md")
    with pytest.raises(ShardReadError) as error:
        ShardedDataset(f"memory:/{tmp_path}")
    (note,) = error.value.__notes__
    for sign in (".nv-meta/", "_delta_log/", "metadata/*.metadata.json", "images, sounds, videos"):
        assert sign in note


def test_what_is_not_meant_is_not_imported(tmp_path: Path) -> None:
    table(tmp_path / "a.parquet", 1)
    program = (
        "import sys; from dataflow import ShardedDataset; ShardedDataset(sys.argv[1]); "
        "print([name for name in sys.modules if name.startswith('dataflow.sources')])"
    )
    code, text, _ = run_script(program, tmp_path / "a.parquet", how="forked", folder=tmp_path)
    assert code == 0
    for name in ("energon", "tables.delta", "tables.finding", "lerobot", "loose", "hub"):
        assert f"dataflow.sources.{name}'" not in text.replace("energon.folder", "energon")


# ---- a format of tables -----------------------------------------------------------------------------------


class TrialFormat(TableFormat):
    """The codec of a trial: a format's entry would name it."""

    name = "trial"


def claim_trial(spec: Spec, asked: SourceArguments, places: Places) -> Listing:
    """Files and values of partitions that a `table.json` lists."""
    listed = json.loads(places.files.read(f"{spec.text}/table.json"))
    columns = pa.schema([("x", pa.int64()), ("day", pa.string())])
    files = {
        f"{spec.text}/{name}": TableFile(
            table="a trial",
            schema=columns,
            size=None,
            constants={key: pa.scalar(value) for key, value in values.items()},
        )
        for name, values in listed.items()
    }
    return asked.listing(list(files), format=TrialFormat(version="1"), facts=files, table="a trial")


def test_a_format_of_tables_is_a_row_and_a_codec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataflow.sources.listing import claims

    table(tmp_path / "a.parquet", 1, 2)
    table(tmp_path / "b.parquet", 3)
    (tmp_path / "stale.parquet").touch()
    (tmp_path / "table.json").write_text(json.dumps({"a.parquet": {"day": "x"}, "b.parquet": {"day": "y"}}))
    trial = claims.Row(
        "trial", "table.json", f"{__name__}:claim_trial", ("folder",),
        may_claim=lambda spec, asked, places: "table.json" in places.names(spec.text),
    )  # fmt: skip
    # Two places: a row here, in dataflow/sources, and an entry in sharding/formats.
    monkeypatch.setattr(claims, "ROWS", (trial, *ROWS))
    entry = FormatEntry(where=f"{__name__}:TrialFormat", suffixes=(), options=("version",))
    monkeypatch.setitem(ENTRIES, "trial", entry)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    dataset = ShardedDataset(os.fspath(tmp_path))
    assert [dataset[i] for i in range(3)] == [
        {"x": 1, "day": "x"},
        {"x": 2, "day": "x"},
        {"x": 3, "day": "y"},
    ]
