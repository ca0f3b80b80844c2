"""Text is packed as it is tokenized: every document once, at its place, and too long ones as was asked."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from text_kit import MARKED, TEXTS, chat, ids_of, tokenizer, write_jsonl

from dataflow import (
    Bucketed,
    ChatTemplate,
    DataLoader,
    Packed,
    PackedRows,
    PreferencePairs,
    ShardedDataset,
    TokenBudget,
    Tokenize,
    split_pairs,
)
from sharding.errors import SampleError

__all__ = ["tokenizer"]
END = 2
ROW = 24
Document = tuple[int, ...]


@pytest.fixture(scope="module")
def documents(tokenizer: Path) -> list[Document]:
    return [(*ids_of(tokenizer, TEXTS[i % len(TEXTS)] * (1 + i % 2)), END) for i in range(60)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"id": i, "text": TEXTS[i % len(TEXTS)] * (1 + i % 2)} for i in range(60)]
    return write_jsonl(tmp_path_factory.mktemp("texts") / "x.jsonl", rows)


def pieces_in(batch: dict[str, Any], column: str = "input_ids") -> list[tuple[int, Document]]:
    """Where each piece begins in its document, and its tokens."""
    rows = batch["input_ids"]
    assert isinstance(rows, PackedRows)
    values = rows.tokens if column == "input_ids" else batch[column]
    parts = zip(*(part.tolist() for part in rows.segments), strict=True)
    return [(begin, tuple(values[row, at : at + n].tolist())) for row, at, begin, n in parts]


def test_every_document_is_packed_once_with_its_other_columns(
    tokenizer: Path, texts: Path, documents: list[Document]
) -> None:
    dataset = ShardedDataset(texts, transform=Tokenize(tokenizer, eos=END))
    with DataLoader(dataset, 3, shuffle=True, batching=Packed(ROW, "input_ids")) as loader:
        found: dict[int, dict[int, Document]] = {}
        for batch in loader:
            for number, (begin, tokens) in zip(batch["id"].tolist(), pieces_in(batch), strict=True):
                found.setdefault(number, {})[begin] = tokens
        stats = loader.stats().lengths
    assert stats is not None
    assert stats.tokens == sum(map(len, documents))
    for number, document in enumerate(documents):
        assert sum((found[number][begin] for begin in sorted(found[number])), ()) == document


def test_documents_longer_than_a_row_are_truncated_or_refused(
    tokenizer: Path, texts: Path, documents: list[Document]
) -> None:
    dataset = ShardedDataset(texts, transform=Tokenize(tokenizer, eos=END))
    truncating = Packed(ROW, "input_ids", overlong="truncate")
    with DataLoader(dataset, 3, batching=truncating) as loader:
        found = Counter(tokens for batch in loader for _, tokens in pieces_in(batch))
    assert found == Counter(document[:ROW] for document in documents)
    refusing = Packed(ROW, "input_ids", overlong="error")
    says = r"x.jsonl.*column 'input_ids' has \d+ elements, more than the 24 that Packed takes"
    with pytest.raises(SampleError, match=says), DataLoader(dataset, 3, batching=refusing) as loader:
        list(loader)
    fitting = ShardedDataset(texts, transform=Tokenize(tokenizer, eos=END, max_length=ROW))
    with DataLoader(fitting, 3, batching=refusing) as loader:
        found = Counter(tokens for batch in loader for _, tokens in pieces_in(batch))
    assert found == Counter((*document[: min(len(document), ROW) - 1], END) for document in documents)


def test_empty_documents_are_counted(tokenizer: Path, texts: Path) -> None:
    with DataLoader(
        ShardedDataset(texts, transform=Tokenize(tokenizer)), 3, batching=Packed(ROW, "input_ids")
    ) as loader:
        list(loader)
        stats = loader.stats().lengths
    assert stats is not None
    assert stats.empty == sum(not TEXTS[i % len(TEXTS)] for i in range(60))


def test_masks_of_chats_ride_along(tokenizer: Path, tmp_path: Path) -> None:
    chats = [chat(number) for number in range(30)]
    stage = ChatTemplate(tokenizer, template=MARKED)
    shard = write_jsonl(tmp_path / "x.jsonl", [{"messages": messages} for messages in chats])
    batching = Packed(240, columns=["input_ids", "loss_mask"], overlong="error")
    found: Counter[tuple[Document, Document]] = Counter()
    with DataLoader(ShardedDataset(shard, transform=stage), 2, shuffle=True, batching=batching) as loader:
        for batch in loader:
            targets = batch["input_ids"].targets(mask=batch["loss_mask"])
            assert int((targets >= 0).sum()) == int(batch["loss_mask"].sum())
            pairs = zip(pieces_in(batch), pieces_in(batch, "loss_mask"), strict=True)
            found.update((tokens, mask) for (_, tokens), (_, mask) in pairs)
    samples = [stage({"messages": messages}) for messages in chats]
    assert found == Counter(
        (tuple(sample["input_ids"].tolist()), tuple(sample["loss_mask"].tolist())) for sample in samples
    )


@pytest.mark.parametrize(
    "batching",
    [
        Packed(80, "input_ids", overlong="error"),
        TokenBudget(300, "input_ids"),
        Bucketed(5, "input_ids", boundaries=(20, 40)),
    ],
)
def test_pairs_come_whole_in_one_batch(tokenizer: Path, tmp_path: Path, batching: Any) -> None:
    rows = [{"id": i, "chosen": TEXTS[i % 4 + 1], "rejected": TEXTS[i % 3 + 2]} for i in range(40)]
    stage = PreferencePairs(Tokenize(tokenizer, eos=END))
    dataset = ShardedDataset(
        write_jsonl(tmp_path / "x.jsonl", rows), transform=stage, batch_transform=split_pairs
    )
    found = {}
    with DataLoader(dataset, shuffle=True, batching=batching) as loader:
        for batch in loader:
            if isinstance(batch["input_ids"], PackedRows):
                tokens = [piece for _, piece in pieces_in(batch)]
                pairs = zip(tokens[::2], tokens[1::2], strict=True)
            else:
                padded, lengths = batch["input_ids"]
                tokens = [tuple(row[:n].tolist()) for row, n in zip(padded, lengths.tolist(), strict=True)]
                pairs = zip(tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :], strict=True)
            found |= dict(zip(batch["id"].tolist(), pairs, strict=True))
    for row in rows:
        sides = (ids_of(tokenizer, str(row[name])) for name in ("chosen", "rejected"))
        assert found[row["id"]] == tuple((*ids, END) for ids in sides)
