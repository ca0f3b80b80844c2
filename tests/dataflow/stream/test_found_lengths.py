"""Batches by length of samples that a transform makes, against the plain loop: each one made, then planned."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets_kit import rank
from ranks_kit import fast_ranks

from dataflow import Bucketed, DataLoader, Packed, ShardedDataset, Shuffle, TokenBudget
from dataflow.batch.packed import PackedRows
from sharding.errors import DataflowError, SampleError
from sharding.lengths.batching import Batching
from sharding.lengths.found_plan import FoundPlaces, finder_counts, finders
from sharding.lengths.unit_plan import units_key
from sharding.order.order import Order

NUM_DOCUMENTS = 211
BATCHINGS: dict[str, Callable[[], Batching]] = {
    "packed": lambda: Packed(16, window=40),
    "truncated": lambda: Packed(5, overlong="truncate", window=64),
    "budget": lambda: TokenBudget(48, window=40, multiple=2),
    "buckets": lambda: Bucketed(5, boundaries=3, window=40),
}


def length_of(i: int) -> int:
    return (i * 7919) % 23


def write(folder: Path, num: int = NUM_DOCUMENTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(3):
        rows = [{"n": i, "text": "x" * length_of(i)} for i in range(shard, num, 3)]
        (folder / f"shard{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "data")


class CountedTokens:
    """A transform that notes what it made, and a random number that tells the epoch, which may be the next."""

    def __init__(self) -> None:
        self.made: Counter[tuple[int, int]] = Counter()

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        self.made[sample["n"], int(rng.integers(1 << 60))] += 1
        return tokens_of(sample)


def tokens_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    assert len(sample["text"]) == length_of(sample["n"])
    return {"tokens": document(sample["n"]), "n": sample["n"]}


def document(i: int) -> list[int]:
    """The tokens of text i: i * 100, i * 100 + 1, ..., one for each letter."""
    return [i * 100 + k for k in range(length_of(i))]


def loader_of(folder: Path, batching: Batching, transform: Any = tokens_of, **options: Any) -> DataLoader:
    rows = {"batch_size": 3} if isinstance(batching, Packed) else {}
    options = {"shuffle": Shuffle("window", 2), "seed": 5, "num_workers": 0, **rows, **options}
    dataset = {name: options.pop(name) for name in ("on_error", "batch_transform") if name in options}
    opened = ShardedDataset(str(folder), transform=transform, block_bytes=400, **dataset)
    return DataLoader(opened, batching=batching, **options)


# ---- the oracle ---------------------------------------------------------------------------------------


def units_of(loader: DataLoader, epoch: int = 0) -> list[list[list[int]]]:
    """Of every unit the pieces' tokens: every document is made, and each megabatch planned alone."""
    dataset, batching = loader.dataset, loader.batching
    assert batching is not None
    order = Order(dataset.catalog.blocks.num_samples, loader.shuffle, seed=loader.seed, epoch=epoch)
    in_files = [i for shard in range(3) for i in range(shard, len(dataset), 3)]
    documents = [document(in_files[sample]) for sample in order.samples(np.arange(len(dataset)))]
    key_of = units_key(loader.seed, epoch, shuffled=loader.shuffle.kind != "none")
    places = FoundPlaces(batching.with_window(1), len(dataset), key_of)
    out = []
    for megabatch in range(places.num_megabatches):
        first, end = places.bounds[megabatch : megabatch + 2].tolist()
        units = places.cut(megabatch, np.array([len(d) for d in documents[first:end]]))
        columns = zip(units.pieces.position, units.pieces.begin, units.pieces.length, strict=True)
        pieces = [documents[first + p][b : b + n] for p, b, n in columns]
        out += [pieces[a:b] for a, b in zip(units.first[:-1], units.first[1:], strict=True)]
    return out


