"""Chats with pictures in packed rows: planned by headers, made with their row, each chat as it is alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets_kit import rank
from vision_kit import TEMPLATE, vision_chat, write_vision_tokenizer

from dataflow import DataLoader, Packed, Ragged, ShardedDataset, VisionChat

NUM_CHATS = 60
PACKED = Packed(
    400,
    columns=["input_ids", "loss_mask", "mrope"],
    whole=["pixel_values", "image_grid_thw"],
    overlong="error",
    window=NUM_CHATS,
)


class CountedChat(VisionChat):
    """Counts the chats that it made."""

    made = 0

    def deferred(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.made += 1
        return super().deferred(sample)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    write_vision_tokenizer(folder / "tokenizer.json")
    part = pa.struct([("type", pa.string()), ("text", pa.string())])
    message = pa.struct([("role", pa.string()), ("content", pa.list_(part))])
    schema = pa.schema({"id": pa.int64(), "messages": pa.list_(message), "images": pa.list_(pa.binary())})
    rows = [{"id": n, **vision_chat(n, 30, 120)} for n in range(NUM_CHATS)]
    pq.write_table(pa.Table.from_pylist(rows, schema), folder / "chats.parquet", row_group_size=8)
    return folder


@pytest.fixture(autouse=True)
def kept_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def opened(folder: Path, patches: Any = "uint8") -> ShardedDataset:
    chats = CountedChat(
        folder / "tokenizer.json",
        family="qwen2_5_vl",
        template=TEMPLATE,
        min_pixels=28**2,
        max_pixels=9 * 28**2,
        patches=patches,
    )
    return ShardedDataset(folder / "chats.parquet", decode={"images": None}, transform=chats)


def loader_of(folder: Path, place: int = 0, places: int = 1, batching: Packed = PACKED) -> DataLoader:
    options = {"shuffle": True, "batching": batching, "tail": "uneven", "num_workers": 0}
    return DataLoader(opened(folder), 2, **options, topology=rank(place, places))


def chats_of(batch: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each chat of a batch by its number, with what it brought."""
    assert isinstance(batch["pixel_values"], Ragged)
    rows, (pixels, grids) = batch["input_ids"], ([*batch[name].rows()] for name in PACKED.whole)
    segments = rows.segments
    for at, (row, start, length) in enumerate(
        zip(segments.row, segments.start, segments.length, strict=True)
    ):
        place = (row, slice(start, start + length))
        yield (
            int(batch["id"][at]),
            {
                "input_ids": rows.tokens[place],
                "loss_mask": batch["loss_mask"][place],
                "mrope": batch["mrope"][place],
                "pixel_values": pixels[at],
                "image_grid_thw": grids[at],
            },
        )


def check(chats: list[tuple[int, dict[str, Any]]], alone: ShardedDataset) -> None:
    for number, chat in chats:
        expected = alone[number]
        for name, value in chat.items():
            assert torch.equal(value, expected[name].to(value.dtype)), (number, name)


def test_each_chat_of_packed_rows_is_what_it_is_alone_on_any_number_of_ranks(folder: Path) -> None:
    alone = opened(folder)
    for places in (1, 2):
        chats = []
        for place in range(places):
            with loader_of(folder, place, places) as loader:
                chats += [chat for batch in loader for chat in chats_of(batch)]
        assert sorted(number for number, _ in chats) == [*range(NUM_CHATS)]
        check(chats[::7], alone)


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_float32_patches_are_in_a_row_what_they_are_alone(folder: Path, workers: Any) -> None:
    """In rows they are computed where these lie."""
    alone = opened(folder, "float32")
    options: dict[str, Any] = {"batching": PACKED, "num_workers": 1, "workers": workers, "tail": "uneven"}
    with DataLoader(opened(folder, "float32"), 2, shuffle=True, **options) as loader:
        chats = [chat for batch in loader for chat in chats_of(batch)]
    assert sorted(number for number, _ in chats) == [*range(NUM_CHATS)]
    assert {chat["pixel_values"].dtype for _, chat in chats} == {torch.float32}
    check(chats, alone)


def test_pixels_are_made_with_their_row_from_the_first_run_on(folder: Path) -> None:
    with loader_of(folder) as loader:
        made = loader.dataset.transform  # type: ignore[attr-defined]
        num_chats = 0
        assert made.made == 0
        for number, batch in enumerate(loader, 1):
            num_chats += len(batch["id"])
            assert made.made == num_chats, f"after {number}"
        assert (number, num_chats) == (len(loader), NUM_CHATS)


def test_a_resumed_loader_goes_on_with_the_same_chats(folder: Path) -> None:
    with loader_of(folder) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
        rest = [[number for number, _ in chats_of(batch)] for batch in batches]
    with loader_of(folder) as loader:
        loader.load_state_dict(state)
        assert [[number for number, _ in chats_of(batch)] for batch in loader] == rest


def test_rows_of_like_patches_come_together_and_those_without_have_an_empty_tensor(folder: Path) -> None:
    figures = {}
    for balance in ("", "pixel_values"):
        batching = replace(PACKED, balance=balance or None, balance_group=4, budget={"pixel_values": 200})
        sizes = []
        with loader_of(folder, batching=batching) as loader:
            list(loader)  # later loaders know all lengths
        for place in range(2):
            with loader_of(folder, place, 2, batching) as loader:
                patches = [batch["pixel_values"].values for batch in loader]
                stats = loader.stats().lengths
            assert {(one.dtype, *one.shape[1:]) for one in patches} == {(torch.uint8, 588)}
            sizes.append([len(one) for one in patches])
        paid = [step for step in zip(*sizes, strict=False) if any(step)]
        figures[balance] = sum(max(step) / sum(step) * 2 for step in paid) / len(paid)
        assert stats is not None
        assert stats.cost_max_over_mean == (pytest.approx(figures[balance]) if balance else 0.0)
    assert figures["pixel_values"] < figures[""]
