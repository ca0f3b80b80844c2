"""Token shards, JSON Lines and Arrow by `ShardWriter`: what is written is read back without options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from numpy.typing import NDArray

from dataflow import ShardedDataset
from sharding.errors import CorruptShardError, SampleError
from sharding.write.writer import ShardWriter

DOCUMENTS = st.lists(st.lists(st.integers(0, 65534), max_size=40), min_size=1, max_size=30)


def write(pattern: Path, documents: list[Any], **options: Any) -> None:
    with ShardWriter(str(pattern), **options) as writer:
        for document in documents:
            writer.write({"tokens": document})


def documents_of(dataset: ShardedDataset) -> list[list[int]]:
    return [dataset[i]["tokens"].tolist() for i in range(len(dataset))]


@settings(max_examples=25)
@given(documents=DOCUMENTS, max_count=st.integers(1, 9))
def test_megatron_documents_come_back(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], max_count: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    write(
        folder / "m-%03d.bin",
        documents,
        format="megatron",
        dtype="uint16",
        max_count=max_count,
        end_token=65535,
    )
    # A shard of empty documents alone would have no bytes; here each has its end.
    assert documents_of(ShardedDataset(str(folder / "m-*.bin"))) == [[*d, 65535] for d in documents]


@settings(max_examples=25)
@given(documents=DOCUMENTS, length=st.integers(1, 16))
def test_windows_of_token_shards_are_those_of_the_documents_in_a_row(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], length: int
) -> None:
    assume(sum(len(document) + 1 for document in documents) > length)
    folder = tmp_path_factory.mktemp("shards")
    write(folder / "t.bin", documents, format="tokens", dtype="int32", length=length, end_token=-1)
    flat = [token for document in documents for token in (*document, -1)]
    count = (len(flat) - 1) // length
    expected = [flat[i * length : i * length + length + 1] for i in range(count)]
    assert documents_of(ShardedDataset(str(folder / "t.bin"))) == expected


def test_what_the_reader_gives_counts_more_than_what_lies_beside(tmp_path: Path) -> None:
    write(tmp_path / "t.bin", [range(100)], format="tokens", dtype="uint16", length=50)
    assert ShardedDataset(f"{tmp_path}/t.bin").schema["tokens"].shape == (51,)
    assert ShardedDataset(f"{tmp_path}/t.bin", length=9).schema["tokens"].shape == (10,)


def test_a_token_shard_is_described_beside_it(tmp_path: Path) -> None:
    write(
        tmp_path / "t.bin", [[1, 2], [3]], format="tokens", dtype="uint8", end_token=0, tokenizer="sha256:ab"
    )
    assert json.loads((tmp_path / "t.json").read_text()) == {
        "format": "tokens",
        "dtype": "uint8",
        "length": None,
        "end_token": 0,
        "tokenizer": "sha256:ab",
        "num_tokens": 5,
        "num_documents": 2,
    }


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (b"no json", "is no JSON"),
        (b'{"format": "tokens", "dtype": "uint16", "num_tokens": 99}', "tells 99 tokens of 'uint16'"),
        (b'{"format": "tokens", "dtype": "float32", "num_tokens": 4}', "do not fit its 8 bytes"),
        (b'{"format": "tokens", "dtype": 7, "num_tokens": 4}', "do not fit its 8 bytes"),
        (b'{"format": "tokens", "dtype": "uint16", "num_tokens": 4, "length": 0}', "length 0"),
        (b'{"format": "tokens", "dtype": "uint16", "num_tokens": 4}', "needs length="),
        (b'{"format": "something else"}', "needs length="),
    ],
)
def test_a_description_that_does_not_fit_is_refused(tmp_path: Path, told: bytes, reason: str) -> None:
    (tmp_path / "t.bin").write_bytes(bytes(8))
    (tmp_path / "t.json").write_bytes(told)
    with pytest.raises(CorruptShardError, match=reason):
        ShardedDataset(f"{tmp_path}/t.bin")


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        ({"tokens": [70000]}, "token 70000 does not fit dtype uint16"),
        ({"tokens": [-1]}, "token -1 does not fit"),
        ({"tokens": [0.5]}, r"must be integers \[n\], got float64"),
        ({"tokens": [[1, 2]]}, r"got int64 \[1, 2\]"),
        ({"text": "a"}, "has the field 'tokens' alone, got text"),
        ({}, "got none"),
    ],
)
def test_a_document_that_is_none_is_refused_and_writing_goes_on(
    tmp_path: Path, sample: dict[str, Any], reason: str
) -> None:
    with ShardWriter(f"{tmp_path}/m.bin", format="megatron", dtype="uint16") as writer:
        writer.write({"tokens": [1]})
        with pytest.raises(SampleError, match=reason) as caught:
            writer.write({"__key__": "doc 7", **sample})
        writer.write({"tokens": np.array([2], np.int64)})
    assert caught.value.key == "doc 7"
    assert documents_of(ShardedDataset(f"{tmp_path}/m.bin")) == [[1], [2]]


@pytest.mark.parametrize(
    ("pattern", "options", "reason"),
    [
        ("t.bin", {}, "needs dtype="),
        ("t.bin", {"dtype": "float32"}, "must be an integer type"),
        ("t.bin", {"dtype": "nonsense"}, "must be an integer type"),
        ("t.bin", {"dtype": "uint8", "end_token": 256}, "end_token 256 does not fit"),
        ("t.bin", {"dtype": "uint8", "length": 0}, "length must be >= 1"),
        ("t.bin", {"dtype": "uint32", "format": "megatron"}, "Megatron has no dtype 'uint32'"),
        ("t.tar", {"dtype": "uint8", "format": "tokens"}, "end in .bin"),
        ("t.tar", {"length": 5}, "length= is for formats tokens and megatron, not for 'tar'"),
        ("t.parquet.gz", {}, "compresses inside"),
        ("t.csv", {}, "format must be one of tar, parquet"),
    ],
)
def test_options_that_fit_nothing_are_refused(
    tmp_path: Path, pattern: str, options: dict[str, Any], reason: str
) -> None:
    with (
        pytest.raises((ValueError, SampleError), match=reason),
        ShardWriter(f"{tmp_path}/{pattern}", **options) as writer,
    ):
        writer.write({"tokens": [1]})
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_no_part_of_a_token_shard(tmp_path: Path) -> None:
    documents = [[1, 2], [3], [2**40]]
    with pytest.raises(SampleError):
        write(tmp_path / "m-%d.bin", documents, format="megatron", dtype="int32", max_count=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("m-0.bin", "m-0.idx", "m-0.json"),
        *("m-1.bin", "m-1.idx", "m-1.json"),
    ]


ROWS: list[dict[str, Any]] = [
    {"text": f"line {i} ü", "n": i, "x": i / 4, "list": np.arange(i % 5), "nested": {"a": [{"b": i}]}}
    for i in range(50)
]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "arrow", "arrows", "parquet"])
def test_rows_come_back(tmp_path: Path, ending: str) -> None:
    with ShardWriter(f"{tmp_path}/r-%d.{ending}", max_count=20, row_group_size=6) as writer:
        for row in ROWS:
            writer.write(row)
    dataset = ShardedDataset(f"{tmp_path}/r-*.{ending}")
    assert [shard.num_samples for shard in writer.shards] == [20, 20, 10]
    leaf = "nested" if "nested" in dataset.schema else "nested.a"
    for i, row in enumerate(ROWS):
        sample = dataset[i]
        assert (sample["text"], int(sample["n"]), float(sample["x"])) == (row["text"], row["n"], row["x"])
        assert sample["list"].tolist() == row["list"].tolist()
        nested = row["nested"] if leaf == "nested" else row["nested"]["a"]
        assert sample[leaf] == nested


@pytest.mark.parametrize("value", [b"bytes", float("nan"), object()])
def test_json_lines_hold_what_json_has(tmp_path: Path, value: object) -> None:
    with ShardWriter(f"{tmp_path}/r.jsonl") as writer:
        writer.write({"n": np.int64(1)})
        with pytest.raises(SampleError, match="cannot be written as JSON"):
            writer.write({"n": value})
        writer.write({"n": 2})
    assert (tmp_path / "r.jsonl").read_text() == '{"n":1}\n{"n":2}\n'


def test_a_second_run_writes_the_same_bytes(tmp_path: Path) -> None:
    contents: list[dict[str, bytes]] = []
    for run in range(2):
        folder = tmp_path / str(run)
        documents: list[NDArray[Any]] = [np.arange(n) for n in range(30)]
        write(folder / "m-%d.bin", documents, format="megatron", dtype="int32", max_count=7)
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert contents[0] == contents[1]
