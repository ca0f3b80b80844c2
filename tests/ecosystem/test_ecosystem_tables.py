"""Delta and Iceberg tables at a version are read as their owners read them.

The fixtures were written by deltalake and pyiceberg; `expected.json` is what these read (`tests/fixtures`).
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner
from formats_kit import rows_of
from http_kit import RangeServer, s3_server, serving
from pyarrow.compute import field

from dataflow import Cache, DataflowError, DataLoader, Optional, ShardedDataset
from dataflow.tools.cli import main
from sharding.catalog.reading import ColumnReader
from sharding.errors import CorruptShardError, ShardReadError

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")

FIXTURES = Path(__file__).parents[1] / "fixtures"
DELTA, ICEBERG = FIXTURES / "delta", FIXTURES / "iceberg"
Rows = list[dict[str, Any]]
pytestmark = pytest.mark.usefixtures("own_cache")


def told(folder: Path) -> dict[str, dict[str, Rows]]:
    tables: dict[str, dict[str, Rows]] = json.loads((folder / "expected.json").read_text())
    return tables


VERSIONS = [
    (folder / name, version)
    for folder in (DELTA, ICEBERG)
    for name, versions in told(folder).items()
    if name not in ("vectors", "deleted")
    for version in versions
]


def stored_rows(dataset: ShardedDataset[Any]) -> Rows:
    """All rows as they are decoded, nulls and all."""
    catalog, codec = dataset.catalog, dataset.catalog.codec()
    reader = ColumnReader(catalog, codec, list(dataset.schema))
    blocks = []
    with closing(dataset.new_reader()) as store:
        for number in range(catalog.num_blocks):
            block = catalog.block(number)
            blocks.append(reader.decode(block, reader.read(block, store.read_into)))
    kinds = {name: spec.kind for name, spec in dataset.schema.items()}
    return [{name: _plain(value, kinds[name]) for name, value in row.items()} for row in rows_of(blocks)]


def _plain(value: Any, kind: str) -> Any:
    if value is None or kind == "fixed":
        return None if value != value else value
    if kind in ("list", "bytes_list"):
        return list(value)
    if kind == "json":
        return json.loads(value)
    return value.decode() if kind == "text" else {"bytes": value.hex()}


def in_order(rows: Rows) -> Rows:
    return sorted(
        [dict(sorted(row.items())) for row in rows], key=lambda row: json.dumps(row, sort_keys=True)
    )


@pytest.mark.parametrize(("table", "version"), VERSIONS, ids=lambda one: getattr(one, "name", one))
def test_rows_are_those_that_the_owner_reads(table: Path, version: str) -> None:
    dataset = ShardedDataset(table, revision=version)
    assert in_order(stored_rows(dataset)) == in_order(told(table.parent)[table.name][version])
    assert dataset.commit == version


def in_memory(table: Path) -> str:
    """A copy in a store."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    for path in table.rglob("*.*"):
        if path.is_file():
            files.pipe(f"/tables/{table.name}/{path.relative_to(table)}", path.read_bytes())
    return f"memory://tables/{table.name}"


@pytest.mark.parametrize("name", ["grown", "checkpointed"])
@pytest.mark.parametrize("has_revision", [False, True])
def test_a_delta_table_of_a_store_is_read_with_the_stores_own_reads(name: str, has_revision: bool) -> None:
    version, rows = list(told(DELTA)[name].items())[0 if has_revision else -1]
    dataset = ShardedDataset(in_memory(DELTA / name), revision=int(version) if has_revision else None)
    assert in_order(stored_rows(dataset)) == in_order(rows)


@pytest.mark.parametrize("source", ["{}", "{}/metadata/{}"])
def test_so_is_an_iceberg_table_by_its_folder_or_metadata(source: str) -> None:
    metadata = next(path.name for path in (ICEBERG / "grown" / "metadata").glob("*.metadata.json"))
    dataset = ShardedDataset(source.format(in_memory(ICEBERG / "grown"), metadata))
    assert in_order(stored_rows(dataset)) == in_order(list(told(ICEBERG)["grown"].values())[-1])


