"""Arrays [n, ...] that a transform makes: whole beside what is cut, cut alike, and in plain batches."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from forked_kit import fast_ranks
from parameters_kit import in_pairs

from dataflow import Bucketed, DataLoader, Optional, Packed, PackedRows, Ragged, ShardedDataset, TokenBudget
from dataflow.batch.measured import Lists, MeasuredSamples, SampleForms
from dataflow.batch.samples import GatherSamples, late_bytes, ragged
from dataflow.ragged import LateArray
from prefetch.engine.builds import ChunkQueue
from sharding.errors import SampleError
from sharding.lengths.batching import Batching

NUM = 40
KNOWN = [1 + n % 9 for shard in range(2) for n in range(shard, NUM, 2)]
"""Lengths of all samples, in file order: with them, samples are made when their row is built."""
BATCHINGS: dict[str, Any] = {
    "packed": lambda **whole: Packed(16, overlong="error", window=16, **whole),
    "budget": lambda **whole: TokenBudget(48, window=16, **whole),
    "buckets": lambda **whole: Bucketed(4, boundaries=3, window=16, **whole),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for shard in range(2):
        rows = [json.dumps({"n": n}) + "\n" for n in range(shard, NUM, 2)]
        (tmp_path / f"shard{shard}.jsonl").write_text("".join(rows))
    return tmp_path


def pixels_of(n: int) -> np.ndarray:
    """Of sample n: none to three patches [2, 3], each value of which tells its place."""
    return np.arange(n % 4 * 6, dtype=np.float32).reshape(-1, 2, 3) + 100 * n


def chat(sample: Mapping[str, Any]) -> dict[str, Any]:
    n = int(sample["n"])
    return {"tokens": [n + 1] * (1 + n % 9), "n": n, "pixels": pixels_of(n)}


def loader_of(folder: Path, batching: Batching | None, transform: Any = chat, **options: Any) -> DataLoader:
    skip = {"on_error": options.pop("on_error")} if "on_error" in options else {}
    size = {} if isinstance(batching, TokenBudget | Bucketed) else {"batch_size": 3}
    dataset = ShardedDataset(f"{folder}/*.jsonl", transform=transform, block_bytes=100, **skip)
    return DataLoader(
        dataset, batching=batching, **{"shuffle": True, "seed": 2, "num_workers": 0, **size, **options}
    )


def check_pixels(batch: Mapping[str, Any]) -> None:
    """Every segment has the pixels of its own sample, in one tensor."""
    assert isinstance(batch["pixels"], Ragged)
    assert batch["pixels"].values.shape[1:] == (2, 3)
    assert batch["pixels"].values.dtype == torch.float32
    for n, rows in zip(batch["n"].tolist(), batch["pixels"].rows(), strict=True):
        assert np.array_equal(rows.numpy(), pixels_of(n))


@pytest.mark.parametrize(
    ("kind", "workers", "whole", "lengths"),
    in_pairs([*BATCHINGS], ["thread", "process"], [["pixels"], {"pixels": Optional()}], [None, KNOWN]),
)
def test_arrays_come_whole_as_one_tensor_with_each_segment(
    folder: Path, kind: str, workers: Any, whole: Any, lengths: Any
) -> None:
    with loader_of(
        folder, BATCHINGS[kind](whole=whole, lengths=lengths), num_workers=1, workers=workers
    ) as loader:
        numbers = []
        for batch in loader:
            check_pixels(batch)
            numbers += batch["n"].tolist()
    assert sorted(numbers) == [*range(NUM)]


def numbers_of_rank(folder: Path) -> list[int]:
    batching = BATCHINGS["packed"](whole={"pixels": Optional()})
    numbers = []
    with loader_of(folder, batching, batch_size=1, tail="uneven") as loader:
        for batch in loader:
            check_pixels(batch)
            numbers += batch["n"].tolist()
    return numbers


def test_ranks_that_measure_together_send_arrays_to_each_other(folder: Path) -> None:
    assert sorted(chain(*fast_ranks(numbers_of_rank, 2, args=(folder,), timeout_s=60))) == [*range(NUM)]


@pytest.mark.parametrize("made", ["tensor", "array"])
@pytest.mark.parametrize(
    "batching", [Packed(5, columns=["y", "patches"], window=16), TokenBudget(20, columns=["y", "patches"])]
)
def test_arrays_are_laid_into_rows_beside_what_is_cut(folder: Path, batching: Any, made: str) -> None:
    """Patches of images at their own resolution: n of them a sample, cut where rows end."""

    def patched(sample: Mapping[str, Any]) -> dict[str, Any]:
        places = np.arange(1 + int(sample["n"]) % 9)
        patches = (np.stack([places, places + sample["n"]], axis=1) + 1).astype(np.uint8)
        return {
            "y": places,
            "patches": torch.from_numpy(patches) if made == "tensor" else patches,
            "n": sample["n"],
        }

    with loader_of(folder, batching, patched) as loader:
        total = 0
        for batch in loader:
            rows, patches = batch["y"], batch["patches"]
            assert patches.shape == (*rows.tokens.shape, 2)
            assert patches.dtype == torch.uint8  # as stored: pixels are many
            if isinstance(rows, PackedRows):
                inside, lengths = rows.segment_ids > 0, rows.segments.length
            else:
                inside, lengths = torch.arange(rows.tokens.shape[1]) < rows.lengths[:, None], rows.lengths
            assert torch.equal(patches[inside][:, 0], (rows.tokens[inside] + 1).to(torch.uint8))
            own = batch["n"].repeat_interleave(lengths)
            assert torch.equal(patches[inside][:, 1], (rows.tokens[inside] + own + 1).to(torch.uint8))
            assert not patches[~inside].any()
            total += int(inside.sum())
    assert total == sum(1 + n % 9 for n in range(NUM))


def test_a_column_of_arrays_may_lead(folder: Path) -> None:
    with loader_of(folder, Packed(8, "pixels", overlong="error", window=16)) as loader:
        for batch in loader:
            rows = batch["pixels"]
            assert rows.tokens.shape == (*rows.segment_ids.shape, 2, 3)
            own = [pixels_of(n) for n in batch["n"].tolist()]
            assert np.array_equal(rows.tokens[rows.segment_ids > 0].numpy(), np.concatenate(own))


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_sample_may_lack_what_whole_names_as_optional(folder: Path, workers: Any) -> None:
    def lacking(sample: Mapping[str, Any]) -> dict[str, Any]:
        made = chat(sample)
        return made if len(made["pixels"]) else {"tokens": made["tokens"], "n": made["n"]}

    batching = Packed(16, overlong="error", window=16, whole={"pixels": Optional()})
    with loader_of(folder, batching, lacking, num_workers=1, workers=workers) as loader:
        for batch in loader:
            check_pixels(batch)
    with (
        loader_of(folder, Packed(16, overlong="error", whole=["pixels"]), lacking) as loader,
        pytest.raises(SampleError, match=r"whole={'pixels': Optional\(\)} lets samples"),
    ):
        list(loader)


def test_where_no_sample_has_an_array_its_default_says_of_which_type(folder: Path) -> None:
    def text(sample: Mapping[str, Any]) -> dict[str, Any]:
        return {"tokens": [1, 2], "pixels": None}

    whole = {"pixels": Optional(default=torch.zeros(0, 4, dtype=torch.uint8))}
    with loader_of(folder, Packed(8, overlong="error", whole=whole), text) as loader:
        for batch in loader:
            assert batch["pixels"].values.shape == (0, 4)
            assert batch["pixels"].values.dtype == torch.uint8
            assert not batch["pixels"].lengths.any()
            assert len(batch["pixels"].lengths) == len(batch["tokens"].segments.row)


@pytest.mark.parametrize("odd", [np.zeros((2, 2, 4), np.float32), np.zeros((2, 2, 3), np.uint8), [1, 2]])
@pytest.mark.parametrize(("batching", "lengths"), [("packed", None), ("packed", [1] * NUM), (None, None)])
def test_arrays_of_another_type_name_both_samples(
    folder: Path, odd: Any, batching: str | None, lengths: Any
) -> None:
    def changing(sample: Mapping[str, Any]) -> dict[str, Any]:
        array = torch.as_tensor(odd) if batching is None else odd
        return chat(sample) | {
            "tokens": [1],
            "pixels": array if sample["n"] == 31 else np.ones((1, 2, 3), "f4"),
        }

    changing.lists = ("pixels",)  # type: ignore[attr-defined]
    formed = BATCHINGS[batching](whole=["pixels"], lengths=lengths) if batching else None
    with (
        loader_of(folder, formed, changing, shuffle=False) as loader,
        pytest.raises(SampleError) as caught,
    ):
        list(loader)
    assert caught.value.shard.endswith("shard1.jsonl")
    assert caught.value.key == "15"
    assert "float32" in str(caught.value)
    assert "one shape but for the first dimension" in str(caught.value)
    if batching:
        others = "sample '.*' of" if lengths is None else "sample"
        assert re.search(f"but {others}", str(caught.value))
        with loader_of(folder, formed, changing, shuffle=False, on_error="skip") as loader:
            numbers = [n for batch in loader for n in batch["n"].tolist()]
            assert loader.stats().skipped_samples == 1
        assert sorted([*numbers, 31]) == [*range(NUM)]


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_plain_batches_have_the_arrays_that_a_transform_lists_as_one_tensor(
    folder: Path, workers: Any
) -> None:
    with loader_of(folder, None, Listed(), num_workers=1, workers=workers) as loader:
        for batch in loader:
            check_pixels(batch)


class Listed:
    lists = ("pixels", "tokens")

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        made = chat(sample)
        return made | {"tokens": torch.tensor(made["tokens"])}


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (Optional(mask=True), {}),
        (Optional(default=0), {}),
        ("maybe", {}),
        (Optional(), {"collate_fn": list}),
        (Optional(), {"transform": None}),
    ],
)
def test_what_whole_does_not_take_is_refused(folder: Path, rule: Any, options: Any) -> None:
    with pytest.raises(ValueError, match="whole"):
        loader_of(folder, TokenBudget(8, whole={"pixels": rule}), **options)


def test_what_is_known_of_arrays_keeps_no_batch() -> None:
    """A view of no element would keep the slab of the first batch for as long as its builder lives."""
    first = np.zeros((40, 3), np.float32)
    values, died = first[:], weakref.ref(first)
    lists = Lists(values, np.zeros(1, np.int64), np.full(1, 40))
    samples = MeasuredSamples(np.zeros(1, np.int64), {"pixels": lists})
    forms = SampleForms()
    assert forms.misfits(samples, GatherSamples(("pixels",)), lambda position: None) == {}
    del first, values, lists, samples
    assert died() is None
    empty = Ragged(torch.zeros(0), torch.zeros(2, dtype=torch.int64))
    assert forms.given("pixels", empty).values.shape == (0, 3)


def test_pixels_that_were_made_for_one_batch_are_not_copied_into_it() -> None:
    """They are where others may have the array, pieces are taken, or they lie in another order."""
    values = np.arange(12.0).reshape(6, 2)
    lists = Lists(values, np.array([3, 0]), np.array([3, 3]))
    in_order, all_rows = np.array([1, 0]), np.array([0, 1])
    assert np.shares_memory(lists.ragged(in_order, is_last=True).values.numpy(), values)
    for copied in (lists.ragged(in_order), lists.ragged(all_rows, is_last=True), lists.ragged(in_order[:1])):
        assert not np.shares_memory(copied.values.numpy(), values)
    assert np.array_equal(lists.ragged(in_order).values, values)
    assert np.array_equal(lists.ragged(all_rows, is_last=True).values, np.roll(values, 3, axis=0))


class LatePixels(LateArray):
    """The pixels of sample n, whose `write` notes where they went."""

    written: ClassVar[list[int]] = []

    def __init__(self, n: int) -> None:
        super().__init__(pixels_of(n).shape, "float32")
        self.n = n

    def write(self, out: np.ndarray, /) -> None:
        assert (out.shape, out.dtype) == (self.shape, self.dtype)
        out[:] = pixels_of(self.n)
        self.written.append(out.ctypes.data)


class LateChat:
    """`chat`, whose pixels are computed where their batch lies."""

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return chat(sample)

    def deferred(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        n = int(sample["n"])
        return {**chat(sample), "pixels": LatePixels(n)}


@pytest.mark.parametrize("lengths", [None, KNOWN])
@pytest.mark.parametrize("kind", BATCHINGS)
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_arrays_that_are_deferred_are_those_that_a_call_makes(
    folder: Path, kind: str, workers: Any, lengths: Any
) -> None:
    batching = BATCHINGS[kind](whole=["pixels"], lengths=lengths)
    with loader_of(folder, batching, LateChat(), num_workers=1, workers=workers) as loader:
        numbers = []
        for batch in loader:
            check_pixels(batch)
            numbers += batch["n"].tolist()
        assert sorted(numbers) == [*range(NUM)]


def test_a_deferred_array_is_written_once_and_into_its_batch(folder: Path) -> None:
    batching = BATCHINGS["packed"](whole=["pixels"], lengths=KNOWN)
    LatePixels.written.clear()
    with loader_of(folder, batching, LateChat()) as loader:
        dataset = loader.dataset
        for batch in loader:
            values = batch["pixels"].values
            first, end = values.data_ptr(), values.data_ptr() + values.nbytes
            assert all(first <= address < end for address in LatePixels.written)
            assert len(LatePixels.written) == np.count_nonzero(batch["pixels"].lengths)
            LatePixels.written.clear()
    assert isinstance(dataset[1]["pixels"], np.ndarray)  # type: ignore[index]


def test_deferred_arrays_are_counted_once_for_their_sample_and_their_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What making a row takes is reserved for each builder: counted twice, half of them have no room."""
    extra: dict[Any, list[int]] = {}
    end_room = ChunkQueue.end_room

    def note(queue: Any, build: Any, partial: Any) -> None:
        extra[transform].append(partial.made_bytes - partial.heap_bytes)
        end_room(queue, build, partial)

    monkeypatch.setattr(ChunkQueue, "end_room", note)
    batching, pixels = BATCHINGS["packed"](whole=["pixels"], lengths=KNOWN), []
    for transform in (chat, LateChat()):
        extra[transform] = []
        with loader_of(folder, batching, transform, num_workers=1, workers="thread") as loader:
            pixels = [batch["pixels"].values.nbytes for batch in loader]
    eager, late = extra.values()
    assert max(pixels) > 0
    assert len(eager) == len(late)
    assert all(0 <= after < before for before, after in zip(eager, late, strict=True))


