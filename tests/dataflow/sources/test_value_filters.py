"""Conditions on the numbers, text and bytes of formats that are no tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from formats.owners_kit import FIXTURES
from formats.records_kit import example_of, fixture, tfrecord_of
from formats.streaming_kit import write_mds
from http_kit import RangeServer, serving

from dataflow import ShardedDataset

field = pc.field


@pytest.fixture(autouse=True)
def no_catalogs_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catalogs of fixtures that lay there earlier would be compared with these."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def rows(dataset: ShardedDataset, names: list[str]) -> list[dict[str, Any]]:
    samples = (dataset[i] for i in range(len(dataset)))
    return [{name: np.asarray(sample[name]).tolist() for name in names} for sample in samples]


@pytest.mark.parametrize(
    ("name", "condition", "holds", "columns"),
    [
        ("mds/single", field("label") > 3, lambda s: s["label"] > 3, ["label"]),
        ("mds/zstd", field("label") > 3, lambda s: s["label"] > 3, ["label"]),
        ("mds/numbers", field("a") * 9 > field("c"), lambda s: s["a"] * 9 > s["c"], ["a", "c"]),
        ("litdata/text", field("t") > "b", lambda s: s["t"] > "b", ["x", "t"]),
        ("litdata/nested", field("a.b") > 2, lambda s: s["a.b"] > 2, ["a.b"]),
        (
            "litdata/leaves",
            field("bool") & (field("int") != 0),
            lambda s: s["bool"] and s["int"],
            ["bool", "int"],
        ),
        ("tfrecord/plain.tfrecord", field("label") < 5, lambda s: s["label"] < 5, ["label", "score"]),
    ],
)
def test_samples_are_those_of_which_a_condition_is_true(
    name: str, condition: Any, holds: Callable[[Any], bool], columns: list[str]
) -> None:
    dataset = ShardedDataset(str(FIXTURES / name), columns=columns)
    told = [row for row in rows(dataset, columns) if holds(row)]
    assert 0 < len(told) < len(dataset)
    assert rows(dataset.filter(condition), columns) == told


def test_missing_values_match_no_condition_and_can_be_asked_for(tmp_path: Path) -> None:
    records = [example_of(n=[i], **({"word": [b"w%d" % i]} if i % 3 else {})) for i in range(9)]
    (tmp_path / "x.tfrecord").write_bytes(tfrecord_of(records))
    dataset = ShardedDataset(str(tmp_path / "x.tfrecord"), columns=["n"])
    assert rows(dataset.filter(field("word") >= b"w4"), ["n"]) == [{"n": n} for n in (4, 5, 7, 8)]
    assert rows(dataset.filter(~field("word").is_valid()), ["n"]) == [{"n": n} for n in (0, 3, 6)]


def test_records_of_array_record_are_filtered_by_their_features(tmp_path: Path) -> None:
    (tmp_path / "x.array_record").write_bytes(fixture("array_record", "zstd-16.array_record"))
    dataset = ShardedDataset(str(tmp_path / "x.array_record"), columns=["label"])
    told = [row for row in rows(dataset, ["label"]) if row["label"] > 3]
    assert 0 < len(told) < len(dataset)
    assert rows(dataset.filter(field("label") > 3), ["label"]) == told


def test_of_large_samples_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    samples = [{"image": bytes(200_000), "label": np.int64(i).tobytes()} for i in range(9)]
    write_mds(tmp_path, {"image": ("bytes", None), "label": ("int", 8)}, [samples])
    with serving(RangeServer(tmp_path)) as server:
        dataset = ShardedDataset(f"{server.url}/index.json", columns=["label"])
        server.asked.clear()
        kept = dataset.filter(field("label") > 5)
        assert sum(one.nbytes for one in server.asked) < 9 * 4096
    assert len(kept) == 3
