"""A folder means what its writer meant: one split, one writing, the files that a list of its own names."""

from __future__ import annotations

import json
import uuid
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from datasets_kit import MAKERS, delivered, plain
from hypothesis import given, settings, strategies as st

from dataflow import DataLoader, Optional, SampleError, ShardedDataset, ShardReadError, ShardWriter
from dataflow.sources.listing.shards import shards_in, splits_in
from sharding.hub.layout import split_files


def parquet(path: Path, *values: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"x": list(values)}), path)


def arrow(path: Path, *values: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"x": list(values)})
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)


def saved(folder: Path, *names: str) -> None:
    """The list that `datasets.save_to_disk` writes."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_fingerprint": "0"}))


def xs(source: Any, **more: Any) -> list[int]:
    dataset = ShardedDataset(source, **more)
    return [int(dataset[i]["x"]) for i in range(len(dataset))]


# ---- splits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000-of-00001", "validation-00000-of-00001", "test-00000-of-00001"],
        ["train", "val", "test"],
        ["mnist_train", "mnist_dev", "mnist_eval"],
    ],
)
def test_a_folder_of_several_splits_is_an_error_that_names_them(names: list[str], tmp_path: Path) -> None:
    for number, name in enumerate(names):
        parquet(tmp_path / f"{name}.parquet", number)
    with pytest.raises(ValueError, match=r"splits \(train, validation, test\).*split='train'"):
        ShardedDataset(tmp_path)
    assert [xs(tmp_path, split=split) for split in ("train", "validation", "test")] == [[0], [1], [2]]
    assert sorted(xs(f"{tmp_path}/*.parquet")) == [0, 1, 2]  # a pattern is the user's word
    assert xs([f"{tmp_path}/{name}.parquet" for name in names]) == [0, 1, 2]


def test_a_folder_of_one_split_is_that_split(tmp_path: Path) -> None:
    parquet(tmp_path / "train-0.parquet", 1)
    parquet(tmp_path / "train-1.parquet", 2)
    assert xs(tmp_path) == [1, 2]
    parquet(tmp_path / "other.parquet", 0)
    with pytest.warns(UserWarning, match=r"'train-0.parquet', of the split 'train', and 1 shards of none"):
        assert xs(tmp_path) == [0, 1, 2]


def test_a_remote_folder_of_several_splits_is_an_error_too(tmp_path: Path) -> None:
    parquet(tmp_path / "train.parquet", 1)
    parquet(tmp_path / "test.parquet", 2)
    store = f"memory://{uuid.uuid4().hex}"
    fsspec.filesystem("memory").put(f"{tmp_path}/*.parquet", f"{store}/")
    with pytest.raises(ValueError, match=r"splits \(train, test\)"):
        ShardedDataset(store)
    assert xs(store, split="test") == [2]


WORDS = st.sampled_from(["train", "test", "dev", "eval", "x", "training", "trained", "-", "_", "0", "."])


@settings(max_examples=50)
@given(st.lists(st.lists(WORDS, min_size=1, max_size=4).map("".join), min_size=1, max_size=4, unique=True))
def test_splits_of_files_are_those_of_the_hub(stems: list[str]) -> None:
    names = sorted({f"a{stem}.parquet" if stem[0] in ".-_" else f"{stem}.parquet" for stem in stems})
    found = splits_in(names)
    if not found:
        assert split_files(names, [], where="it") == names
    for split, files in found.items():
        assert sorted(split_files(names, [], where="it", split=split)) == files


# ---- lists of their own ---------------------------------------------------------------------------------


def test_the_files_of_a_saved_dataset_are_those_that_its_state_names(tmp_path: Path) -> None:
    saved(tmp_path, "data-00000-of-00001.arrow")
    arrow(tmp_path / "data-00000-of-00001.arrow", 1, 2)
    arrow(tmp_path / "cache-0.arrow", 3)
    arrow(tmp_path / "data-00000-of-00002.arrow", 4)
    assert xs(tmp_path) == [1, 2]
    saved(tmp_path, "data-00001-of-00001.arrow")
    with pytest.raises(ShardReadError, match=r"data-00001-of-00001.arrow: no such file"):
        ShardedDataset(tmp_path)


def test_the_splits_of_a_saved_dict_are_those_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["first", "second"]}))
    for number, split in enumerate(("first", "second")):
        saved(tmp_path / split, "data-00000-of-00001.arrow")
        arrow(tmp_path / split / "data-00000-of-00001.arrow", number)
        arrow(tmp_path / split / "cache-1.arrow", 9)
        arrow(tmp_path / split / "data-00001-of-00002.arrow", 9)
    assert xs(tmp_path, split="second") == [1]
    with pytest.raises(ValueError, match=r"split must be one of first, second"):
        ShardedDataset(tmp_path)


def test_a_set_of_shards_that_is_not_whole_is_an_error(tmp_path: Path) -> None:
    parquet(tmp_path / "x-00001-of-00003.parquet", 1)
    with pytest.raises(ShardReadError, match=r"holds 1 shards x-\*-of-00003: 00000, 00002 are not"):
        ShardedDataset(tmp_path)
    parquet(tmp_path / "x-00000-of-00001.parquet", 0)
    with pytest.raises(ShardReadError, match=r"x-\*-of-00001 beside -of-00003, of two writings"):
        ShardedDataset(tmp_path)
    assert xs(f"{tmp_path}/x-*.parquet") == [0, 1]
    (tmp_path / "x-00001-of-00003.parquet").rename(tmp_path / "y-00000-of-00001.parquet")
    assert xs(tmp_path) == [0, 1]


# ---- files of several kinds -----------------------------------------------------------------------------


def test_the_format_chooses_among_files_of_several_kinds(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", 1)
    (tmp_path / "b.jsonl").write_text('{"x": 2}\n')
    with pytest.raises(ValueError, match="must have one format"):
        ShardedDataset(tmp_path)
    assert (xs(tmp_path, format="parquet"), xs(tmp_path, format="jsonl")) == ([1], [2])


def test_the_format_says_what_files_without_an_ending_are(tmp_path: Path) -> None:
    parquet(tmp_path / "t/000000_0", 1)
    parquet(tmp_path / "deep/label=a/000000_0", 2)
    (tmp_path / "t/_SUCCESS").touch()
    assert xs(tmp_path / "t", format="parquet") == [1]
    assert ShardedDataset(tmp_path / "deep", format="parquet")[0] == {"x": 2, "label": "a"}
    with pytest.raises(Exception, match="format="):
        ShardedDataset(tmp_path / "t")


def test_tables_that_img2dataset_writes_beside_its_tars_are_no_shards(tmp_path: Path) -> None:
    for number in range(2):
        with ShardWriter(f"{tmp_path}/{number:05d}.tar") as writer:
            writer.write({"__key__": f"{number}", "cls": number})
        (tmp_path / f"{number:05d}_stats.json").write_text("{}")
    for number in range(3):
        parquet(tmp_path / f"{number:05d}.parquet", number)
    assert len(ShardedDataset(tmp_path)) == 2
    assert shards_in(["0.tar", "0.parquet"]) == ["0.tar", "0.parquet"]  # which others may mean


# ---- columns in names of folders ------------------------------------------------------------------------


VALUES = st.sampled_from(["1", "02", "-3", "2147483648", "a b", "1.5", "2024-01-01", "ü/%", "true", None])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=4))
def test_columns_of_folders_are_those_that_pyarrow_reads(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str | None, str | None]]
) -> None:
    folder = tmp_path_factory.mktemp("hive")
    if any(all(row[key] is None for row in rows) for key in (0, 1)):
        return  # pyarrow refuses those
    table = pa.table({"x": range(len(rows)), "a": [row[0] for row in rows], "b": [row[1] for row in rows]})
    schema = pa.schema([table.schema.field("a"), table.schema.field("b")])
    ds.write_dataset(table, folder, format="parquet", partitioning=ds.partitioning(schema, flavor="hive"))
    expected = ds.dataset(folder, format="parquet", partitioning="hive").to_table().to_pylist()
    assert opened_rows(folder) == sorted(expected, key=lambda row: row["x"])


def opened_rows(source: Any, **more: Any) -> list[dict[str, Any]]:
    """All rows by their number, null where one has no value."""
    from dataflow import Optional

    rules = {"a": Optional(mask=True), "b": Optional(mask=True)}
    dataset = ShardedDataset(source, decode=rules, progress=False, **more)
    rows = [
        {name: getattr(value, "item", lambda v=value: v)() for name, value in dataset[i].items()}
        for i in range(len(dataset))
    ]
    return sorted(
        [
            {**{n: row[n] for n in ("x", "a", "b")}, **{n: None for n in ("a", "b") if not row[f"{n}_mask"]}}
            for row in rows
        ],
        key=lambda row: row["x"],
    )


def test_columns_of_folders_can_be_chosen_filtered_and_typed(tmp_path: Path) -> None:
    for year in (2024, 2025):
        parquet(tmp_path / f"data/year={year}/label=a%20b/0.parquet", year)
    dataset = ShardedDataset(tmp_path / "data", columns=["label", "x"])
    assert dataset[1] == {"label": "a b", "x": 2025}
    field = ds.field
    assert len(dataset.filter(field("year") == 2025)) == 1
    assert str(ShardedDataset(tmp_path / "data").schema["year"].dtype) == "int32"
    assert ShardedDataset(tmp_path / "data", types={"year": "text"})[0]["year"] == "2024"
    with pytest.raises(ValueError, match=r"no folder is called 'month=...'"):
        ShardedDataset(tmp_path / "data", types={"month": "int8"})
    with pytest.raises(ValueError, match=r"the folder label=a b of .* is no int64"):
        ShardedDataset(tmp_path / "data", types={"label": "int64"})
    assert set(ShardedDataset(f"{tmp_path}/data/year=2024/**/*.parquet").schema) == {"x", "label"}
    with DataLoader(ShardedDataset(f"{tmp_path}/data/*/*/*.parquet"), batch_size=2) as loader:
        assert [batch["label"] for batch in loader] == [["a b", "a b"]]


def test_a_column_that_a_file_stores_is_the_stored_one(tmp_path: Path) -> None:
    parquet(tmp_path / "x=7/0.parquet", 7)
    parquet(tmp_path / "x=8/0.parquet", 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert xs(tmp_path) == [7, 8]


def test_folders_of_values_count_and_what_is_not_yet_committed_beside_them_does_not(tmp_path: Path) -> None:
    for folder in ("d=1", "_d=2", "_temporary/0/d=3", "d=4/_temporary/0"):
        parquet(tmp_path / folder / "a.parquet", 1)
    found = ShardedDataset(tmp_path).catalog.locations
    assert [url.removeprefix(f"{tmp_path}/") for url in found] == ["_d=2/a.parquet", "d=1/a.parquet"]


def test_a_folder_that_is_called_by_no_text_is_an_error_and_no_replacement_character(tmp_path: Path) -> None:
    for name in ("d=%C3%A4", "d=%E4"):
        parquet(tmp_path / name / "a.parquet", 1)
    with pytest.raises(ValueError, match=r"d=%E4/a\.parquet is called by no UTF-8 text"):
        ShardedDataset(tmp_path)


def test_what_is_not_yet_committed_is_no_part_of_a_folder_without_values(tmp_path: Path) -> None:
    for folder in ("sub", "_temporary/0", "_kept"):
        parquet(tmp_path / folder / "a.parquet", 1)
    found = ShardedDataset(tmp_path).catalog.locations
    assert [url.removeprefix(f"{tmp_path}/") for url in found] == ["_kept/a.parquet", "sub/a.parquet"]


def test_folders_of_values_that_are_left_out_beside_a_shard_are_told(tmp_path: Path) -> None:
    for folder in (".", "d=1", "d=2"):
        parquet(tmp_path / folder / "a.parquet", 1)
    with pytest.warns(
        UserWarning, match="folders such as 'd=1' is left out, as 'a.parquet' lies beside. To read"
    ):
        assert len(ShardedDataset(tmp_path).catalog.locations) == 1
    assert len(ShardedDataset(f"{tmp_path}/**/*.*").catalog.locations) == 3


OF_FILES = [name for name in MAKERS if name not in ("files", "energon", "delta", "iceberg")]


def in_folders(root: Path, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A dataset in two folders of values: the arguments that open it, and its samples."""
    rows, kwargs = list[dict[str, Any]](), dict[str, Any]()
    for kind, number, count in (("a b", 7, 11), ("__HIVE_DEFAULT_PARTITION__", -1, 9)):
        folder = root / f"kind={kind}/n={number}"
        folder.mkdir(parents=True)
        made = MAKERS[name](folder, count)
        kwargs = {**made.kwargs, "source": f"{root}/*/*/{Path(made.kwargs['source']).name}"}
        text = None if kind.startswith("_") else kind
        rows += [{**row, "kind": text, "n": number} for row in made.samples]
    rows = rows[11:] + rows[:11]  # in the order of names
    return {**kwargs, "catalog": str(root / "kept.catalog")}, rows


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OF_FILES)
def test_columns_of_folders_are_columns_of_every_format(name: str, tmp_path: Path) -> None:
    kwargs, rows = in_folders(tmp_path, name)
    full = [row for row in rows if row["kind"]]
    with pytest.raises(SampleError, match=r"column 'kind': .* ?folder has no value"):
        DataLoader(ShardedDataset(**kwargs), batch_size=2)
    for rule in ({"kind": Optional(default="none")}, {"kind": Optional(default="none", mask=True)}):
        dataset = ShardedDataset(**kwargs, decode=rule)
        told = [{**row, "kind": row["kind"] or "none"} for row in rows]
        if len(rule) and rule["kind"].mask:
            told = [{**row, "kind_mask": bool(old["kind"])} for row, old in zip(told, rows, strict=True)]
        assert [{key: plain(value) for key, value in dataset[i].items()} for i in range(len(rows))] == told
        with DataLoader(dataset, batch_size=5, shuffle=None) as loader:
            assert [row for batch in delivered(loader) for row in batch] == told
    assert dataset.schema["n"].dtype == "int32"
    assert dataset.catalog.codec().options() == dataset.codec.options()
    if name.split(".")[0] not in ("tokens", "megatron", "megatron-windows"):
        assert len(dataset.filter(ds.field("kind") == "a b")) == len(full)
    chosen = dataset.filter(ds.field("n") > 0)
    assert (len(chosen), plain(chosen[3]["n"])) == (11, 7)
    table = ShardedDataset(**kwargs, columns=["n"], types={"n": "float32"})
    assert [plain(table[i]["n"]) for i in (0, -1)] == [-1.0, 7.0]


