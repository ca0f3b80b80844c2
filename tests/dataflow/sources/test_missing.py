"""Missing values: nulls of Parquet, Arrow and JSON Lines, members that samples of tar lack."""

from __future__ import annotations

import json
import tarfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets_kit import delivered, npy, rows_of, write_tar
from hypothesis import given, strategies as st
from pyarrow.compute import field

from dataflow import (
    Bucketed,
    DataLoader,
    Image,
    Mixture,
    Optional,
    Packed,
    Pad,
    Ragged,
    SampleError,
    ShardedDataset,
    Shuffle,
    TokenBudget,
)

NUM_ROWS = 60


def opened(table: pa.Table, folder: Path, name: str = "a.parquet", **options: Any) -> ShardedDataset:
    path = folder / name
    if path.exists():
        pass
    elif name.endswith("parquet"):
        pq.write_table(table, path, row_group_size=7)
    elif name.endswith("arrow"):
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    else:
        lines = [{k: v for k, v in row.items() if v is not None} for row in table.to_pylist()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ShardedDataset(str(path), block_bytes=1, catalog=str(folder / f"{name}.catalog"), **options)


def with_nulls(num_rows: int = NUM_ROWS) -> pa.Table:
    every = range(num_rows)
    return pa.table(
        {
            "n": pa.array(every, pa.int64()),
            "i": pa.array([None if i % 3 == 1 else i for i in every], pa.int64()),
            "b": pa.array([None if i % 4 == 1 else i % 2 == 0 for i in every]),
            "f": pa.array([None if i % 5 == 1 else i / 2 for i in every], pa.float64()),
            "s": pa.array([None if i % 6 == 1 else f"text {i}" for i in every]),
            "l": pa.array([None if i % 7 == 1 else [i] * (i % 3) for i in every], pa.list_(pa.int64())),
        }
    )


def in_batches(dataset: Any, batch_size: int = 8, **options: Any) -> list[dict[str, Any]]:
    with DataLoader(dataset, batch_size, **{"shuffle": Shuffle("none"), **options}) as loader:
        return list(loader)


def rows(dataset: Any, **options: Any) -> list[dict[str, Any]]:
    """Of an epoch, in order, as Python values."""
    return list(chain(*map(rows_of, in_batches(dataset, **options))))


# ---- what stands for a missing number --------------------------------------------------------------------

NUMBERS = {
    pa.int8(): st.integers(-128, 127),
    pa.uint16(): st.integers(0, 65535),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.bool_(): st.booleans(),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.timestamp("ms"): st.integers(0, 10**12),
}


@pytest.mark.full
@given(st.data())
def test_defaults_and_masks_are_those_of_pyarrow(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(list(NUMBERS)))
    values, default = st.none() | NUMBERS[kind], data.draw(NUMBERS[kind])
    drawn = data.draw(st.lists(st.tuples(values, values), min_size=1, max_size=20))
    table = pa.table([pa.array(column, kind) for column in zip(*drawn, strict=True)], ["x", "y"])
    declared = Optional(default=default, mask=True)
    name = data.draw(st.sampled_from(["a.parquet", "a.arrow"]))
    dataset = opened(
        table,
        tmp_path_factory.mktemp("data"),
        name,
        columns={"x": "x", "both": ["x", "y"]},
        decode={"x": declared, "both": declared},
    )
    (batch,) = in_batches(dataset, 100, num_workers=0)
    filled = [column.fill_null(pa.scalar(default, kind)).cast(kind) for column in table.columns]
    numbers = [column.cast(pa.int64()) if kind == pa.timestamp("ms") else column for column in filled]
    there = [column.is_valid().to_pylist() for column in table.columns]
    assert batch["x"].tolist() == numbers[0].to_pylist()
    assert batch["x_mask"].tolist() == there[0]
    assert batch["both"].tolist() == [list(pair) for pair in zip(*map(list, numbers), strict=True)] or (
        batch["both"].T.tolist() == [column.to_pylist() for column in numbers]
    )
    assert batch["both_mask"].T.tolist() == there
    assert list(batch) == ["x", "x_mask", "both", "both_mask"]


def test_what_is_declared_comes_in_every_row_whoever_builds(tmp_path: Path) -> None:
    table = with_nulls()
    decode = {
        "i": Optional(default=-1, mask=True),
        "b": Optional(mask=True),
        "f": Optional(default=0.5),
        "s": Optional(),
        "l": Optional(default=[7, 7, 7], mask=True),
    }
    dataset = opened(table, tmp_path, decode=decode)
    want = [
        {
            "n": row["n"],
            "i": -1 if row["i"] is None else row["i"],
            "i_mask": row["i"] is not None,
            "b": bool(row["b"]),
            "b_mask": row["b"] is not None,
            "f": 0.5 if row["f"] is None else row["f"],
            "s": row["s"],
            "l": [7, 7, 7] if row["l"] is None else row["l"],
            "l_mask": row["l"] is not None,
        }
        for row in table.to_pylist()
    ]
    assert rows(dataset) == want
    assert sorted(row["n"] for row in rows(dataset, shuffle=True)) == list(range(NUM_ROWS))
    by_number = {row["n"]: row for row in rows(dataset, shuffle=True, seed=3)}
    assert [by_number[n] for n in range(NUM_ROWS)] == want


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl"])
def test_random_access_gives_the_same(tmp_path: Path, name: str) -> None:
    decode = {"i": Optional(default=-1), "s": Optional(mask=True), "l": Optional(Pad(), mask=True)}
    dataset = opened(with_nulls(), tmp_path, name, decode=decode, columns=["i", "s", "l", "f"])
    sample = dataset[1]
    assert (sample["i"], sample["s"], sample["s_mask"], sample["l_mask"]) == (-1, None, False, False)
    assert np.isnan(sample["f"])
    assert [sample["i"] for sample in dataset.__getitems__([0, 1, 2, 4])] == [0, -1, 2, -1]


def test_transforms_see_what_stands_for_it(tmp_path: Path) -> None:
    def transform(sample: dict[str, Any]) -> int:
        assert (sample["i"] == -1) == (not sample["i_mask"])
        return len(sample["s"] or "")

    decode = {"i": Optional(default=-1, mask=True), "s": Optional()}
    dataset = opened(with_nulls(), tmp_path, decode=decode, columns=["i", "s"], transform=transform)
    want = [len(text or "") for text in with_nulls()["s"].to_pylist()]
    assert torch.cat(in_batches(dataset)).tolist() == want


def test_a_default_longer_than_all_lists_has_room(tmp_path: Path) -> None:
    """Also in batches that are copies alone, into slots that are leased for several of them."""
    default = list(range(3000))
    dataset = opened(with_nulls(), tmp_path, columns=["n", "l"], decode={"l": Optional(default=default)})
    want = [default if row is None else row for row in with_nulls()["l"].to_pylist()]
    assert [row["l"] for row in rows(dataset)] == want


def test_floats_without_a_default_are_nan(tmp_path: Path) -> None:
    dataset = opened(with_nulls(), tmp_path, columns=["f"], decode={"f": Optional(mask=True)})
    batch = in_batches(dataset, 100)[0]
    assert torch.equal(batch["f"].isnan(), ~batch["f_mask"])
    assert not all(in_batches(opened(with_nulls(), tmp_path, columns=["f"]), 100)[0]["f"].isnan())


def test_a_default_of_objects_is_a_copy_each_time(tmp_path: Path) -> None:
    default: dict[str, list[int]] = {"tags": []}
    decode = {"s": Optional("text", default=default)}
    samples = rows(opened(with_nulls(), tmp_path, columns=["s"], decode=decode))
    missing = [row["s"] for row in samples if isinstance(row["s"], dict)]
    assert len(missing) == 10
    missing[0]["tags"].append(1)
    assert missing[1] == default == {"tags": []}


def test_a_null_inside_a_list_of_integers_is_bad_whatever_is_declared(tmp_path: Path) -> None:
    table = pa.table({"l": [[1], [2, None], None, [3]]})
    dataset = opened(table, tmp_path, decode={"l": Optional(default=[])}, on_error="skip")
    with DataLoader(dataset, 4, shuffle=False) as loader:
        assert delivered(loader) == [[{"l": [1]}, {"l": []}, {"l": [3]}]]
        assert "null inside" in loader.stats().skipped[0]
    assert rows(dataset.subset([0, 2, 3])) == [{"l": [1]}, {"l": []}, {"l": [3]}]


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"i": Optional()}, "no place for None: Optional\\(default="),
        ({"l": Optional()}, "no place for None: Optional\\(default=\\[\\]\\)"),
        ({"i": Optional(default=0.5)}, "default=0.5 is no value int64"),
        ({"i": Optional(default="x")}, "default='x' is no value"),
        ({"i": Optional(default=[1, 2])}, r"default=\[1, 2\] is no value of shape \[\]"),
        ({"i": Optional(default=1 << 70)}, "is no value int64"),
        ({"b": Optional(default=2)}, "default=2 is no value bool"),
        ({"l": Optional(default=3)}, "holds lists"),
        ({"l": Optional(default=[0.5])}, "is no value int64"),
        ({"s": Optional("int")}, "no place for None"),
        ({"s": Optional("image", default=0)}, "a missing value is None"),
        ({"s": Optional("strange")}, "one of auto, bytes"),
    ],
    ids=str,
)
def test_what_cannot_be_declared_is_refused(tmp_path: Path, declared: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        opened(with_nulls(), tmp_path, decode=declared)


def test_a_default_that_a_float_cannot_hold_is_refused_and_not_infinite(tmp_path: Path) -> None:
    table = pa.table({"f": pa.array([0.5, None], pa.float32())})
    with pytest.raises(ValueError, match=r"default=1e\+300 is no value float32"):
        opened(table, tmp_path, decode={"f": Optional(default=1e300)})
    infinite = opened(table, tmp_path, decode={"f": Optional(default=float("-inf"))})
    assert rows(infinite) == [{"f": 0.5}, {"f": float("-inf")}]


def test_optional_is_declared_once_and_its_mask_has_a_name_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one Optional is enough"):
        Optional(Optional())
    with pytest.raises(ValueError, match="mask must be True or False"):
        Optional(mask="there")  # type: ignore[arg-type]
    columns = {"i": "i", "i_mask": "n"}
    with pytest.raises(ValueError, match="adds a column 'i_mask', and there is one"):
        opened(with_nulls(), tmp_path, columns=columns, decode={"i": Optional(mask=True)})


# ---- nulls that nobody declared --------------------------------------------------------------------------


def test_nulls_that_statistics_count_are_an_error_of_the_loader_that_says_what_to_do(tmp_path: Path) -> None:
    dataset = opened(with_nulls(), tmp_path, columns={"age": "i", "n": "n"})
    for _ in range(2):
        with pytest.raises(SampleError, match="2 of 7 rows of row group 0 are null") as caught:
            DataLoader(dataset, 8)
        assert caught.value.shard == str(tmp_path / "a.parquet")
        assert "decode={'age': Optional(default=...)}" in str(caught.value)
        assert "dataset.filter(field('i').is_valid())" in str(caught.value)
        dataset = ShardedDataset(
            str(tmp_path / "a.parquet"), catalog=str(tmp_path / "a.parquet.catalog"), columns={"age": "i"}
        )
    assert len(DataLoader(dataset.filter(field("i").is_valid()), 8)) == 5
    assert len(DataLoader(opened(with_nulls(), tmp_path, columns=["f", "n"]), 8)) == 8  # NaN


def test_the_cure_of_a_field_of_a_struct_is_one_that_works(tmp_path: Path) -> None:
    table = pa.table({"s": [{"i": 1}, {"i": None}, None]}, pa.schema([("s", pa.struct([("i", pa.int64())]))]))
    dataset = opened(table, tmp_path)
    with pytest.raises(SampleError, match=r"dataset\.filter\(field\('s', 'i'\)\.is_valid\(\)\)"):
        DataLoader(dataset)
    assert rows(dataset.filter(field("s", "i").is_valid())) == [{"s.i": 1}]
    declared = opened(table, tmp_path, decode={"s.i": Optional(default=0, mask=True)})
    assert [row["s.i_mask"] for row in rows(declared)] == [True, False, False]


def test_parts_of_a_dataset_are_asked_for_nulls_of_their_own(tmp_path: Path) -> None:
    table = pa.table({"i": pa.array([*range(20), None, *range(20)], pa.int64())})
    dataset = opened(table, tmp_path)  # groups of 7 rows, the null in the third
    assert len(rows(dataset.take(14))) == 14
    assert len(rows(dataset.skip(21))) == 20
    with pytest.raises(SampleError, match="1 of 7 rows from row 14 on are null"):
        DataLoader(dataset.skip(7))
    assert len(rows(dataset.subset([*range(14, 20), 30]))) == 7
    with pytest.raises(SampleError, match=r"sample '20': column 'i': the sample lacks"):
        rows(dataset.subset([*range(15, 21), 30]))


@pytest.mark.parametrize("name", ["a.arrow", "a.jsonl"])
@pytest.mark.parametrize("column", ["i", "s", "l"])
def test_where_nothing_counts_nulls_the_row_is_the_error(tmp_path: Path, name: str, column: str) -> None:
    dataset = opened(with_nulls(), tmp_path, name, columns=["n", column])
    first = with_nulls()[column].to_pylist().index(None)
    batches = iter(DataLoader(dataset, 1, shuffle=False))
    assert [int(next(batches)["n"]) for _ in range(first)] == list(range(first))
    with pytest.raises(SampleError, match=r"dataset\.filter") as caught:
        next(batches)
    assert caught.value.key == str(first)
    with pytest.raises(SampleError, match=r"dataset\.filter"):
        dataset[first]
    assert dataset[first + 1]["n"] == first + 1


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_skipping_leaves_out_the_rows_with_nulls_and_no_others(tmp_path: Path, name: str) -> None:
    dataset = opened(with_nulls(), tmp_path, name, columns=["n", "i", "s"], on_error="skip")
    want = [n for n in range(NUM_ROWS) if n % 3 != 1 and n % 6 != 1]
    assert [row["n"] for row in rows(dataset)] == want
    assert sorted(row["n"] for row in rows(dataset, shuffle=True)) == want


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl"])
def test_what_is_filtered_out_raises_nothing(tmp_path: Path, name: str) -> None:
    dataset = opened(with_nulls(), tmp_path, name, columns=["n", "i"])
    view = dataset.filter(field("i").is_valid())
    want = [{"n": n, "i": n} for n in range(NUM_ROWS) if n % 3 != 1]
    assert rows(view) == want
    assert [view[i] for i in range(len(view))] == want
    assert rows(dataset.subset([n for n in range(NUM_ROWS) if n % 3 != 1])) == want


# ---- beside what else a loader does ----------------------------------------------------------------------


def test_members_of_a_mixture_declare_the_same(tmp_path: Path) -> None:
    def source(name: str, default: int) -> ShardedDataset:
        decode = {"i": Optional(default=default, mask=True)}
        return opened(with_nulls(), tmp_path, name, decode=decode, columns=["n", "i"])

    mixed = Mixture([source("a.parquet", -1), source("b.arrow", -1)])
    found = [(row["n"], row["i"], row["i_mask"]) for row in rows(mixed, shuffle=True)]
    assert sorted(found) == sorted(2 * [(n, -1 if n % 3 == 1 else n, n % 3 != 1) for n in range(NUM_ROWS)])
    with pytest.raises(ValueError, match=r"'i' is array int64 \(array\(-2\) where missing\)"):
        Mixture([source("a.parquet", -1), source("b.arrow", -2)])
    undeclared = opened(with_nulls(), tmp_path, "c.parquet", columns=["n", "i"])
    with pytest.raises(SampleError, match=r"c\.parquet: column 'i'"):
        DataLoader(Mixture([undeclared, undeclared.take(14)]), 8)


def test_missing_lists_pack_as_what_stands_for_them(tmp_path: Path) -> None:
    table, batching = with_nulls(), Packed(16, column="l")
    lists = table["l"].to_pylist()
    for default in ([], [5, 6]):
        dataset = opened(table, tmp_path, columns=["l"], decode={"l": Optional(default=default)})
        with DataLoader(dataset, 2, shuffle=False, batching=batching) as loader:
            tokens = torch.cat([b["l"].tokens[b["l"].segment_ids > 0] for b in loader]).tolist()
        assert sorted(tokens) == sorted(chain(*(default if row is None else row for row in lists)))
    undeclared = opened(table, tmp_path, columns=["l"])
    with pytest.raises(SampleError, match=r"sample '1': column 'l': .* so it has no length; decode="):
        DataLoader(undeclared, 2, batching=batching)
    with DataLoader(undeclared.filter(field("l").is_valid()), 2, batching=batching) as loader:
        tokens = torch.cat([b["l"].tokens[b["l"].segment_ids > 0] for b in loader]).tolist()
    assert sorted(tokens) == sorted(chain(*(row for row in lists if row is not None)))


@pytest.mark.parametrize("batching", [TokenBudget(64, column="l"), Bucketed(16, column="l")], ids=str)
def test_masks_lie_beside_padded_lists(tmp_path: Path, batching: Any) -> None:
    decode = {"l": Optional(mask=True)}
    dataset = opened(with_nulls(), tmp_path, columns=["n", "l"], decode=decode)
    with DataLoader(dataset, batching=batching) as loader:
        batches = list(loader)
    masks = {int(n): bool(m) for b in batches for n, m in zip(b["n"], b["l_mask"], strict=True)}
    assert masks == {n: n % 7 != 1 for n in range(NUM_ROWS)}


def test_a_loader_over_columns_without_nulls_takes_the_same_path_as_ever(tmp_path: Path) -> None:
    """What may be null by its type and is not costs nothing: no mask is made of it anywhere."""
    table = pa.table({"x": pa.array(range(20), pa.int64())})
    assert table.schema.field("x").nullable
    dataset = opened(table, tmp_path)
    block = dataset.catalog.block(0)
    data = (tmp_path / "a.parquet").read_bytes()[block.offset : block.offset + block.length]
    assert isinstance(dataset.source().format.decode(block, memoryview(data), None)["x"], np.ndarray)
    assert not dataset.catalog.missing


# ---- members that samples of tar lack --------------------------------------------------------------------


def jpeg(i: int) -> bytes:
    cv2 = pytest.importorskip("cv2")
    return bytes(cv2.imencode(".jpg", np.full((24, 32, 3), 10 * i, np.uint8))[1].tobytes())


def members(num: int = 40) -> list[tuple[str, bytes]]:
    found = []
    for i in range(num):
        sample = {
            "n.cls": str(i).encode(),
            "cls": str(i).encode() if i % 2 else None,
            "txt": f"text {i}".encode() if i % 3 else None,
            "json": json.dumps({"i": i}).encode() if i % 4 else None,
            "npy": npy(np.full(3, i, np.float32)) if i % 5 else None,
            "bin": bytes([i] * (i % 4)) if i % 6 else None,
            "key": bytes([i] * 5) if i % 7 else None,
            "jpg": jpeg(i % 20) if i % 8 else None,
        }
        found += [(f"{i:03d}.{name}", data) for name, data in sample.items() if data is not None]
    return found


DECLARED = {
    "cls": Optional(default=-1, mask=True),
    "txt": Optional(default="none"),
    "json": Optional(),
    "npy": Optional(mask=True),
    "bin": Optional(default=b"gap", mask=True),
    "key": Optional(mask=True),
    "jpg": Optional(Image(size=16), mask=True),
}


def tar(folder: Path, suffix: str = "tar", **options: Any) -> ShardedDataset:
    if not (folder / f"a.{suffix}").exists():
        write_tar(folder / f"a.{suffix}", members())
    catalog = str(folder / f"{suffix}.catalog")
    return ShardedDataset(str(folder / f"a.{suffix}"), catalog=catalog, block_bytes=20_000, **options)


def check_members(batches: list[dict[str, Any]]) -> list[int]:
    """That each sample has what it should; gives the samples' numbers."""
    seen = []
    for batch in batches:
        assert isinstance(batch["json"], list)
        assert isinstance(batch["npy"], list)
        assert isinstance(batch["bin"], Ragged)
        assert (batch["key"].shape[1:], batch["jpg"].shape[1:]) == ((5,), (3, 16, 16))
        for at, i in enumerate(batch["n.cls"].tolist()):
            assert (batch["cls"][at].item(), batch["cls_mask"][at].item()) == (i if i % 2 else -1, i % 2 > 0)
            assert batch["txt"][at] == (f"text {i}" if i % 3 else "none")
            assert batch["json"][at] == ({"i": i} if i % 4 else None)
            assert (batch["npy"][at] is None) == (not batch["npy_mask"][at].item()) == (i % 5 == 0)
            assert bytes(batch["bin"].row(at).tolist()) == (bytes([i] * (i % 4)) if i % 6 else b"gap")
            assert batch["bin_mask"][at].item() == (i % 6 > 0)
            assert batch["key"][at].tolist() == [i if i % 7 else 0] * 5
            assert batch["key_mask"][at].item() == (i % 7 > 0)
            assert batch["jpg_mask"][at].item() == (i % 8 > 0)
            assert bool(batch["jpg"][at].any()) == (i % 8 > 0 and i % 20 > 0)
            seen.append(i)
    return seen


@pytest.mark.one_in(3)
@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_absent_members_are_what_was_declared(tmp_path: Path, suffix: str) -> None:
    dataset = tar(tmp_path, suffix, decode=DECLARED)
    assert check_members(in_batches(dataset)) == list(range(40))
    for shuffle in (Shuffle("full"), Shuffle("window")):
        seen = check_members(in_batches(dataset, shuffle=shuffle))
        assert sorted(seen) == list(range(40))
    for _ in range(2):  # the second time, numbers and masks are remembered
        with DataLoader(dataset, 7, shuffle=True) as loader:
            assert sorted(check_members(list(loader))) == list(range(40))


def test_absent_members_are_what_was_declared_in_random_access(tmp_path: Path) -> None:
    dataset = tar(tmp_path, decode=DECLARED)
    samples = dataset.__getitems__(range(40))
    assert [sample["cls"] for sample in samples] == [i if i % 2 else -1 for i in range(40)]
    assert [sample["json"] for sample in samples] == [{"i": i} if i % 4 else None for i in range(40)]
    assert [sample["jpg_mask"] for sample in samples] == [i % 8 > 0 for i in range(40)]
    assert not dataset[8]["jpg"].any()


def test_images_of_their_own_sizes_are_none_where_absent(tmp_path: Path) -> None:
    dataset = tar(tmp_path, columns=["n.cls", "jpg"], decode={"jpg": Optional(mask=True)})
    for batch in in_batches(dataset):
        assert isinstance(batch["jpg"], list)
        for image, is_there in zip(batch["jpg"], batch["jpg_mask"].tolist(), strict=True):
            assert (image is not None) == is_there
            assert not is_there or image.shape == (3, 24, 32)


def test_normalised_images_are_zeros_or_the_default_where_absent(tmp_path: Path) -> None:
    image = Image(size=8, mean=(0.5, 0.5, 0.5), std=(1.0, 1.0, 1.0))
    for default, level in ((None, 0.0), (0.25, 0.25)):
        decode = {"jpg": Optional(image, default=default, mask=True)}
        batch = in_batches(tar(tmp_path, columns=["jpg"], decode=decode))[0]
        assert batch["jpg"].dtype == torch.float32
        assert (batch["jpg"][0] == level).all()
        assert not (batch["jpg"][1] == level).all()


def test_an_absent_member_that_nobody_declared_is_an_error_of_the_loader(tmp_path: Path) -> None:
    dataset = tar(tmp_path, columns=["n.cls", "txt"])
    with pytest.raises(SampleError, match=r"a\.tar, sample '000': .* no member '000\.txt', which") as caught:
        DataLoader(dataset)
    assert "decode={'txt': Optional()}" in str(caught.value)
    assert "dataset.filter(field('txt').is_valid())" in str(caught.value)
    text = "sample '3': column 'txt': the sample has no member 'txt', which other samples have"
    with pytest.raises(SampleError, match=text):
        DataLoader(dataset.subset([1, 2, 3, 6]))
    assert len(DataLoader(dataset.subset([1, 2, 4, 5]))) == 4
    assert len(DataLoader(dataset.select(["n.cls"]))) == 40
    with pytest.raises(SampleError, match="sample '003': column 'txt'"):
        dataset[3]
    skipping = tar(tmp_path, columns=["n.cls", "txt"], on_error="skip")
    assert [row["n.cls"] for row in rows(skipping)] == [i for i in range(40) if i % 3]


@pytest.mark.full
@given(data=st.data())
def test_a_filter_of_members_is_a_loop_over_the_archive(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    names = ["a", "b.txt", "c"]
    samples = data.draw(
        st.lists(st.dictionaries(st.sampled_from(names), st.binary(max_size=4), min_size=1), min_size=1)
    )
    folder = tmp_path_factory.mktemp("tar")
    files = [(f"{i:02d}.{name}", value) for i, sample in enumerate(samples) for name, value in sample.items()]
    write_tar(folder / "x.tar", files)
    sizes = dict[str, dict[str, int]]()
    with tarfile.open(folder / "x.tar") as archive:
        for member in archive:
            key, _, name = member.name.partition(".")
            sizes.setdefault(key, {})[name] = member.size
    present = [name for name in names if any(name in own for own in sizes.values())]
    one, other = data.draw(st.sampled_from(present)), data.draw(st.sampled_from(present))
    least = data.draw(st.integers(0, 4))
    dataset = ShardedDataset(
        str(folder / "x.tar"), catalog=str(folder / "c"), block_bytes=2048, columns=["__key__"]
    )
    for condition, holds in [
        (field(one).is_valid(), lambda own: one in own),
        (field(one).is_null() | field(other).is_null(), lambda own: one not in own or other not in own),
        (field(one, "size") >= least, lambda own: own.get(one, -1) >= least),
        (
            field(one).is_valid() & (field(one, "size") == field(other, "size")),
            lambda own: one in own and own[one] == own.get(other),
        ),
    ]:
        view = dataset.filter(condition)
        assert [sample["__key__"] for sample in view.__getitems__(range(len(view)))] == [
            key for key, own in sizes.items() if holds(own)
        ]


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_a_filter_of_members_reads_nothing_and_what_is_left_streams(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = tar(tmp_path, suffix, columns=["n.cls", "txt", "jpg"], decode={"jpg": Image(size=8)})

    def no_read(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("read")

    with monkeypatch.context() as patched:
        patched.setattr(type(dataset), "new_reader", lambda *args, **kwargs: _Unreadable(no_read))
        view = dataset.filter(field("txt").is_valid() & field("jpg").is_valid()).filter(
            field("cls").is_null()
        )
    want = [i for i in range(40) if i % 3 and i % 8 and not i % 2]
    assert [row["n.cls"] for row in rows(view)] == want
    assert sorted(row["n.cls"] for row in rows(view, shuffle=True)) == want


class _Unreadable:
    def __init__(self, read_into: Any) -> None:
        self.read_into = read_into

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)
