"""Nested columns in batches: Python objects, exactly once, in any order, by any loader."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from datasets_kit import Made, by_plan, delivered, shares, sort_key
from torch.utils.data import DataLoader as TorchDataLoader

from dataflow import DataLoader, Mixture, Ragged, Shuffle
from sharding.errors import ShardError

FORMATS = ["jsonl", "jsonl.gz", "parquet", "arrow", "arrows"]
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("tags", pa.list_(pa.string())),
        ("grid", pa.list_(pa.list_(pa.int64()))),
    ]
)


def sample(i: int) -> dict[str, Any]:
    said = [{"role": ["user", "assistant"][k % 2], "content": f'"{i}" é\n' * k} for k in range(i % 4)]
    return {"id": i, "messages": said, "tags": ["a", None, "日"][: i % 4], "grid": [[i] * (i % 3), []]}


def make(folder: Path, ending: str, samples: Iterable[dict[str, Any]] | None = None) -> Made:
    rows = [sample(i) for i in range(47)] if samples is None else list(samples)
    for k, share in enumerate(shares(rows)):
        write(folder / f"shard-{k}.{ending}", share)
    return Made({"source": str(folder / f"*.{ending}"), "block_bytes": 400}, rows, folder)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows, SCHEMA)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=5)
    elif ".jsonl" in path.name:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with (
            pa.CompressedOutputStream(path, "gzip")
            if path.suffix == ".gz"
            else pa.OSFile(str(path), "wb") as file
        ):
            file.write(text.encode())
    else:
        new = pa.ipc.new_file if path.suffix == ".arrow" else pa.ipc.new_stream
        with new(path, SCHEMA) as writer:
            writer.write_table(table, max_chunksize=5)


def counted(batches: Iterable[Any]) -> Counter[str]:
    return Counter(map(sort_key, chain(*batches)))


@pytest.mark.parametrize("ending", FORMATS)
def test_an_epoch_is_that_of_the_plain_loop(tmp_path, ending):
    made = make(tmp_path, ending)
    with DataLoader(made.open(), 5, Shuffle("window", 2)) as loader:
        got = delivered(loader)
        assert got == by_plan(loader, made.samples, 0)
    assert counted(got) == Counter(map(sort_key, made.samples))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("workers", [0, 2])
def test_torch_loads_the_same_samples(tmp_path, ending, workers):
    made = make(tmp_path, ending)
    dataset = made.open()
    loader = TorchDataLoader(dataset, 4, num_workers=workers, collate_fn=list, timeout=60 * bool(workers))
    assert counted(loader) == Counter(map(sort_key, made.samples))
    assert dataset[7] == made.samples[7]


def test_each_decoder_gets_the_json_text(tmp_path):
    made = make(tmp_path, "parquet")
    said = made.samples[2]["messages"]
    text = json.dumps(said, ensure_ascii=False, separators=(",", ":"))
    decode = {"a": len, "b": "bytes", "c": None, "d": "text", "e": "json"}
    dataset = made.open(columns=dict.fromkeys(decode, "messages"), decode=decode)
    with DataLoader(dataset, 3, Shuffle("none")) as loader:
        batch = next(iter(loader))
    assert batch["a"][2] == len(text.encode())
    assert isinstance(batch["b"], Ragged)
    assert bytes(batch["b"].row(2).tolist()) == bytes(batch["c"].row(2).tolist()) == text.encode()
    assert batch["d"][2] == text
    assert batch["e"][2] == said


def test_decode_none_gives_the_json_text_as_bytes(tmp_path):
    made = make(tmp_path, "jsonl")
    with DataLoader(made.open(columns=["tags"], decode=None), 4, Shuffle("none")) as loader:
        batch = next(iter(loader))
    assert [json.loads(bytes(row.tolist())) for row in batch["tags"].rows()] == [
        row["tags"] for row in made.samples[:4]
    ]


def test_a_transform_and_a_collate_function_see_objects(tmp_path):
    made = make(tmp_path, "jsonl")
    dataset = made.open(transform=lambda row: [turn["role"] for turn in row["messages"]])
    with DataLoader(dataset, 4, Shuffle("none"), collate_fn=list) as loader:
        roles = list(chain(*loader))
    assert roles == [[turn["role"] for turn in row["messages"]] for row in made.samples]


def test_a_missing_value_is_a_bad_sample(tmp_path):
    made = make(tmp_path, "parquet", [sample(0), {**sample(1), "tags": None}, sample(2)])
    with (
        DataLoader(made.open(), 3, Shuffle("none")) as loader,
        pytest.raises(ShardError, match=r"tags.*lacks this column"),
    ):
        list(loader)
    with DataLoader(made.open(on_error="skip"), 3, Shuffle("none")) as loader:
        assert [row["id"] for row in chain(*delivered(loader))] == [0, 2]


def test_views_and_mixtures_take_nested_columns(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    first, second = make(folders[0], "parquet"), make(folders[1], "jsonl")
    late = first.open().filter(pc.field("id") >= 40)
    with DataLoader(late, 4, Shuffle("none")) as loader:
        assert list(chain(*delivered(loader))) == first.samples[40:]
    with DataLoader(Mixture([first.open(), second.open()]), 4) as loader:
        rows = next(iter(loader))
    assert rows["messages"] == [sample(i)["messages"] for i in rows["id"].tolist()]


def test_packing_objects_is_refused_with_the_cure(tmp_path):
    from dataflow import Packed

    with pytest.raises(ValueError, match=r"column 'grid' must hold lists of numbers or bytes"):
        DataLoader(make(tmp_path, "jsonl").open(), batching=Packed(8, column="grid"))


def test_lengths_can_be_those_of_the_json_text(tmp_path):
    from dataflow import TokenBudget

    made = make(tmp_path, "parquet")
    dataset = made.open(columns=["messages"], decode=None)
    with DataLoader(dataset, shuffle=True, batching=TokenBudget(4000, column="messages")) as loader:
        batch = next(iter(loader))
    lengths = [
        len(json.dumps(row["messages"], ensure_ascii=False, separators=(",", ":")).encode())
        for row in made.samples
    ]
    assert set(batch["messages"].lengths.tolist()) <= set(lengths)