# ---- classes --------------------------------------------------------------------------------------------


def pictures(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")


def numbers(source: Any, **more: Any) -> dict[str, int]:
    dataset = ShardedDataset(source, columns=["__key__", "cls"], decode=None, **more)
    return {bytes(plain(dataset[i]["__key__"])).decode(): int(dataset[i]["cls"]) for i in range(len(dataset))}


def test_classes_have_the_same_numbers_in_all_splits(tmp_path: Path) -> None:
    pictures(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "train/c/1.jpg", "val/a/1.jpg", "val/c/1.jpg")
    assert numbers(tmp_path, split="train") == {"a/1": 0, "b/1": 1, "c/1": 2}
    assert numbers(tmp_path, split="val") == {"a/1": 0, "c/1": 2}
    features = [ShardedDataset(tmp_path, split=split, decode=None).features for split in ("train", "val")]
    assert features[0] == features[1]
    assert numbers(tmp_path / "val") == {"a/1": 0, "c/1": 1}  # as torchvision numbers a folder
    assert numbers(tmp_path / "val", classes=["c", "a", "b"]) == {"a/1": 1, "c/1": 0}
    with pytest.raises(ValueError, match=r"has a folder 'c', and classes= are a"):
        numbers(tmp_path / "val", classes=["a"])
    with pytest.raises(ValueError, match="classes= are for a folder with a folder for each class"):
        numbers(f"{tmp_path}/val/*/*.jpg", classes=["a", "c"])


def test_a_state_of_other_class_numbers_is_refused(tmp_path: Path) -> None:
    pictures(tmp_path, "train/b/1.jpg", "train/b/2.jpg", "val/b/1.jpg")
    with DataLoader(ShardedDataset(tmp_path, split="train", decode=None), batch_size=1) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with DataLoader(ShardedDataset(tmp_path / "train", decode=None), batch_size=1) as loader:
        loader.load_state_dict(state)  # the numbers are the same
    pictures(tmp_path, "val/a/1.jpg")
    with (
        DataLoader(ShardedDataset(tmp_path, split="train", decode=None), batch_size=1) as loader,
        pytest.raises(ValueError, match="was taken with classes=None"),
    ):
        loader.load_state_dict(state)


# ---- manifests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("metadata.csv", "image|label\na/1.jpg|cat\n", "no column 'file_name'"),
        ("metadata.csv", "filename,label\na/1.jpg,cat\n", "no column 'file_name'.*it has filename, label"),
        ("metadata.csv", "image_file_name,mask_file_name\na/1.jpg,a/1.jpg\n", "no column 'file_name'"),
        ("metadata.tsv", "file_name,label\na/1.jpg,cat\n", "no column 'file_name'"),
        ("a/metadata.csv", "file_name,label\n1.jpg,cat\n", "manifest in a folder below, 'a/metadata.csv'"),
    ],
)
def test_a_manifest_that_does_not_fit_is_an_error_and_folders_are_no_classes(
    name: str, text: str, said: str, tmp_path: Path
) -> None:
    pictures(tmp_path, "a/1.jpg", "b/1.jpg")
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        ShardedDataset(tmp_path)
    assert name in str(error.value)


def test_a_manifest_may_be_called_json_if_it_holds_lines(tmp_path: Path) -> None:
    pictures(tmp_path, "1.jpg")
    (tmp_path / "labels.json").write_text('{"file_name": "1.jpg", "label": "cat"}\n')
    dataset = ShardedDataset(tmp_path, manifest="labels.json", columns=["label"])
    assert dataset[0]["label"] == "cat"