def pieces_of(value: Any) -> list[list[list[int]]]:
    """Of every unit of a batch the pieces' tokens."""
    if isinstance(value, PackedRows):
        columns = zip(value.pieces.row, value.pieces.start, value.pieces.length, strict=True)
        rows: list[list[list[int]]] = [[] for _ in value.tokens]
        for row, start, length in columns:
            rows[int(row)].append(value.tokens[row, start : start + length].tolist())
        return rows
    return [[row[:length].tolist() for row, length in zip(value.tokens, value.lengths, strict=True)]]


def delivered(loader: DataLoader) -> list[list[list[list[int]]]]:
    """Units of each batch of an epoch."""
    return [pieces_of(batch["tokens"]) for batch in loader]


def whole_batches(units: list[Any], size: int) -> list[list[Any]]:
    return [units[i : i + size] for i in range(0, len(units), size)]


# ---- one rank -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BATCHINGS)
@pytest.mark.parametrize(
    "shuffle", [Shuffle("window", 2), Shuffle("window", 4, canonical_nodes=3), Shuffle("full"), None], ids=str
)
def test_batches_hold_what_the_plain_loop_packs(folder: Path, kind: str, shuffle: Shuffle | None) -> None:
    with loader_of(folder, BATCHINGS[kind](), shuffle=shuffle) as loader:
        for epoch in range(2):
            assert delivered(loader) == whole_batches(units_of(loader, epoch), loader.batch_size)


@pytest.mark.parametrize("workers", [{"num_workers": 2, "workers": "thread"}, {"num_workers": 1}], ids=str)
def test_builders_make_what_the_consumer_would(folder: Path, workers: dict[str, Any]) -> None:
    with loader_of(folder, BATCHINGS["packed"](), **workers) as loader:
        assert delivered(loader) == whole_batches(units_of(loader), 3)


def test_a_sample_is_made_once_an_epoch(folder: Path) -> None:
    tokens = CountedTokens()
    with loader_of(folder, BATCHINGS["packed"](), tokens) as loader:
        assert len(list(loader)) > 8
    assert {i for i, _ in tokens.made} == {*range(NUM_DOCUMENTS)}
    assert set(tokens.made.values()) == {1}


