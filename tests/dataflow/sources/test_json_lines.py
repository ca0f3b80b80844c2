"""Datasets of JSON Lines: what is asked of lines that are unlike each other."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from formats_kit import lengths_of

from dataflow import DataLoader, Optional, ShardedDataset, Shuffle, TokenBudget
from sharding.errors import CorruptShardError, ShardError

ROWS: list[dict[str, Any]] = [
    {
        "id": 2**64 - 1 - i,
        "meta": {"lang": ["en", "de"][i % 2]} if i % 5 else None,
        "turns": [{"n": i} if i % 2 else {"text": "x" * i}] if i % 3 else None,
        "label": i if i % 4 else "none",
        "ids": [i] * (i % 3),
    }
    for i in range(40)
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two files joined, each with a byte order mark."""
    files = ["".join(json.dumps(row) + "\n" for row in rows).encode() for rows in (ROWS[:20], ROWS[20:])]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(b"\xef\xbb\xbf" + content for content in files))
    return path


def test_integers_of_64_bits_are_delivered_as_they_are(path: Path) -> None:
    with DataLoader(ShardedDataset(path, columns=["id"], block_bytes=100), 7, Shuffle("none")) as loader:
        ids = torch.cat([batch["id"] for batch in loader])
    assert ids.dtype == torch.uint64
    assert ids.tolist() == [row["id"] for row in ROWS]


def test_samples_are_found_by_number_and_by_conditions(path: Path) -> None:
    decode = {"turns": Optional()}
    dataset = ShardedDataset(path, columns=["turns", "ids"], decode=decode, block_bytes=100)
    assert dataset[7]["turns"] == ROWS[7]["turns"]
    assert dataset[3]["turns"] is None
    assert dataset[8]["ids"].tolist() == ROWS[8]["ids"]
    conditions = {
        "turns": (pc.field("turns").is_valid(), lambda row: row["turns"] is not None),
        "lang": (pc.field("meta", "lang") == "de", lambda row: (row["meta"] or {}).get("lang") == "de"),
        "id": (pc.field("id") > pa.scalar(2**64 - 9, pa.uint64()), lambda row: row["id"] > 2**64 - 9),
        "ids": (pc.list_value_length(pc.field("ids")) == 2, lambda row: len(row["ids"]) == 2),
    }
    for condition, holds in conditions.values():
        found = dataset.filter(condition)
        assert [found[i]["turns"] for i in range(len(found))] == [row["turns"] for row in ROWS if holds(row)]


def test_lengths_are_those_of_lists_and_of_the_text_in_the_line(path: Path) -> None:
    catalog = ShardedDataset(path, columns=["ids"]).catalog
    assert lengths_of(catalog, "ids").tolist() == [len(row["ids"]) for row in ROWS]
    texts = [-1 if row["turns"] is None else len(json.dumps(row["turns"])) for row in ROWS]
    assert lengths_of(catalog, "turns").tolist() == texts


def test_batches_by_length_and_shuffled_epochs_have_each_line_once(path: Path) -> None:
    dataset = ShardedDataset(path, columns=["id", "ids"], block_bytes=100)
    with DataLoader(dataset, batching=TokenBudget(12, column="ids"), shuffle=True, seed=1) as loader:
        ids = np.concatenate([batch["id"].numpy() for batch in loader])
    assert sorted(ids.tolist(), reverse=True) == [row["id"] for row in ROWS]


def test_a_column_of_two_types_is_named_only_where_it_is_asked_for(path: Path) -> None:
    told = r"column 'label' holds text on the line at byte 0, but a number on the line at byte \d+;"
    for columns in (["label"], ["id", "label"], None):
        with pytest.raises(ShardError, match=told):
            ShardedDataset(path, columns=columns)
    assert ShardedDataset(path, columns=["id"])[0]["id"] == ROWS[0]["id"]


DEALT: dict[str, list[Any]] = {
    "integers": [1, 2**63, 2**64 - 1, None],
    "numbers": [0.5, 2**53, None, -1],
    "text and nothing": [None, "a", None],
    "empty lists": [[], [[1]], None, []],
    "lists of numbers and others": [[1, 2.5], [1], ["a"], [{"b": None}]],
    "lists of nulls": [[None], ["a"], []],
}


@pytest.mark.parametrize("kind", DEALT)
def test_lines_mean_the_same_however_they_are_dealt_to_files(kind: str, tmp_path: Path) -> None:
    values = DEALT[kind]
    lines = [json.dumps({"x": value, "i": i}) + "\n" for i, value in enumerate(values)]
    (tmp_path / "whole.jsonl").write_text("".join(lines))
    split = [tmp_path / f"{i}.jsonl" for i in range(len(lines))]
    for path, line in zip(split, lines, strict=True):
        path.write_text(line)
    got = []
    for source in (tmp_path / "whole.jsonl", split):
        is_number = kind in ("integers", "numbers")
        optional = Optional(default=7, mask=True) if is_number else Optional()
        dataset = ShardedDataset(source, columns=["x"], decode={"x": optional})
        samples = [dataset[i] for i in range(len(values))]
        if is_number:
            got.append([one["x"] if one["x_mask"] else None for one in samples])
        else:
            got.append([one["x"] for one in samples])
    assert repr(got) == repr([[float(v) if kind == "numbers" and v else v for v in values]] * 2)


ITEMS = [{"id": i, "text": f"é{i}\n", "more": [1, {"a": None}], "big": 2**63 + i} for i in range(20)]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("whole", [ITEMS, {"data": ITEMS}], ids=["array", "data"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_one_array_of_objects_is_its_items(indent: int | None, whole: Any, name: str, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    text = json.dumps(whole, indent=indent).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else b"\n" + text)
    dataset, expected = (ShardedDataset(tmp_path / one, format="jsonl") for one in (name, lines))
    assert dataset.schema == expected.schema
    assert [dataset[i] for i in range(20)] == [expected[i] for i in range(20)]
    with DataLoader(dataset, batch_size=20) as loader:
        (batch,) = loader
        assert batch["id"].tolist() == list(range(20))


def test_a_large_array_is_an_error_with_the_line_that_converts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharding.formats.arrow.jsonl._MOST_ARRAY_BYTES", 1 << 20)
    (tmp_path / "a.json").write_text(json.dumps([{"a": "x" * (1 << 20)}]))
    with pytest.raises(CorruptShardError, match=r"more than 1 MiB: write it as lines: jq -c .*a\.json"):
        ShardedDataset(tmp_path / "a.json", format="jsonl")


def test_lines_with_a_column_data_stay_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"data": [1, 2]}\n')
    (tmp_path / "b.jsonl").write_text('{"data": [{"a": 1}]}\n{"data": []}\n')
    (tmp_path / "c.jsonl").write_text('{"data": [{"a": 1}], "n": 1}\n')
    assert [len(ShardedDataset(tmp_path / f"{name}.jsonl")) for name in "abc"] == [1, 2, 1]
