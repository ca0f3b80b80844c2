"""Views of a dataset: subset, take, skip, split, select, filter, against lists."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from datasets_kit import (
    MAKERS,
    Made,
    delivered,
    make_arrow,
    make_ints_tar,
    make_jsonl,
    make_parquet,
    plain,
    sort_key,
)
from http_kit import RangeServer, serving
from hypothesis import given, strategies as st
from parameters_kit import in_pairs

from dataflow import DataLoader, ShardedDataset, TokenBudget
from sharding.catalog.predicate import Predicate
from sharding.order.selection import SelectedOrder, Selection
from sharding.order.shuffle import Shuffle


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make_parquet(tmp_path)


@pytest.fixture
def dataset(made: Made) -> ShardedDataset:
    return made.open(columns=["label"])


def labels(dataset: ShardedDataset) -> list[int]:
    return [int(sample["label"]) for sample in dataset.__getitems__(range(len(dataset)))]


# ---- selections ------------------------------------------------------------------------------------------

TOTALS = st.lists(st.integers(0, 12), min_size=1, max_size=8)


def kept(selection: Selection, total: list[int]) -> list[int]:
    """Sample numbers of a selection."""
    first = np.cumsum([0, *total])
    blocks, rows = selection.locate(np.arange(len(selection)))
    assert selection.num_samples.tolist() == np.bincount(blocks, minlength=len(total)).tolist()
    by_block = [int(first[b]) + row for b in range(len(total)) for row in selection.rows(b).tolist()]
    assert (first[blocks] + rows).tolist() == by_block
    return by_block


@given(TOTALS, st.data())
def test_selections_of_selections_keep_what_a_list_would(total: list[int], data: Any) -> None:
    selection, oracle = Selection.whole(np.array(total, np.int64)), list(range(sum(total)))
    for _ in range(3):
        n = len(oracle)
        kind = data.draw(st.sampled_from(["between", "at", "where", "blocks"]))
        if kind == "between":
            start = data.draw(st.integers(0, n))
            stop = data.draw(st.integers(start, n))
            selection, oracle = selection.between(start, stop), oracle[start:stop]
        elif kind == "at":
            places = sorted(data.draw(st.sets(st.integers(0, n - 1)))) if n else []
            selection = selection.at(np.array(places, np.int64))
            oracle = [oracle[place] for place in places]
        elif kind == "where":
            first, modulus = np.cumsum([0, *total]), data.draw(st.integers(1, 4))
            selection = selection.where(lambda b, rows: (rows + first[b]) % modulus == 0)  # noqa: B023
            oracle = [sample for sample in oracle if sample % modulus == 0]
        else:
            used = np.array(data.draw(st.lists(st.booleans(), min_size=len(total), max_size=len(total))))
            owner = np.repeat(np.arange(len(total)), total)
            selection, oracle = selection.of_blocks(used), [s for s in oracle if used[owner[s]]]
        assert kept(selection, total) == oracle
        assert len(selection) == len(oracle)
        assert selection.is_whole == (len(oracle) == sum(total))


@given(TOTALS.filter(lambda total: sum(total) > 1), st.data())
def test_the_same_samples_have_the_same_digest_however_they_were_selected(
    total: list[int], data: Any
) -> None:
    whole = Selection.whole(np.array(total, np.int64))
    cut = data.draw(st.integers(1, sum(total) - 1))
    one, other = whole.between(0, cut), whole.at(np.arange(cut))
    assert one.digest == other.digest
    assert one.digest != whole.between(0, cut - 1).digest != whole.digest


def test_an_order_over_a_selection_delivers_each_kept_sample_once() -> None:
    total = np.array([5, 0, 7, 3, 9])
    selection = Selection.whole(total).at(np.array([0, 3, 4, 6, 11, 12, 13, 14, 17, 22]))
    chosen = SelectedOrder(selection, Shuffle("window", 2, 2), seed=3, epoch=1)
    seen = []
    for window in range(chosen.num_windows):
        ordinal, row = chosen.window_samples(window)
        seen += zip(chosen.window_blocks(window)[ordinal].tolist(), row.tolist(), strict=True)
    blocks, rows = selection.locate(np.arange(len(selection)))
    assert sorted(seen) == list(zip(blocks.tolist(), rows.tolist(), strict=True))


def test_a_scattered_selection_costs_a_bit_a_sample() -> None:
    total = np.full(100, 8000)
    selection = Selection.whole(total).where(lambda _, rows: rows % 2 == 0)
    assert len(pickle.dumps(selection)) < 800_000 / 8 + 100 * 40


# ---- by index --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "indices",
    [
        slice(5, 20),
        slice(None, None, 3),
        slice(-4, None),
        slice(30, 10),
        [0, 7, 8, 46],
        [],
        np.array([3, 45], np.uint8),
        [i % 5 == 0 for i in range(47)],
    ],
)
def test_subset_is_indexing(dataset: ShardedDataset, indices: Any) -> None:
    everything = np.arange(47)
    expected = everything[indices if len(np.shape(indices)) != 1 or len(indices) else slice(0, 0)]
    view = dataset.subset(indices)
    assert labels(view) == expected.tolist()
    assert len(view) == len(expected)


def test_views_of_views_count_their_own_samples(dataset: ShardedDataset) -> None:
    view = dataset.skip(10).take(20).subset(slice(None, None, 2)).subset([1, 3])
    assert labels(view) == [12, 16]
    assert int(view[-1]["label"]) == 16
    assert labels(dataset.take(99)) == labels(dataset)
    assert len(dataset.skip(99)) == 0


def test_a_view_survives_pickling_and_leaves_its_dataset_alone(dataset: ShardedDataset) -> None:
    view = pickle.loads(pickle.dumps(dataset.take(3)))
    assert labels(view) == [0, 1, 2]
    assert len(dataset) == 47
    assert "3 samples of 47" in repr(view)


def test_sample_numbers_stay_those_of_the_dataset(made: Made) -> None:
    drawn: list[float] = []
    seeded = made.open(columns=["label"], transform=lambda s, rng: drawn.append(rng.random()) or s)
    seeded[11]
    seeded.skip(10)[1]
    assert drawn[0] == drawn[1]


def test_fingerprints_tell_selections_apart(dataset: ShardedDataset) -> None:
    assert dataset.fingerprint() == dataset.catalog.fingerprint() == dataset.take(99).fingerprint()
    marks = {view.fingerprint() for view in (dataset, dataset.take(5), dataset.skip(5), dataset.take(6))}
    assert len(marks) == 4
    assert all(len(mark) <= 128 for mark in marks)


# ---- split -----------------------------------------------------------------------------------------------


def test_parts_hold_every_sample_once_in_about_the_asked_shares(tmp_path: Path) -> None:
    dataset = make_ints_tar(tmp_path, 3000).open(columns=["cls"])
    parts = dataset.split({"train": 0.7, "val": 0.2, "test": 0.1})
    numbers = [
        (part.catalog.blocks.first_sample[blocks] + rows).tolist()
        for part in parts.values()
        for blocks, rows in [part.selection.locate(np.arange(len(part)))]
    ]
    assert sorted(chain(*numbers)) == list(range(3000))
    for share, part in zip((0.7, 0.2, 0.1), parts.values(), strict=True):
        assert abs(len(part) - 3000 * share) < 5 * math.sqrt(3000 * share * (1 - share))


def test_a_sample_keeps_its_part_when_shards_are_added(tmp_path: Path) -> None:
    for folder, names in (("few", "bd"), ("many", "abcde")):
        (tmp_path / folder).mkdir()
        for name in names:
            values = [ord(name) * 1000 + i for i in range(40)]
            path = tmp_path / folder / f"{name}.parquet"
            pq.write_table(pa.table({"label": values}), path, row_group_size=7 if folder == "few" else 40)
    few, many = (
        ShardedDataset(str(tmp_path / folder), catalog=str(tmp_path / f"{folder}.catalog")).split(
            {"train": 0.5, "val": 0.5}
        )
        for folder in ("few", "many")
    )
    assert set(labels(few["train"])) <= set(labels(many["train"]))
    assert set(labels(few["val"])) <= set(labels(many["val"]))


def test_another_seed_is_another_split_and_a_split_of_a_part_is_not_skewed(tmp_path: Path) -> None:
    dataset = make_ints_tar(tmp_path, 1500).open(columns=["cls"])
    half = dataset.split({"a": 0.5, "b": 0.5})["a"]
    other = dataset.split({"a": 0.5, "b": 0.5}, seed=1)["a"]
    assert half.selection.digest != other.selection.digest
    quarter = half.split({"a": 0.5, "b": 0.5})["a"]
    assert abs(len(quarter) - len(half) / 2) < 5 * math.sqrt(len(half) / 4)


def test_whole_shards_go_to_one_part_by_shard(dataset: ShardedDataset) -> None:
    parts = dataset.split({"a": 0.5, "b": 0.5}, by="shard")
    owners = [set(p.catalog.blocks.shard[p.selection.num_samples > 0].tolist()) for p in parts.values()]
    assert not owners[0] & owners[1]
    assert sum(map(len, parts.values())) == 47


# ---- select and filter -----------------------------------------------------------------------------------


def test_select_delivers_only_these_columns_in_this_order(made: Made) -> None:
    view = made.open().select(["x", "label"])
    assert list(view[3]) == ["x", "label"]
    assert plain(view[3]["x"]) == made.samples[3]["x"]
    with pytest.raises(ValueError, match="columns must be a list out of"):
        view.select(["txt"])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [make_parquet, make_arrow, make_jsonl], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    ("condition", "oracle"),
    [
        ((pc.field("label") > 9) & (pc.field("label") < 23), lambda s: 9 < s["label"] < 23),
        (pc.field("txt") == "text 7 éé", lambda s: s["txt"] == "text 7 éé"),
        (pc.field("x") * 8 == pc.field("label"), lambda s: True),
        (pc.field("label") < 0, lambda s: False),
        (pc.field("txt").isin(["text 5 ", "text 6 é"]), lambda s: s["txt"] in ("text 5 ", "text 6 é")),
    ],
)
def test_filter_keeps_exactly_the_matching_rows(
    tmp_path: Path, make: Callable[[Path], Made], condition: Any, oracle: Callable[[Any], bool]
) -> None:
    made = make(tmp_path)
    view = made.open(columns=["label"]).filter(condition)
    assert labels(view) == [s["label"] for s in made.samples if oracle(s)]


def test_filter_reads_only_the_columns_and_row_groups_in_question(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    rows = 1000
    table = pa.table({"n": range(rows), "big": [bytes(2000)] * rows, "also": range(rows)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100, compression=None, use_dictionary=False)
    with serving(RangeServer(tmp_path)) as server:
        url, catalog = f"{server.url}/a.parquet", str(tmp_path / "a.catalog")
        dataset = ShardedDataset(url, catalog=catalog, columns=["also"])
        server.asked.clear()
        view = dataset.filter((pc.field("n") >= 350) & (pc.field("n") < 420))
        assert len(server.asked) == 2
        assert all(0 < asked.nbytes < 10_000 for asked in server.asked)
        assert [int(sample["also"]) for sample in view.__getitems__(range(70))] == list(range(350, 420))


def test_nulls_do_not_match_and_filters_add_up(tmp_path: Path) -> None:
    table = pa.table({"n": range(6), "f": pa.array([1.0, None, 3.0, None, 5.0, 6.0])})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    dataset = ShardedDataset(str(tmp_path / "a.parquet"), catalog=str(tmp_path / "a.catalog"), columns=["n"])
    view = dataset.filter(pc.field("f") > 0)
    assert [int(view[i]["n"]) for i in range(len(view))] == [0, 2, 4, 5]
    again = view.skip(1).filter(pc.field("n") != 4)
    assert [int(again[i]["n"]) for i in range(len(again))] == [2, 5]
    missing = dataset.filter(pc.field("f").is_null())
    assert [int(missing[i]["n"]) for i in range(len(missing))] == [1, 3]


def test_nan_matches_where_statistics_do_not_count_it(tmp_path: Path) -> None:
    floats = [1.5, math.nan, math.nan, math.nan, 2.0, None]
    table = pa.table({"n": range(6), "f": floats, "s": [{"x": x} for x in floats], "a.b": floats})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    dataset = ShardedDataset(str(tmp_path / "a.parquet"), catalog=str(tmp_path / "a.catalog"), columns=["n"])
    for f in (pc.field("f"), pc.field("s", "x"), pc.field("s.x"), pc.field("a.b")):
        for condition in (f != 1.5, f.is_nan(), ~(f > 0), ~f.isin([1.5]) | (pc.field("f") == 1.5)):
            view = dataset.filter(condition)
            holds = Predicate(condition, table.schema).holds(table)
            assert [int(view[i]["n"]) for i in range(len(view))] == np.flatnonzero(holds).tolist()


def test_filter_looks_into_structs_and_skips_empty_row_groups(tmp_path: Path) -> None:
    schema = pa.schema(
        [("n", pa.int64()), ("meta", pa.struct([("year", pa.int64()), ("name", pa.string())]))]
    )
    with pq.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for numbers in ([], [0, 1], [3, 4, 5]):
            batch = [{"n": n, "meta": {"year": 2000 + n, "name": "x"}} for n in numbers]
            writer.write_table(pa.Table.from_pylist(batch, schema))
    dataset = ShardedDataset(str(tmp_path / "a.parquet"), catalog=str(tmp_path / "a.catalog"), columns=["n"])
    view = dataset.filter(pc.field("meta", "year") > 2003)
    assert [int(view[i]["n"]) for i in range(len(view))] == [4, 5]


# ---- through the loader ----------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[ShardedDataset], ShardedDataset]] = {
    "take": lambda dataset: dataset.take(17),
    "skip": lambda dataset: dataset.skip(30),
    "every third": lambda dataset: dataset.subset(slice(1, None, 3)),
    "scattered": lambda dataset: dataset.subset([0, 4, 5, 11, 12, 13, 29, 45]),
    "hash": lambda dataset: dataset.split({"train": 0.7, "val": 0.3})["train"],
    "shards": lambda dataset: dataset.split({"train": 0.5, "val": 0.5}, by="shard")["val"],
}
LOADER_SHUFFLES = [Shuffle("none"), Shuffle("blocks", 2), Shuffle("window", 4, 4), Shuffle("full")]


@pytest.fixture(scope="module")
def by_format(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    return cache(lambda name: MAKERS[name](tmp_path_factory.mktemp(name.replace(".", "-"))))


def expected_rows(made: Made, view: ShardedDataset) -> list[Any]:
    blocks, rows = view.selection.locate(np.arange(len(view)))
    return [made.samples[n] for n in (view.catalog.blocks.first_sample[blocks] + rows).tolist()]


def text_of(rows: list[Any]) -> list[str]:
    return sorted(map(sort_key, rows))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "view"),
    in_pairs(["tar", "tar.gz", "parquet", "arrow", "jsonl", "tokens.bin", "megatron"], VIEWS),
)
def test_the_loader_delivers_each_sample_of_a_view_once(
    by_format: Callable[[str], Made], name: str, view: str
) -> None:
    made = by_format(name)
    dataset = VIEWS[view](made.open())
    for shuffle in LOADER_SHUFFLES:
        with DataLoader(dataset, 4, shuffle, seed=1) as loader:
            assert len(loader) == -(-len(dataset) // 4)
            rows = list(chain(*delivered(loader)))
        assert text_of(rows) == text_of(expected_rows(made, dataset))
        if shuffle.kind == "none":
            assert rows == expected_rows(made, dataset)


def test_a_state_of_another_view_is_refused(dataset: ShardedDataset) -> None:
    with DataLoader(dataset.take(20), 4) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with (
        DataLoader(dataset.take(21), 4) as other,
        pytest.raises(ValueError, match=r"samples 20 .* samples 21 "),
    ):
        other.load_state_dict(state)


def test_an_empty_view_is_an_empty_epoch(dataset: ShardedDataset) -> None:
    with DataLoader(dataset.take(0), 4) as loader:
        assert len(loader) == 0
        assert list(loader) == []


@pytest.mark.parametrize("make", [make_parquet, make_arrow, make_jsonl])
@pytest.mark.parametrize(
    "condition",
    [
        pc.field("label") > 20,
        (pc.field("label") % 2 == 0) if hasattr(pc.Expression, "__mod__") else pc.field("x") < 2,
        (pc.field("x") >= 1.5) & ~pc.field("txt").isin(["text 20 "]),
    ],
    ids=str,
)
def test_a_filter_delivers_what_pyarrow_filters(
    tmp_path: Path, make: Callable[..., Made], condition: Any
) -> None:
    made = make(tmp_path)
    table = pa.Table.from_pylist([{k: s[k] for k in ("label", "x", "txt")} for s in made.samples])
    expected = table.filter(condition)["label"].to_pylist()
    with DataLoader(made.open(columns=["label"]).filter(condition), 5, shuffle=False) as loader:
        assert [int(n) for batch in loader for n in batch["label"]] == expected
    with DataLoader(made.open(columns=["label"]).filter(condition), 5, shuffle=True) as loader:
        assert sorted(int(n) for batch in loader for n in batch["label"]) == expected


def test_selected_columns_stream(made: Made) -> None:
    with DataLoader(made.open().select(["x", "label"]).take(9), 4, shuffle=False) as loader:
        batches = list(loader)
    assert [list(batch) for batch in batches] == [["x", "label"]] * 3
    assert [int(n) for batch in batches for n in batch["label"]] == list(range(9))


def test_length_aware_batches_of_a_view_hold_its_samples_once(by_format: Callable[[str], Made]) -> None:
    made = by_format("megatron")
    for view in ("every third", "shards", "take"):
        dataset = VIEWS[view](made.open())
        with DataLoader(
            dataset, shuffle=True, batching=TokenBudget(12, column="tokens"), collate_fn=list
        ) as loader:
            rows = [{"tokens": plain(sample["tokens"])} for batch in loader for sample in batch]
        assert text_of(rows) == text_of(expected_rows(made, dataset))