def test_other_columns_come_once_a_piece(folder: Path) -> None:
    with loader_of(folder, BATCHINGS["packed"]()) as loader:
        for batch in loader:
            firsts = [piece[0] // 100 for unit in pieces_of(batch["tokens"]) for piece in unit]
            assert batch["n"].tolist() == firsts


def test_columns_cut_alike_lie_place_by_place(folder: Path) -> None:
    def tokens(sample: Mapping[str, Any]) -> dict[str, Any]:
        ids = tokens_of(sample)["tokens"]
        return {"tokens": ids, "mask": torch.tensor([t % 2 for t in ids]), "whole": np.array(ids)}

    batching = Packed(7, columns=["tokens", "mask"], whole=["whole"], window=40)
    with loader_of(folder, batching, tokens) as loader:
        for batch in loader:
            rows = batch["tokens"]
            inside = rows.segment_ids > 0
            assert torch.equal(batch["mask"][inside], rows.tokens[inside] % 2)
            assert not batch["mask"][~inside].any()
            numbers = [piece[0] // 100 for unit in pieces_of(rows) for piece in unit]
            assert batch["whole"].lengths.tolist() == [length_of(i) for i in numbers]


# ---- states -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BATCHINGS)
def test_a_state_resumes_after_any_batch(folder: Path, kind: str) -> None:
    with loader_of(folder, BATCHINGS[kind]()) as loader:
        whole, states = [], [loader.state_dict()]
        for batch in loader:
            whole.append(pieces_of(batch["tokens"]))
            states.append(loader.state_dict())
        states.append(loader.state_dict())
    assert len(whole) > 8
    assert all(len(json.dumps(state)) < 1000 for state in states)
    for cut in {0, 1, 2, 5, len(whole) // 2, *range(len(whole) - 2, len(whole) + 1)}:
        state = states[cut]
        with loader_of(folder, BATCHINGS[kind](), seed=1) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            assert delivered(loader) == whole[cut:]
            assert delivered(loader) == whole_batches(units_of(loader, 1), loader.batch_size)
    with loader_of(folder, BATCHINGS[kind]()) as loader:
        loader.load_state_dict(states[-1])
        assert delivered(loader) == whole_batches(units_of(loader, 1), loader.batch_size)


def test_a_resumed_loader_makes_no_sample_before_its_megabatch(folder: Path) -> None:
    with loader_of(folder, BATCHINGS["packed"]()) as loader:
        num = len(list(loader))
        loader.set_epoch(0)
        for _ in islice(loader, num - 1):
            pass
        state = loader.state_dict()
    tokens = CountedTokens()
    with loader_of(folder, BATCHINGS["packed"](), tokens) as loader:
        loader.load_state_dict(state)
        assert next(iter(loader))["tokens"].tokens.shape == (3, 16)
    first = state["batching"]["first_sample"]
    assert first > 100
    order = Order(loader.dataset.catalog.blocks.num_samples, loader.shuffle, seed=5, epoch=0)
    in_files = [i for shard in range(3) for i in range(shard, NUM_DOCUMENTS, 3)]
    before = {in_files[sample] for sample in order.samples(np.arange(first))}
    assert not before & {i for i, _ in tokens.made}


def test_a_state_of_other_batching_is_refused(folder: Path) -> None:
    with loader_of(folder, Packed(16, window=40)) as loader:
        state = loader.state_dict()
    with loader_of(folder, Packed(17, window=40)) as loader, pytest.raises(ValueError, match="other batching"):
        loader.load_state_dict(state)


# ---- ranks that tell each other the lengths ----------------------------------------------------------

GLOBAL_ROWS = 12


def of_rank(folder: Path, kind: str, options: dict[str, Any], cuts: list[int], load: Any) -> Any:
    """On one rank: the units of each batch, states after some batches, and what was made."""
    world_size = dist.get_world_size()
    rows = {"batch_size": GLOBAL_ROWS // world_size} if BATCHINGS[kind]().rows_are_units else {}
    tokens, units, states = CountedTokens(), [], {}
    with loader_of(folder, BATCHINGS[kind](), tokens, **rows, **options) as loader:
        if load is not None:
            loader.load_state_dict(load)
        for number, batch in enumerate(loader, 1):
            units.append(pieces_of(batch["tokens"]))
            if number in cuts:
                states[number] = loader.state_dict()
    return units, states, tokens.made


def of_world(
    folder: Path, world_size: int, kind: str, cuts: list[int] = [], load: Any = None, **options: Any  # noqa: B006
) -> tuple[list[list[Any]], dict[int, Any], Counter[tuple[int, int]]]:
    """The units of each global batch, the states (the same on all ranks), and how often samples were made."""
    ranks = fast_ranks(of_rank, world_size, args=(folder, kind, options, cuts, load), timeout_s=90)
    steps = max(len(units) for units, _, _ in ranks)
    batches = [list(chain(*(units[b] for units, _, _ in ranks if b < len(units)))) for b in range(steps)]
    assert all(states == ranks[0][1] for _, states, _ in ranks)
    return batches, ranks[0][1], sum((made for _, _, made in ranks), Counter())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_number_of_ranks_delivers_the_same_global_batches_and_makes_a_sample_once(
    folder: Path, world_size: int
) -> None:
    batches, _, made = of_world(folder, world_size, "packed", tail="uneven")
    with loader_of(folder, BATCHINGS["packed"]()) as loader:
        assert batches == whole_batches(units_of(loader), GLOBAL_ROWS)
    assert {i for i, _ in made} == {*range(NUM_DOCUMENTS)}
    assert set(made.values()) == {1}