def test_tables_of_s3_are_read_with_the_options_of_its_filesystem() -> None:
    with s3_server() as server:
        for table in (DELTA / "grown", ICEBERG / "grown"):
            for path in filter(Path.is_file, table.rglob("*")):
                server.objects[f"lake/{table.parent.name}/{path.relative_to(table)}"] = path.read_bytes()
        for folder in (DELTA, ICEBERG):
            for options in ({}, {"revision": next(iter(told(folder)["grown"]))}):
                dataset = ShardedDataset(
                    f"s3://lake/{folder.name}", storage_options=server.options, **options
                )
                rows = told(folder)["grown"][dataset.commit]
                assert in_order(stored_rows(dataset)) == in_order(rows)


def test_an_iceberg_table_behind_http_is_read_by_its_metadata_file() -> None:
    metadata = next((ICEBERG / "grown" / "metadata").glob("*.metadata.json")).relative_to(ICEBERG)
    with serving(RangeServer(ICEBERG)) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        dataset = ShardedDataset(f"{url}/{metadata}")
        assert in_order(stored_rows(dataset)) == in_order(list(told(ICEBERG)["grown"].values())[-1])
        with pytest.raises(ValueError, match="give the metadata file"):
            ShardedDataset(f"{url}/grown", format="iceberg")
        with pytest.raises(ValueError, match="cannot be listed over HTTP"):
            ShardedDataset(f"{url}/grown", format="delta")


def test_versions_are_named_by_tags_and_times() -> None:
    first, last = told(ICEBERG)["grown"]
    assert ShardedDataset(ICEBERG / "grown", revision="first").commit == first
    assert ShardedDataset(ICEBERG / "grown", revision="2999-01-01T00:00:00Z").commit == last
    assert ShardedDataset(DELTA / "grown", revision="2999-01-01").commit == "1"
    with pytest.raises(ValueError, match="before the first"):
        ShardedDataset(ICEBERG / "grown", revision="1999-01-01")
    with pytest.raises(ValueError, match="before the first"):
        ShardedDataset(DELTA / "grown", revision="1999-01-01")


@pytest.mark.parametrize("table", [DELTA / "grown", ICEBERG / "grown"], ids=["delta", "iceberg"])
@pytest.mark.parametrize("revision", [7, "seven"])
def test_a_version_that_is_not_there_is_refused_with_those_that_are(table: Path, revision: Any) -> None:
    with pytest.raises(ValueError, match=r"0 to 1, got|a version such as|a branch or tag.* first, got"):
        ShardedDataset(table, revision=revision)


def test_a_loader_mixes_and_resumes_and_refuses_another_version() -> None:
    old, new = (
        ShardedDataset(
            DELTA / "grown", revision=v, columns=["id", "city", "day"], decode={"city": Optional()}
        )
        for v in (0, 1)
    )
    with DataLoader(new, batch_size=3, shuffle=True, seed=1) as loader:
        batches = iter(loader)
        ids = next(batches)["id"].tolist()
        state = json.loads(json.dumps(loader.state_dict()))
    with DataLoader(new, batch_size=3, shuffle=True, seed=1) as loader:
        loader.load_state_dict(state)
        ids += [number for batch in loader for number in batch["id"].tolist()]
    assert sorted(ids) == list(range(8))
    with (
        DataLoader(old, batch_size=3) as loader,
        pytest.raises(ValueError, match=r"with version 1, .* version 0: .*revision='1'"),
    ):
        loader.load_state_dict(state)


def test_a_filter_on_a_partition_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = ShardedDataset(DELTA / "grown")
    rows = told(DELTA)["grown"]["1"]

    def refuse(*_: Any) -> None:
        raise AssertionError("it read")

    with monkeypatch.context() as without_reads:
        without_reads.setattr("prefetch.store.reader.StoreReader.read_into", refuse)
        of_city = dataset.filter((field("city") == "Köln") & (field("year") == 2020))
        of_none = dataset.filter(field("city").is_null())
    assert len(of_city) == sum(row["city"] == "Köln" and row["year"] == 2020 for row in rows) == 2
    assert len(of_none) == sum(row["city"] is None for row in rows)
    assert len(dataset.filter(field("added") > 1)) == 1
    assert len(dataset.filter((field("id") > 3) & (field("city") != "z"))) == 2


