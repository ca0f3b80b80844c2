"""Pairs of answers lie in one batch, packed or padded, and come apart into two documents each."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from text_kit import MARKED, TEXTS, chat, ids_of, tokenizer, write_jsonl

from dataflow import (
    Bucketed,
    ChatTemplate,
    DataLoader,
    Packed,
    PreferencePairs,
    SampleError,
    ShardedDataset,
    TokenBudget,
    Tokenize,
    split_pairs,
)
from dataflow.batch.packed import PackedRows, PaddedRows

__all__ = ["tokenizer"]
NUM_PAIRS = 97
COLUMNS = ["input_ids", "loss_mask"]
Pair = tuple[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Pair]]:
    """A file of tokenized pairs, both answers in one list beside the length of the first; and the pairs."""
    rng = np.random.default_rng(0)
    sides = [
        [tuple(rng.integers(1, 1000, rng.integers(1, 20)).tolist()) for _ in range(2)]
        for _ in range(NUM_PAIRS)
    ]
    pairs: list[Pair] = [(chosen, rejected) for chosen, rejected in sides]
    table = {
        "input_ids": pa.array([[*a, *b] for a, b in pairs], pa.list_(pa.int32())),
        "loss_mask": pa.array([[n % 2 for n in (*a, *b)] for a, b in pairs], pa.list_(pa.int8())),
        "chosen_length": [len(a) for a, _ in pairs],
    }
    path = tmp_path_factory.mktemp("pairs") / "x.parquet"
    pq.write_table(pa.table(table), path, row_group_size=10)
    return path, pairs


def split_columns(batch: dict[str, Any]) -> dict[str, Any]:
    return split_pairs(batch, pad={"loss_mask": -1})


def batches_of(path: Path, batching: Any, batch_size: int = 1) -> list[dict[str, Any]]:
    dataset = ShardedDataset(path, batch_transform=split_columns)
    with DataLoader(dataset, batch_size, shuffle=True, batching=batching) as loader:
        return list(loader)


def test_packed_pairs_are_two_segments_side_by_side(stored: tuple[Path, list[Pair]]) -> None:
    path, pairs = stored
    batching = Packed(64, columns=COLUMNS, overlong="error")
    found: list[Pair] = []
    for batch in batches_of(path, batching, batch_size=3):
        rows = batch["input_ids"]
        assert isinstance(rows, PackedRows)
        pieces = zip(*(part.tolist() for part in rows.segments), strict=True)
        documents, taken = [], torch.zeros_like(rows.segment_ids)
        for row, start, begin, length in pieces:
            inside = slice(start, start + length)
            documents.append(tuple(rows.tokens[row, inside].tolist()))
            assert begin == 0
            assert rows.positions[row, inside].tolist() == list(range(length))
            assert len(set(rows.segment_ids[row, inside].tolist())) == 1
            assert batch["loss_mask"][row, inside].tolist() == [n % 2 for n in documents[-1]]
            taken[row, inside] += 1
        assert torch.equal(taken > 0, rows.segment_ids > 0)
        assert int(taken.max()) == 1
        flat = rows.segment_ids.flatten()
        places = (flat[1:] != flat[:-1]).nonzero().flatten() + 1
        row_ends = torch.arange(1, len(rows.tokens)) * 64
        bounds = {0, flat.numel(), *places.tolist(), *row_ends.tolist()}
        assert rows.cu_seqlens.tolist() == sorted(bounds)
        assert rows.cu_seqlens.dtype == torch.int32
        assert rows.max_seqlen == int(rows.cu_seqlens.diff().max())
        found += zip(documents[::2], documents[1::2], strict=True)
    assert sorted(found) == sorted(pairs)


def test_segments_of_a_pair_do_not_see_each_other(stored: tuple[Path, list[Pair]]) -> None:
    path, _ = stored
    rows = batches_of(path, Packed(64, columns=COLUMNS, overlong="error"))[0]["input_ids"]
    mask = rows.attention_mask(causal=False)[0, 0]
    first, second = rows.segments.length[:2].tolist()
    assert mask[:first, :first].all()
    assert not mask[:first, first:].any()
    assert mask[first : first + second, first : first + second].all()
    targets = rows.targets()[0]
    assert targets[first - 1] == targets[first + second - 1] == -100


@pytest.mark.parametrize("batching", [TokenBudget(200, columns=COLUMNS), Bucketed(7, columns=COLUMNS)])
def test_padded_pairs_are_all_preferred_answers_and_then_all_rejected_ones(
    stored: tuple[Path, list[Pair]], batching: Any
) -> None:
    path, pairs = stored
    found: list[Pair] = []
    for batch in batches_of(path, batching):
        rows = batch["input_ids"]
        assert isinstance(rows, PaddedRows)
        assert (
            rows.tokens.shape
            == batch["loss_mask"].shape
            == (2 * len(batch["chosen_length"]), int(rows.lengths.max()))
        )
        answers = [tuple(row[:n].tolist()) for row, n in zip(rows.tokens, rows.lengths.tolist(), strict=True)]
        for row, mask, answer in zip(rows.tokens, batch["loss_mask"], answers, strict=True):
            assert mask[: len(answer)].tolist() == [n % 2 for n in answer]
            assert not row[len(answer) :].any()
            assert (mask[len(answer) :] == -1).all()
        half = len(answers) // 2
        found += zip(answers[:half], answers[half:], strict=True)
    assert sorted(found) == sorted(pairs)


@pytest.mark.parametrize(
    "batching", [Packed(64, "input_ids", overlong="error"), TokenBudget(200, "input_ids")]
)
def test_pairs_come_apart_on_the_device_where_they_lie(
    stored: tuple[Path, list[Pair]], batching: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = ShardedDataset(stored[0], columns=["input_ids", "chosen_length"])
    with DataLoader(dataset, batching=batching) as loader:
        batch = next(iter(loader))
    expected = split_pairs(batch)["input_ids"]
    for name in ("arange", "zeros"):  # what says no device lies elsewhere, as host memory does from a GPU
        monkeypatch.setattr(torch, name, partial(getattr(torch, name), device="meta"))
    rows = split_pairs(batch)["input_ids"]
    assert all(map(torch.equal, rows[:2], expected[:2]))
    if isinstance(rows, PackedRows):
        assert all(map(torch.equal, rows.segments, expected.segments))


def test_a_pair_that_was_cut_is_an_error(stored: tuple[Path, list[Pair]]) -> None:
    path, _ = stored
    for overlong, says in (
        ("split", "give Packed overlong='error'|it is not whole"),
        ("truncate", "it is not whole"),
    ):
        batching = Packed(16, columns=COLUMNS, overlong=overlong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=says):
            batches_of(path, batching, batch_size=4)
    with pytest.raises(ValueError, match="neither packed nor padded, but Tensor"):
        split_pairs({"input_ids": torch.zeros(2, 2), "chosen_length": [1, 1]})


def test_answers_are_tokenized_together_and_joined(tokenizer: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "why? ", "chosen": TEXTS[i % 5 + 1], "rejected": TEXTS[i % 4 + 2], "id": i}
        for i in range(12)
    ]
    stage = PreferencePairs(Tokenize(tokenizer, eos="<|end|>"), prompt="prompt")
    dataset = ShardedDataset(write_jsonl(tmp_path / "x.jsonl", rows), transform=stage)
    with DataLoader(dataset, 5, num_workers=0) as loader:
        batches = list(loader)
    ids = [row.tolist() for batch in batches for row in batch["input_ids"].rows()]
    lengths = [n for batch in batches for n in batch["chosen_length"].tolist()]
    for row, tokens, length in zip(rows, ids, lengths, strict=True):
        assert tokens[:length] == [*ids_of(tokenizer, f"why? {row['chosen']}"), 2]
        assert tokens[length:] == [*ids_of(tokenizer, f"why? {row['rejected']}"), 2]
    assert batches[0].keys() == {"id", "input_ids", "chosen_length"}


def test_answers_may_be_chats_with_masks_of_their_own(tokenizer: Path) -> None:
    stage = ChatTemplate(tokenizer, template=MARKED)
    pairs = PreferencePairs(stage, prompt="prompt")
    question, chosen, rejected = (
        [{"role": r, "content": c}] for r, c in (("user", "why?"), ("assistant", "so"), ("assistant", "no!"))
    )
    told = {"prompt": question, "chosen": chosen, "rejected": rejected}
    sample, of_text = pairs({**told}), pairs({name: json.dumps(value) for name, value in told.items()})
    assert of_text["input_ids"].equal(sample["input_ids"])
    sides = [stage({"messages": question + answer}) for answer in (chosen, rejected)]
    for column in "input_ids", "loss_mask":
        assert sample[column].equal(torch.cat([side[column] for side in sides]))
    assert sample["chosen_length"] == len(sides[0]["input_ids"])
    whole = PreferencePairs(stage)({"chosen": chat(2), "rejected": chat(4)})
    assert whole["chosen_length"] == len(stage({"messages": chat(2)})["input_ids"])
    assert pairs.fingerprint != PreferencePairs(stage).fingerprint != stage.fingerprint
    assert pairs.fingerprint.startswith(f"{stage.file.hash}-")


def test_an_answer_without_tokens_is_a_bad_sample(tokenizer: Path, tmp_path: Path) -> None:
    shard = write_jsonl(
        tmp_path / "x.jsonl", [{"chosen": "x", "rejected": "y"}, {"chosen": "x", "rejected": ""}]
    )
    dataset = ShardedDataset(shard, transform=PreferencePairs(Tokenize(tokenizer)))
    with DataLoader(dataset, 2, num_workers=0) as loader, pytest.raises(SampleError) as caught:
        list(loader)
    assert (caught.value.key, caught.value.stage) == ("1", "transform")
    assert "column 'rejected' has no tokens, so there is no pair" in caught.value.reason