def test_a_deferred_array_takes_what_it_holds_until_then() -> None:
    late = LateArray((4, 3), "float32", held_bytes=12)
    assert late_bytes([{"x": late, "n": 1}, {"x": np.zeros((0, 3), np.float32), "n": 2}]) == 4 * 3 * 4 - 12
    assert late_bytes([{"n": 1}, {"n": 2}]) == 0


def test_a_deferred_array_that_batching_does_not_take_is_a_tensor_as_ever(folder: Path) -> None:
    with loader_of(folder, BATCHINGS["packed"](lengths=KNOWN), LateChat()) as loader:
        for batch in loader:
            for n, pixels in zip(batch["n"].tolist(), batch["pixels"], strict=True):
                assert np.array_equal(pixels, pixels_of(n))


def test_deferred_arrays_beside_others_of_another_type_become_one_tensor_without_loss() -> None:
    wide = np.full((1, 2, 3), 1e-300)
    mixed = ragged([LatePixels(3), wide])
    assert isinstance(mixed, list)  # they have no form in common: who takes the batch names the sample
    assert np.array_equal(mixed[0], pixels_of(3))
    flat = [LateArray((0,), "float32"), np.array([1e-300])]
    assert ragged(flat).values.tolist() == [1e-300]


def test_large_arrays_go_where_the_batch_is_to_lie() -> None:
    asked = []

    def allocate(nbytes: int) -> np.ndarray:
        asked.append(np.zeros(nbytes, np.uint8))
        return asked[-1]

    small, large = np.ones((4, 2), np.float32), np.ones((4, 1 << 14), np.float32)
    gather = GatherSamples(("small", "large"))
    batch = gather([{"small": small, "large": large}] * 2, allocate)
    (memory,) = asked
    assert np.shares_memory(batch["large"].values.numpy(), memory)
    assert torch.equal(batch["large"].values, torch.ones(8, 1 << 14))
    assert torch.equal(batch["small"].values, torch.ones(8, 2))