def test_a_filter_sees_renamed_columns() -> None:
    dataset = ShardedDataset(ICEBERG / "grown")
    rows = list(told(ICEBERG)["grown"].values())[-1]
    assert len(dataset.filter(field("text") > 3)) == sum(row["text"] > 3 for row in rows)
    assert len(dataset.filter(field("caption") == "c")) == 1


def test_only_the_columns_asked_for_are_read_through_a_cache(tmp_path: Path) -> None:
    dataset = ShardedDataset(
        in_memory(DELTA / "mapped"),
        columns=["number", "town"],
        decode={"town": Optional()},
        cache=Cache(tmp_path / "cache"),
    )
    with DataLoader(dataset, batch_size=4) as loader:
        rows = [
            list(pair)
            for batch in loader
            for pair in zip(batch["number"].tolist(), batch["town"], strict=True)
        ]
    told_rows = told(DELTA)["mapped"]["0"]
    assert sorted(rows, key=str) == sorted(([row["number"], row["town"]] for row in told_rows), key=str)


def test_a_saved_catalog_knows_its_version(tmp_path: Path) -> None:
    path = str(tmp_path / "grown.catalog")
    first = ShardedDataset(DELTA / "grown", revision=0, catalog=path)
    again = ShardedDataset(path)
    assert (again.commit, again.fingerprint()) == ("0", first.fingerprint())
    assert stored_rows(again) == stored_rows(first)
    assert ShardedDataset(DELTA / "grown", revision=1, catalog=path).commit == "1"


def test_a_part_of_a_struct_and_a_partition_are_read_alone() -> None:
    dataset = ShardedDataset(ICEBERG / "grown", columns=["point.x", "year"])
    rows = list(told(ICEBERG)["grown"].values())[-1]
    with DataLoader(dataset, batch_size=8) as loader:
        (batch,) = list(loader)
    pairs = list(zip(batch["point.x"].tolist(), batch["year"].tolist(), strict=True))
    assert sorted(pairs) == sorted((row["point.x"], row["year"]) for row in rows)
    assert str(batch["year"].dtype) == "torch.int64"


def test_processes_build_batches_of_a_table() -> None:
    dataset = ShardedDataset(DELTA / "checkpointed", columns=["id"])
    with DataLoader(dataset, batch_size=2, workers="process", num_workers=1) as loader:
        ids = [number for batch in loader for number in batch["id"].tolist()]
    assert sorted(ids) == [row["id"] for row in told(DELTA)["checkpointed"]["3"]]


