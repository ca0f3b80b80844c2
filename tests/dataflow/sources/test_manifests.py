"""Manifests: which files a table means, what its columns become, and what is said where it cannot be."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets_kit import plain, rank
from pyarrow.compute import field

from dataflow import (
    CorruptShardError,
    DataLoader,
    Manifest,
    Optional,
    SampleError,
    ShardedDataset,
    ShardReadError,
)
from sharding.errors import ShardChangedError

FILES = {"a/1.jpg": b"one", "b/2 ü.jpg": b"two", "3.jpg": b"three"}
TABLE = (
    'file_name,label,caption,n,x,day\r\n"a/1.jpg",cat,"he said ""no"",\nü",7,,2026-01-02\r\n'
    "b/2 ü.jpg,dog,,8,0.5,2026-01-03\r\n./3.jpg,cat,c,9,1.5,2026-01-04\r\n"
    "a/1.jpg,dog,again,10,2,2026-01-05\r\n"
)
ROWS: list[dict[str, Any]] = [
    {"jpg": b"one", "label": "cat", "caption": 'he said "no",\nü', "n": 7, "x": -1.0, "day": "2026-01-02"},
    {"jpg": b"two", "label": "dog", "caption": "", "n": 8, "x": 0.5, "day": "2026-01-03"},
    {"jpg": b"three", "label": "cat", "caption": "c", "n": 9, "x": 1.5, "day": "2026-01-04"},
    {"jpg": b"one", "label": "dog", "caption": "again", "n": 10, "x": 2.0, "day": "2026-01-05"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_bytes(content)
    return tmp_path / "files"


def opened(source: Any, **more: Any) -> ShardedDataset[dict[str, Any]]:
    return ShardedDataset(source, **{"decode": {"jpg": None}, **more})


def rows(dataset: ShardedDataset[dict[str, Any]]) -> list[dict[str, Any]]:
    samples = [{name: plain(value) for name, value in dataset[i].items()} for i in range(len(dataset))]
    return [{name: bytes(v) if name == "jpg" else v for name, v in one.items()} for one in samples]


# ---- what they say ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_table_in_the_folder_names_the_samples_in_its_order_and_its_columns(
    mark: str, folder: Path
) -> None:
    (folder / "metadata.csv").write_text(mark + TABLE, newline="")
    decode = {"jpg": None, "x": Optional("auto", default=-1)}
    assert rows(opened(folder, decode=decode)) == ROWS
    assert rows(opened(folder / "metadata.csv", decode=decode)) == ROWS


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
def test_every_kind_of_table_says_the_same(ending: str, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / f"labels.{ending}"
    table = {"name": ["3.jpg", "a/1.jpg"], "label": ["x", "y"], "n": [1, 2]}
    if ending == "parquet":
        pq.write_table(pa.table(table), path)
    elif ending == "jsonl":
        path.write_text(
            '{"name": "3.jpg", "label": "x", "n": 1}\n\n{"n": 2, "label": "y", "name": "a/1.jpg"}'
        )
    else:
        comma = "," if ending == "csv" else "\t"
        path.write_text(
            "\n".join(comma.join(map(str, row)) for row in [table, *zip(*table.values(), strict=True)])
        )
    dataset = opened(folder, manifest=Manifest(path, file="name"))
    assert rows(dataset) == [{"jpg": b"three", "label": "x", "n": 1}, {"jpg": b"one", "label": "y", "n": 2}]


def test_nested_values_of_json_lines_and_lists_of_numbers_are_delivered(folder: Path) -> None:
    (folder / "m.jsonl").write_text(
        '{"file_name": "3.jpg", "boxes": [1, 2], "about": {"who": "me", "more": [{"a": 1}, null]}}\n'
        '{"file_name": "a/1.jpg", "boxes": [], "about": {"who": "you", "more": []}}\n'
    )
    dataset = opened(folder, manifest="m.jsonl")
    assert rows(dataset) == [
        {"jpg": b"three", "boxes": [1, 2], "about.who": "me", "about.more": [{"a": 1}, None]},
        {"jpg": b"one", "boxes": [], "about.who": "you", "about.more": []},
    ]
    with DataLoader(dataset, batch_size=2) as loader:
        batch = next(iter(loader))
    assert batch["boxes"].values.tolist() == [1, 2]
    assert batch["about.who"] == ["me", "you"]


@pytest.fixture
def splits(tmp_path: Path) -> Path:
    """Folders of splits, and above them a table with the rows of both."""
    names = [f"{('test', 'train', 'train')[n % 3]}/{n}.jpg" for n in range(9)]
    for n, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"%d" % n)
    rows = [
        f"{name},{'cat' if n % 2 else 'dog'},{n},{n / 2 if n % 3 else ''}" for n, name in enumerate(names)
    ]
    (tmp_path / "metadata.csv").write_text("\n".join(["file_name,label,n,x", *rows]))
    return tmp_path


def test_a_table_above_the_folders_of_splits_has_the_rows_of_each(splits: Path) -> None:
    files = fsspec.filesystem("memory")
    files.put(str(splits), "/above", recursive=True)
    for source in (splits, "memory://above"):
        for split, numbers in (("train", [1, 2, 4, 5, 7, 8]), ("test", [0, 3, 6])):
            dataset = opened(source, split=split, columns=["jpg", "n"])
            assert rows(dataset) == [{"jpg": b"%d" % n, "n": n} for n in numbers]
    with pytest.raises(ValueError, match=r"\(test, train\): name one.*or manifest='metadata.csv' for all"):
        opened(splits)
    assert len(opened(splits, manifest="metadata.csv")) == 9
    (splits / "metadata.csv").write_text(f"file_name,n\n{splits}/train/1.jpg,7\n./train/5.jpg,8")
    with pytest.warns(UserWarning, match="4 files such as .* have no row"):
        assert [row["n"] for row in rows(opened(splits, split="train", columns=["n"]))] == [7, 8]
    assert len(opened(splits, split="test")) == 3  # no row is about it
    (splits / "train" / "5.jpg").unlink()
    with pytest.raises(ShardReadError, match=r"row 2 names '5\.jpg'"):
        opened(splits, split="train")


@pytest.mark.reads_here
def test_a_filter_asks_for_values_of_the_table_and_reads_no_file(splits: Path) -> None:
    dataset = opened(splits, manifest=Manifest("metadata.csv", classes={"label": ["cat", "dog"]}))
    for path in splits.glob("*/[!58].jpg"):
        path.unlink()
    kept = dataset.filter(
        (field("n") > 4) & (field("label") == 0) | (field("n") == 8) & field("x").is_valid()
    )
    assert [row["n"] for row in rows(kept.filter((field("jpg", "size") == 1) & (field("n") != 7)))] == [5, 8]
    with DataLoader(kept.filter(field("n") != 7), batch_size=2, shuffle=False) as loader:
        assert [batch["n"].tolist() for batch in loader] == [[5, 8]]


def test_a_column_of_classes_is_numbers_whose_names_are_features(folder: Path) -> None:
    (folder / "metadata.csv").write_text(TABLE, newline="")
    dataset = opened(folder, manifest=Manifest("metadata.csv", classes="label"), columns=["label"])
    assert [row["label"] for row in rows(dataset)] == [0, 1, 0, 1]
    assert dataset.features == {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    given = Manifest("metadata.csv", classes={"label": ["dog", "owl", "cat"]})
    assert [row["label"] for row in rows(opened(folder, manifest=given, columns=["label"]))] == [2, 0, 2, 0]


def test_a_value_that_a_row_lacks_is_a_missing_one(folder: Path) -> None:
    (folder / "m.csv").write_text("file_name,n,none\n3.jpg,1,\na/1.jpg,,\n")
    dataset = opened(folder, manifest="m.csv")
    assert list(dataset.schema) == ["jpg", "n"]
    with pytest.raises(SampleError, match=r"column 'n'"), DataLoader(dataset, batch_size=1) as loader:
        list(loader)


def test_files_without_a_row_are_counted_and_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "metadata.csv").write_text("file_name,n\n3.jpg,1\n")
    text = r"2 files such as a/1\.jpg in .* have no row in .*metadata\.csv, and are left out"
    with pytest.warns(UserWarning, match=text):
        dataset = opened(folder)
    footer = dataset.catalog.rows.column("footer")[0].as_py()
    assert dataset.catalog.codec().num_passed_over(footer) == 3  # and the manifest
    with caplog.at_level(logging.INFO, "dataflow"):
        opened(folder, manifest="metadata.csv")
    assert "2 files such as a/1.jpg" in caplog.text


@pytest.mark.reads_here
def test_a_store_gives_the_same_samples_as_a_disk(folder: Path) -> None:
    (folder / "metadata.csv").write_text(TABLE, newline="")
    store = fsspec.filesystem("memory")
    for path in folder.rglob("*.*"):
        store.pipe(f"/manifest/{path.relative_to(folder)}", path.read_bytes())
    columns = ["__key__", "jpg", "caption", "n"]
    local = opened(folder, columns=columns)
    assert rows(opened("memory://manifest", columns=columns)) == rows(local)
    assert rows(opened("memory://manifest/metadata.csv", columns=columns)) == rows(local)
    given = opened("memory://manifest", manifest=folder / "metadata.csv", columns=columns)
    options: dict[str, Any] = {"batch_size": 2, "shuffle": True, "seed": 1}
    with DataLoader(given, **options) as one, DataLoader(local, **options) as other:
        assert [batch["n"].tolist() for batch in one] == [batch["n"].tolist() for batch in other]


def test_names_may_begin_with_the_folder(folder: Path) -> None:
    names = [f"{folder}/a/1.jpg", f"{folder}/./3.jpg", f"{folder}//a/1.jpg", ".//3.jpg"]
    (folder / "m.csv").write_text("\n".join(["file_name", *names]))
    assert [row["jpg"] for row in rows(opened(folder, manifest="m.csv"))] == [b"one", b"three"] * 2


def test_names_of_one_file_may_be_spelled_in_several_ways(folder: Path) -> None:
    (folder / "m.csv").write_text("file_name\na/1.jpg\na/./1.jpg\na//1.jpg\n././a/1.jpg\n")
    assert rows(opened(folder, manifest="m.csv")) == [{"jpg": b"one"}] * 4


def test_sizes_of_the_table_are_believed_until_a_file_is_read(folder: Path) -> None:
    (folder / "m.csv").write_text("file_name,bytes\n3.jpg,5\na/1.jpg,4\n")
    dataset = opened(folder, manifest=Manifest("m.csv", size="bytes"))
    assert rows(dataset.take(1)) == [{"jpg": b"three"}]
    with pytest.raises(ShardChangedError, match=r"a/1\.jpg.*its size is 3 bytes; it was 4"):
        dataset[1]


def test_a_loader_resumes_on_other_ranks_over_a_manifest_read_anew(tmp_path: Path) -> None:
    for n in range(23):
        (tmp_path / f"{n:02d}.jpg").write_bytes(b"%d" % n)
    table = "file_name,n\n" + "".join(f"{n % 20:02d}.jpg,{n}\n" for n in range(26, 3, -1))
    (tmp_path / "m.csv").write_text(table)
    options: dict[str, Any] = {"batch_size": 2, "shuffle": True, "seed": 3, "tail": "uneven"}
    with DataLoader(opened(tmp_path, manifest="m.csv"), **options, topology=rank(0, 1)) as loader:
        whole = [n for batch in loader for n in batch["n"].tolist()]
    with DataLoader(opened(tmp_path, manifest="m.csv"), **options, topology=rank(0, 1)) as loader:
        for _ in islice(loader, 4):
            pass
        state = loader.state_dict()
    rest = list[int]()
    for r in range(2):
        dataset = opened(tmp_path, manifest="m.csv")
        with DataLoader(dataset, **{**options, "batch_size": 1}, topology=rank(r, 2)) as loader:
            loader.load_state_dict(state)
            rest += [n for batch in loader for n in batch["n"].tolist()]
    assert sorted(whole) == list(range(4, 27))
    assert sorted(rest) == sorted(whole[8:])


def test_a_catalog_keeps_the_rows_and_is_made_anew_when_they_change(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "kept.catalog"
    for label in ("one", "two"):
        (folder / "m.csv").write_text(f"file_name,label\n3.jpg,{label}\n")
        assert rows(opened(folder, manifest="m.csv", catalog=path))[0]["label"] == label
        assert rows(opened(path)) == [{"jpg": b"three", "label": label}]


# ---- what is wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "error", "text"),
    [
        (b"", CorruptShardError, r"m\.csv.*the manifest is empty \(0 bytes\)"),
        (b"file_name,n\n", CorruptShardError, r"the manifest has no row"),
        (
            b"image,n\n3.jpg,1\n",
            ValueError,
            r"no column 'file_name' of file names; it has image, n: name the",
        ),
        (
            b"file_name,n\n3.jpg,1\ngone.jpg,2\nx.jpg,1",
            ShardReadError,
            r"row 2 names 'gone\.jpg', .*no such .*1 ot",
        ),
        (b"file_name\n../files/3.jpg\n", CorruptShardError, r"row 1 names '\.\./files.*leads out of"),
        (b"file_name\n.//../3.jpg\n", CorruptShardError, r"row 1 names '\.//\.\./3\.jpg'.*leads out of"),
        (b"file_name\n/etc/3.jpg\n", CorruptShardError, r"row 1 names '/etc/3\.jpg'.*leads out of"),
        (b"file_name\ns3://b/3.jpg\n", CorruptShardError, r"row 1 names 's3://b/3\.jpg'.*leads out of"),
        (b"file_name,n\n,1\n", CorruptShardError, r"row 1 names no file in column 'file_name'"),
        (b"file_name,n\n3.jpg,1,2\n", CorruptShardError, r"no table: .*Row #2: Expected 2 columns, got 3"),
        (b"file_name,n,n\n3.jpg,1,2\n", ValueError, r"has two columns 'n'"),
        (b"file_name,\xff\n3.jpg,1\n", CorruptShardError, r"the names of columns are no UTF-8 text"),
        (b"file_name,t\n3.jpg,\xff\n", CorruptShardError, r"column 't' of row 1 is no UTF-8 text"),
        ("file_name\n3.jpg".encode("utf-16"), CorruptShardError, r"UTF-16 text: save it as UTF-8"),
        (b'file_name,t\n3.jpg,"open\na/1.jpg,x\n', CorruptShardError, r"a quote \(\"\) that nothing closes"),
        (b"file_name,jpg\n3.jpg,1\n", ValueError, r"has a column 'jpg', as the column of files"),
        (
            b"file_name,__key__\n3.jpg,1\n",
            ValueError,
            r"has a column '__key__', a name that files cannot have",
        ),
        (b"file_name\nm\n", ShardReadError, r"row 1 names 'm'"),
    ],
)
def test_a_table_that_is_no_manifest_is_told_where_it_is_wrong(
    table: bytes, error: type[Exception], text: str, folder: Path
) -> None:
    (folder / "m.csv").write_bytes(table)
    with pytest.raises(error, match=f"(?s)m\\.csv.*{text}" if "m\\.csv" not in text else text):
        ShardedDataset(folder, manifest="m.csv")


# ---- dialects and exact values ------------------------------------------------------------------------


def column(folder: Path, cells: Sequence[str], ending: str = "csv", **dialect: Any) -> list[Any]:
    """What a column of a manifest with these cells is delivered as."""
    separator = dialect.get("separator") or {"csv": ",", "tsv": "\t"}[ending]
    lines = [separator.join(row) for row in [("file_name", "x"), *(("3.jpg", cell) for cell in cells)]]
    encoding = dialect.get("encoding", "utf-8")
    (folder / f"m.{ending}").write_bytes(("\n".join(lines) + "\n").encode(encoding))
    dataset = opened(
        folder, manifest=Manifest(folder / f"m.{ending}", **dialect), columns=["x"], decode="auto"
    )
    return [plain(dataset[i]["x"]) for i in range(len(cells))]


@pytest.mark.parametrize(
    ("cells", "dialect", "values"),
    [
        (["9007199254740993", "-5"], {}, [9007199254740993, -5]),
        (["9223372036854775808", "18446744073709551615", "1"], {}, [1 << 63, (1 << 64) - 1, 1]),
        (["1e3", "0.5"], {}, [1000.0, 0.5]),
        (["1", "2.5", "9007199254740992"], {}, [1.0, 2.5, 2.0**53]),
        (["10000000000000000000001", "5"], {"types": {"x": "text"}}, ["10000000000000000000001", "5"]),
        (["00501", "94110"], {"types": {"x": "text"}}, ["00501", "94110"]),
        (["1", "2"], {"types": {"x": "float"}}, [1.0, 2.0]),
        (["1", "300"], {"types": {"x": "uint16"}}, [1, 300]),
        (["NA", "", "null"], {"types": {"x": "text"}}, ["NA", "", "null"]),
        (["a,b", "ü"], {"separator": ";"}, ["a,b", "ü"]),
        (["'a,b'", "c"], {"quote": "'"}, ["a,b", "c"]),
        (['say "a"', '"'], {"quote": ""}, ['say "a"', '"']),
        (["ü", "é"], {"encoding": "latin-1"}, ["ü", "é"]),
        (["ü", "é"], {"encoding": "utf-16"}, ["ü", "é"]),
    ],
)
def test_cells_are_what_they_say(
    folder: Path, cells: list[str], dialect: dict[str, Any], values: list[Any]
) -> None:
    assert column(folder, cells, **dialect) == values


@pytest.mark.parametrize(
    "cells",
    [
        ["1" + 22 * "0", "5"],
        [str(1 << 63), "-1"],
        [str((1 << 53) + 1) * 2, "0.5"],
        [str((1 << 53) + 1), "0.5"],
    ],
)
def test_integers_that_nothing_holds_are_an_error_for_who_asks_for_them(
    folder: Path, cells: list[str]
) -> None:
    with pytest.raises(
        CorruptShardError, match=r"integer \d+ in row 1, which no type of 64 bits holds.*'text'"
    ):
        column(folder, cells)
    assert len(opened(folder, manifest="m.csv", columns=["jpg"])) == 2


def test_zeros_before_numbers_are_named_and_kept_as_text(folder: Path) -> None:
    with pytest.warns(UserWarning, match=r"numbers with zeros before them, such as '00501' in row 2"):
        assert column(folder, ["94110", "00501", "0"]) == [94110, 501, 0]
    manifest = Manifest(folder / "m.csv", classes="x", types={"x": "text"})
    assert opened(folder, manifest=manifest).features["x"]["names"] == ["0", "00501", "94110"]


def test_tabs_separate_cells_of_tsv_whatever_quotes_are_in_them(folder: Path) -> None:
    assert column(folder, ['"open', 'a "b" c', "d,e"], "tsv") == ['"open', 'a "b" c', "d,e"]
    assert column(folder, ['"a b"', "c"], "tsv", quote='"') == ["a b", "c"]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_the_header_shows_what_separates_cells(folder: Path, separator: str) -> None:
    (folder / "m.csv").write_text(TABLE.replace(",", separator), newline="")
    assert [row["n"] for row in rows(opened(folder, manifest="m.csv", columns=["n"]))] == [7, 8, 9, 10]


@pytest.mark.parametrize(
    ("ending", "dialect", "error", "text"),
    [
        ("csv", {"types": {"y": "text"}}, ValueError, "types names 'y', which"),
        (
            "csv",
            {"types": {"x": "number"}},
            ValueError,
            "'x' must be text, int, float or one of Arrow's types",
        ),
        ("csv", {"types": {"x": "int8"}}, CorruptShardError, "no table: .*int8.*types= of Manifest"),
        ("csv", {"encoding": "ascii"}, CorruptShardError, "no ascii text"),
        ("jsonl", {"separator": ";"}, ValueError, "separator, quote, encoding, types say how CSV and TSV"),
    ],
)
def test_a_dialect_that_does_not_fit_is_told(
    folder: Path, ending: str, dialect: dict[str, Any], error: type[Exception], text: str
) -> None:
    (folder / f"m.{ending}").write_text(
        "file_name,x\n3.jpg,300ü\n" if ending == "csv" else '{"file_name":"3.jpg"}'
    )
    with pytest.raises(error, match=text):
        opened(folder, manifest=Manifest(folder / f"m.{ending}", **dialect))


def test_columns_that_no_sample_can_have_refuse_who_asks_for_them_alone(folder: Path) -> None:
    table = {"file_name": ["3.jpg"], "bytes": [[b"a"]], "price": [Decimal("1.50")]}
    pq.write_table(pa.table(table), folder / "m.parquet")
    assert rows(opened(folder, manifest="m.parquet", columns=["jpg", "price"]))[0]["price"] == Decimal("1.50")
    with pytest.raises(CorruptShardError, match="column 'bytes' is list of bytes, and manifests have"):
        opened(folder, manifest="m.parquet")


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ('{"file_name": "3.jpg"}\n{"file_name": 3}', r"'file_name'"),
        ('{"file_name": "3.jpg"\n', r"m\.jsonl, byte 0"),
        ("\n", r"no row"),
    ],
)
def test_lines_that_are_no_manifest_are_told(lines: str, text: str, folder: Path) -> None:
    (folder / "m.jsonl").write_text(lines)
    with pytest.raises((ValueError, CorruptShardError), match=text):
        ShardedDataset(folder, manifest="m.jsonl")


def test_classes_that_are_not_text_or_not_among_the_names_are_told(folder: Path) -> None:
    (folder / "m.csv").write_text("file_name,label,n\n3.jpg,cat,1\na/1.jpg,,2\n")
    for classes, text in (
        ("n", r"classes must be a column of text, and 'n' of .* is int64"),
        ("gone", r"classes names 'gone'; the manifest .* has label, n"),
        ("label", r"row 2 of .*m\.csv has no class in column 'label'"),
        ({"label": ["dog"]}, r"row 1 of .* has class 'cat', none of dog"),
    ):
        with pytest.raises(ValueError, match=text):
            ShardedDataset(folder, manifest=Manifest("m.csv", classes=classes))


def test_a_manifest_that_is_not_there_or_means_nothing_is_told(folder: Path) -> None:
    with pytest.raises(ShardReadError, match=r"gone\.csv: no such file, nor is there .*files/gone\.csv"):
        ShardedDataset(folder, manifest="gone.csv")
    with pytest.raises(
        ValueError, match=r"a manifest must be a file that ends in csv, tsv.*got 'labels\.txt'"
    ):
        ShardedDataset(folder, manifest="labels.txt")
    (folder / "m.csv").write_text(TABLE)
    for more in ({"split": "train"}, {"format": "tar"}):
        with pytest.raises(ValueError, match=r"manifest="):
            ShardedDataset(folder, manifest="m.csv", **more)
    with pytest.raises(ValueError, match=r"manifest= is for one folder"):
        ShardedDataset([folder, folder], manifest="m.csv")
    for name in ("metadata.csv", "metadata.jsonl"):
        (folder / name).write_text("file_name\n3.jpg\n")
    with pytest.raises(ValueError, match=r"several manifests \(metadata\.csv, metadata\.jsonl\)"):
        ShardedDataset(folder)


def test_a_damaged_row_of_a_catalog_is_told(folder: Path) -> None:
    (folder / "m.csv").write_text("file_name,n\n3.jpg,1\n")
    codec = (catalog := opened(folder, manifest="m.csv").catalog).codec()
    block = catalog.block(0)
    for index in (b"\x81\xa1n\xc7\x08\x63" + bytes(8), b"\x81\xa1n\xd4\x04\0", b"\xc1", b"\x01"):
        with pytest.raises(ValueError, match=r"of type|unknown type|MessagePack|Expected"):
            codec.check(type(block)(**{**vars(block), "index": index}))


def test_a_folder_of_json_lines_called_like_a_manifest_is_shards_as_before(tmp_path: Path) -> None:
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "1.jpg", "n": 1}\n')
    assert [row["n"] for row in rows(ShardedDataset(tmp_path))] == [1]