def test_tasks_on_an_engine_index_a_table(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.catalog") for number in range(2)]
    for path, more in zip(paths, ([], ["--on", "processes", "--workers", "1"]), strict=True):
        done = CliRunner().invoke(main, ["index", str(DELTA / "grown"), "--output", path, *more])
        assert done.exit_code == 0, done.output
    assert Path(paths[0]).read_bytes() == Path(paths[1]).read_bytes()


@pytest.mark.parametrize(("package", "table"), [("deltalake", DELTA), ("pyiceberg", ICEBERG)])
def test_a_package_that_is_missing_is_an_extra(
    package: str, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install 'dataflow-loader\[(delta|iceberg)\]'"):
        ShardedDataset(table / "grown")


@pytest.mark.parametrize("table", [DELTA / "grown", ICEBERG / "grown"], ids=["delta", "iceberg"])
def test_opening_a_table_leaves_no_thread(table: Path) -> None:
    """Otherwise workers could no longer be forked from this process."""
    before = {thread.name for thread in threading.enumerate()}
    ShardedDataset(table)
    assert {thread.name for thread in threading.enumerate()} <= before
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    assert not any("tokio" in name for name in names)  # deltalake's


@pytest.mark.parametrize("other", ["tar", "jsonl"])
def test_a_table_is_of_no_other_format(other: str) -> None:
    with pytest.raises(ValueError, match="is a delta table, whose log says which of its files count"):
        ShardedDataset(DELTA / "checkpointed", format=other)


@pytest.mark.parametrize("source", [["{}/grown", "{}/checkpointed"], "{}/{{grown,checkpointed}}"])
def test_several_tables_are_several_datasets(source: Any) -> None:
    named = [one.format(DELTA) for one in source] if isinstance(source, list) else source.format(DELTA)
    with pytest.raises(ValueError, match="open each table by itself, and mix them by a Mixture"):
        ShardedDataset(named)


def test_a_pattern_over_a_table_called_like_a_file_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DELTA / "checkpointed", tmp_path / "rows.parquet")
    with pytest.raises(ShardReadError, match=r"rows.parquet: is a delta table.*: give this folder"):
        ShardedDataset(f"{tmp_path}/*.parquet")
    assert len(ShardedDataset(tmp_path / "rows.parquet")) == 6


def test_files_of_a_table_may_be_named_themselves() -> None:
    glob = f"{DELTA / 'checkpointed'}/*.parquet"
    assert len(ShardedDataset(glob)) > len(ShardedDataset(DELTA / "checkpointed"))


def test_a_folder_called_metadata_makes_no_table(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pipe("/some/metadata/notes.txt", b"x")
    (tmp_path / "metadata").mkdir()
    for source in ("memory://some", str(tmp_path)):
        with pytest.raises(DataflowError, match=r"no shards|no data files"):
            ShardedDataset(source)
    with pytest.raises(ValueError, match="is no Iceberg table"):
        ShardedDataset(tmp_path, format="iceberg")
    with pytest.raises(ValueError, match="is no Delta table"):
        ShardedDataset("memory://some", format="delta")
    with pytest.raises(ValueError, match="revision= is for"):
        ShardedDataset(f"{DELTA / 'checkpointed'}/*.parquet", revision=3)


def test_the_command_line_indexes_and_inspects_a_table() -> None:
    runner = CliRunner()
    for _ in range(2):
        done = runner.invoke(main, ["index", str(DELTA / "grown"), "--revision", "0"])
        assert done.exit_code == 0, done.output
    assert "up to date" in done.output
    assert "delta" in runner.invoke(main, ["index", str(DELTA / "grown"), "--revision", "1"]).output
    assert runner.invoke(main, ["inspect", str(ICEBERG / "grown"), "--batch-size", "4"]).exit_code == 0


@pytest.mark.full
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_tables_that_the_owner_has_just_written_are_read_alike(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "iceberg":
        pytest.importorskip("sqlalchemy")
    monkeypatch.syspath_prepend(FIXTURES)
    import make_tables

    getattr(make_tables, kind)(tmp_path)
    for name, versions in told(tmp_path).items():
        if name not in ("vectors", "deleted"):
            for version, rows in versions.items():
                dataset = ShardedDataset(tmp_path / name, revision=version)
                assert in_order(stored_rows(dataset)) == in_order(rows)


def test_a_table_of_a_catalog_may_have_files_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sqlalchemy")
    import pyarrow as pa
    from pyiceberg.catalog import load_catalog
    from pyiceberg.utils.config import Config

    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{tmp_path}/lake.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE", f"file://{tmp_path}/lake")
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    catalog = load_catalog("lake")
    catalog.create_namespace("raw")
    rows = pa.table({"id": [1, 2, 3]})
    elsewhere = {"write.data.path": f"file://{tmp_path}/elsewhere"}
    catalog.create_table("raw.events", rows.schema, properties=elsewhere).append(rows)
    dataset = ShardedDataset("iceberg://lake/raw.events")
    assert [sample["id"] for sample in dataset] == [1, 2, 3]
    assert "/elsewhere/" in dataset.catalog.urls[0]
    metadata = catalog.load_table("raw.events").metadata_location
    with pytest.raises(ShardReadError, match="open it through its catalog"):
        ShardedDataset(metadata)
    with pytest.raises(ValueError, match=r"no table 'raw\.none' in the catalog 'lake'"):
        ShardedDataset("iceberg://lake/raw.none")


def test_a_catalog_that_cannot_be_asked_is_named() -> None:
    with pytest.raises(ShardReadError, match="the catalog cannot be asked"):
        ShardedDataset("iceberg://nowhere/raw.events")
    with pytest.raises(ValueError, match=r"is 'iceberg://catalog/namespace\.table', got"):
        ShardedDataset("iceberg://nowhere")


# ---- what is refused ------------------------------------------------------------------------------------


def copied(table: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(table, tmp_path / table.name))


def log_of(table: Path, version: int = 0) -> Path:
    return table / "_delta_log" / f"{version:020d}.json"


def test_deletion_vectors_are_refused_with_the_cure() -> None:
    with pytest.raises(ShardReadError, match=r"deletion vectors.*REORG TABLE .* APPLY \(PURGE\)"):
        ShardedDataset(DELTA / "vectors")


def test_delete_files_are_refused_with_the_cure() -> None:
    with pytest.raises(ShardReadError, match=r"deleted by delete files.*rewrite_data_files"):
        ShardedDataset(ICEBERG / "deleted")


def test_tables_without_rows_say_so() -> None:
    with pytest.raises(DataflowError, match=r"Delta table .* is empty: it has no files"):
        ShardedDataset(DELTA / "empty")
    with pytest.raises(DataflowError, match=r"Iceberg table .* is empty: it has no snapshot"):
        ShardedDataset(ICEBERG / "empty")


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../other/x.parquet", "s3://other/x.parquet", "a//b.parquet"]
)
def test_files_outside_of_a_delta_table_are_refused(name: str, tmp_path: Path) -> None:
    def elsewhere(action: dict[str, Any]) -> None:
        if "add" in action:
            action["add"]["path"] = name

    table = edited(copied(DELTA / "checkpointed", tmp_path), elsewhere)
    with pytest.raises(ShardReadError, match="lies outside its folder, as in a shallow clone"):
        ShardedDataset(table, revision=0)


def edited(table: Path, edit: Callable[[dict[str, Any]], object], version: int = 0) -> Path:
    """The table, each of whose actions was edited."""
    log = log_of(table, version)
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        edit(action)
    log.write_text("".join(json.dumps(action) + "\n" for action in actions))
    return table


def test_columns_mapped_by_id_go_by_name_where_files_have_no_ids(tmp_path: Path) -> None:
    def by_id(action: dict[str, Any]) -> None:
        if "metaData" in action:
            action["metaData"]["configuration"]["delta.columnMapping.mode"] = "id"

    dataset = ShardedDataset(edited(copied(DELTA / "mapped", tmp_path), by_id))
    assert in_order(stored_rows(dataset)) == in_order(told(DELTA)["mapped"]["0"])


@pytest.mark.parametrize("feature", ["variantType", "ofTomorrow"])
def test_a_feature_that_readers_must_know_is_named(feature: str, tmp_path: Path) -> None:
    def needing(action: dict[str, Any]) -> None:
        if "protocol" in action:
            action["protocol"]["readerFeatures"] = ["columnMapping", feature]
            action["protocol"]["writerFeatures"] = ["columnMapping", feature]

    with pytest.raises((ShardReadError, CorruptShardError), match=f"(?i){feature}"):
        ShardedDataset(edited(copied(DELTA / "mapped", tmp_path), needing))


def test_a_process_that_ends_while_it_reads_a_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataflow.sources.tables.delta._START", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ShardReadError, match="process with deltalake ended with code -9, maybe for want of"):
        ShardedDataset(DELTA / "grown")


def test_files_outside_of_an_iceberg_table_are_refused(tmp_path: Path) -> None:
    table = copied(ICEBERG / "grown", tmp_path)
    metadata = next((table / "metadata").glob("*.metadata.json"))
    value = json.loads(metadata.read_text())
    value["location"] = "file:///elsewhere"
    metadata.write_text(json.dumps(value))
    with pytest.raises(ShardReadError, match="lies outside its location"):
        ShardedDataset(table)


# ---- damage ---------------------------------------------------------------------------------------------


def parquet_files(table: Path) -> list[Path]:
    return sorted(path for path in table.rglob("*.parquet") if "_delta_log" not in path.parts)


@pytest.mark.parametrize("table", [DELTA / "grown", ICEBERG / "grown"], ids=["delta", "iceberg"])
def test_a_file_that_is_gone_is_named_with_what_may_have_taken_it(table: Path, tmp_path: Path) -> None:
    table = copied(table, tmp_path)
    gone = parquet_files(table)[2]
    gone.unlink()
    with pytest.raises(ShardReadError, match=r"no such file, which .* lists: vacuum") as raised:
        ShardedDataset(table)
    assert raised.value.shard == str(gone)


@pytest.mark.parametrize("table", [DELTA / "grown", ICEBERG / "grown"], ids=["delta", "iceberg"])
def test_a_file_of_another_size_is_named(table: Path, tmp_path: Path) -> None:
    table = copied(table, tmp_path)
    cut = parquet_files(table)[0]
    cut.write_bytes(cut.read_bytes()[:-7])
    with pytest.raises(CorruptShardError, match=r"has [\d,]+ bytes, and .* says that it has") as raised:
        ShardedDataset(table)
    assert raised.value.shard == str(cut)


def test_files_that_were_swapped_are_found_by_size_or_rows(tmp_path: Path) -> None:
    table = copied(ICEBERG / "hive", tmp_path)
    one, other = parquet_files(table)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    with pytest.raises(CorruptShardError, match="says that it has"):
        ShardedDataset(table)


@pytest.mark.parametrize("content", [b"", b"{", b'{"add": {}}\n', b"\xff\xfe"])
def test_a_damaged_commit_names_the_log(content: bytes, tmp_path: Path) -> None:
    table = copied(DELTA / "grown", tmp_path)
    log_of(table).write_bytes(content)
    with pytest.raises((CorruptShardError, DataflowError), match=r"_delta_log|empty"):
        ShardedDataset(table, revision=0)


def test_a_damaged_checkpoint_names_the_log(tmp_path: Path) -> None:
    table = copied(DELTA / "checkpointed", tmp_path)
    checkpoint = next(table.glob("_delta_log/*.checkpoint.parquet"))
    checkpoint.write_bytes(checkpoint.read_bytes()[:2000])
    with pytest.raises(CorruptShardError, match="cannot be read from its log by deltalake"):
        ShardedDataset(table)


@pytest.mark.parametrize("which", ["*.metadata.json", "snap-*.avro", "*-m0.avro"])
def test_damaged_metadata_of_iceberg_is_named(which: str, tmp_path: Path) -> None:
    table = copied(ICEBERG / "grown", tmp_path)
    for path in (table / "metadata").glob(which):
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(
        CorruptShardError, match=r"no metadata of an Iceberg table|cannot be read by pyiceberg"
    ):
        ShardedDataset(table)


def compressed(table: Path) -> Path:
    """The metadata of a table, as `write.metadata.compression-codec=gzip` has it written."""
    plain = next((table / "metadata").glob("*.metadata.json"))
    packed = plain.with_name(plain.name.replace(".metadata.json", ".gz.metadata.json"))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return packed


def test_metadata_of_iceberg_may_be_compressed(tmp_path: Path) -> None:
    table = copied(ICEBERG / "grown", tmp_path)
    compressed(table)
    assert stored_rows(ShardedDataset(table)) == stored_rows(ShardedDataset(ICEBERG / "grown"))


@pytest.mark.parametrize("damage", ["cut", "bomb"])
def test_compressed_metadata_that_is_cut_or_expands_without_end_is_named(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = copied(ICEBERG / "grown", tmp_path)
    packed = compressed(table)
    if damage == "cut":
        packed.write_bytes(packed.read_bytes()[:1000])
    else:
        monkeypatch.setattr("dataflow.sources.tables.iceberg._MOST_BYTES", 1 << 20)
        packed.write_bytes(gzip.compress(b" " * (2 << 20)))
    with pytest.raises(CorruptShardError, match=r"decompresses to more|is no metadata") as raised:
        ShardedDataset(table)
    assert raised.value.shard == str(packed)


def test_a_manifest_that_is_gone_is_named(tmp_path: Path) -> None:
    table = copied(ICEBERG / "grown", tmp_path)
    gone = next((table / "metadata").glob("snap-*.avro"))
    for path in (table / "metadata").glob("*.avro"):
        path.unlink()
    with pytest.raises(ShardReadError, match="no such file") as raised:
        ShardedDataset(table)
    assert raised.value.shard.startswith(str(gone.parent))
