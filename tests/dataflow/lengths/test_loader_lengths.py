"""`DataLoader(batching=...)` against rows built element by element: every token, segment and place."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets_kit import Made, Make, edited, make_megatron, rank, write_megatron
from parameters_kit import in_pairs

from dataflow import Bucketed, DataLoader, Packed, ShardedDataset, Shuffle, TokenBudget
from dataflow.batch.packed import PackedRows, PaddedRows
from dataflow.planning.length_aware import make_planner
from prefetch.errors import MemoryLimitError
from sharding.errors import SampleError
from sharding.lengths.batching import Batching
from sharding.lengths.unit_plan import UnitPlanner
from sharding.lengths.units import packing_window_bounds
from sharding.order.order import Order

FORMATS = {
    "megatron": "tokens",
    "parquet": "lst",
    "arrow": "lst",
    "jsonl": "lst",
    "jsonl.gz": "lst",
    "tar": "bin",
    "tar.gz": "bin",
    "tokens.bin": "tokens",
}
BATCHINGS: dict[str, Callable[[str], Batching]] = {
    "packed": lambda column: Packed(8, column, window=16, pad=7),
    "split": lambda column: Packed(3, column, window=16),
    "truncated": lambda column: Packed(3, column, overlong="truncate", window=16),
    "budget": lambda column: TokenBudget(24, column, window=16, multiple=2),
    "buckets": lambda column: Bucketed(5, column, boundaries=(2, 4), window=16, pad=1),
}
SHUFFLES = [
    Shuffle("window", 3, canonical_nodes=1),
    Shuffle("window", 4, canonical_nodes=3),
    Shuffle("window", 100),
    Shuffle("full"),
    Shuffle("none"),
]


def loader_of(data: Made, batching: Batching, r: int = 0, world_size: int = 1, **options: Any) -> DataLoader:
    rows = {"batch_size": 2} if isinstance(batching, Packed) else {}
    options = {"shuffle": SHUFFLES[0], "seed": 3, **rows, **options}
    return DataLoader(data.open(), batching=batching, topology=rank(r, world_size), **options)


# ---- the oracle: units as lists of (document, begin, length), laid out one element at a time --------------

Unit = list[tuple[list[int], int, int]]


def units_of(loader: DataLoader, data: Made, epoch: int = 0) -> list[Unit]:
    """All units of an epoch."""
    batching = loader.batching
    assert batching is not None
    documents = [row[batching.column] for row in data.samples]
    lengths = np.array([len(document) for document in documents])
    order = Order(loader.dataset.catalog.blocks.num_samples, loader.shuffle, seed=loader.seed, epoch=epoch)
    numbers = order.samples(np.arange(len(lengths)))
    sequence = UnitPlanner(batching, lengths=lengths).sequence(order)
    pieces, counts = sequence.take(np.arange(sequence.num_units))
    flat = [
        (documents[numbers[p]], b, n)
        for p, b, n in zip(pieces.position, pieces.begin, pieces.length, strict=True)
    ]
    ends = np.cumsum([0, *counts]).tolist()
    return [flat[a:b] for a, b in pairwise(ends)]


def laid_out(batching: Batching, unit: Unit) -> list[Any]:
    """Rows of a unit: (tokens, segment ids, positions) of a packed one, (tokens, length) of a padded one."""
    pieces = [document[begin : begin + length] for document, begin, length in unit]
    if not isinstance(batching, Packed):
        longest = max(map(len, pieces), default=0)
        width = -(-longest // batching.multiple) * batching.multiple
        return [(piece + [batching.pad] * (width - len(piece)), len(piece)) for piece in pieces]
    tokens = list(chain(*pieces))
    segments = [number for number, piece in enumerate(pieces, 1) for _ in piece]
    positions = [place for piece in pieces for place in range(len(piece))]
    rest = batching.length - len(tokens)
    return [(tokens + [batching.pad] * rest, segments + [0] * rest, positions + [0] * rest)]


def rows_of_batch(value: PackedRows | PaddedRows) -> list[Any]:
    if isinstance(value, PaddedRows):
        return list(zip(value.tokens.tolist(), value.lengths.tolist(), strict=True))
    columns = (value.tokens.tolist(), value.segment_ids.tolist(), value.positions.tolist())
    return list(zip(*columns, strict=True))


def delivered(loader: DataLoader) -> list[list[Any]]:
    """Rows of each batch of an epoch."""
    assert loader.batching is not None
    return [rows_of_batch(batch[loader.batching.column]) for batch in loader]


def expected(loader: DataLoader, data: Made, epoch: int = 0) -> list[list[Any]]:
    """One rank's batches of a whole epoch without a tail rule."""
    assert loader.batching is not None
    units, size = (
        [laid_out(loader.batching, unit) for unit in units_of(loader, data, epoch)],
        loader.batch_size,
    )
    return [list(chain(*units[i : i + size])) for i in range(0, len(units), size)]


def tokens_of(batching: Batching, batches: list[list[Any]]) -> Counter[int]:
    rows = list(chain(*batches))
    if isinstance(batching, Packed):
        return Counter(t for tokens, ids, _ in rows for t, number in zip(tokens, ids, strict=True) if number)
    return Counter(t for tokens, length in rows for t in tokens[:length])


# ---- exactness --------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "name"), in_pairs(BATCHINGS, FORMATS))
def test_batches_hold_what_the_plan_says_element_by_element(made: Make, name: str, kind: str) -> None:
    data, batching = made(name), BATCHINGS[kind](FORMATS[name])
    for shuffle in SHUFFLES:
        with loader_of(data, batching, shuffle=shuffle) as loader:
            for epoch in range(2):
                steps = len(loader)
                got = delivered(loader)
                assert got == expected(loader, data, epoch)
                assert len(got) == steps
                if kind != "truncated":
                    everything = Counter(t for row in data.samples for t in row[batching.column])
                    assert tokens_of(batching, got) == everything


def test_segments_are_whole_documents(made: Make) -> None:
    data = made("megatron")
    documents = Counter(tuple(row["tokens"]) for row in data.samples)
    found: Counter[tuple[int, ...]] = Counter()
    with loader_of(data, Packed(8, window=16)) as loader:
        for batch in loader:
            rows = batch["tokens"]
            flat, segments = rows.tokens.reshape(-1).tolist(), rows.segment_ids.reshape(-1).tolist()
            bounds = list(pairwise(rows.cu_seqlens.tolist()))
            assert rows.max_seqlen == max(b - a for a, b in bounds)
            found.update(tuple(flat[a:b]) for a, b in bounds if segments[a])
    assert found == documents


def test_other_columns_come_once_a_piece(made: Make) -> None:
    data = made("parquet")
    with loader_of(data, Packed(8, "lst", window=16)) as loader:
        for batch in loader:
            lengths = [n for _, ids, _ in rows_of_batch(batch["lst"]) for n in Counter(ids).values()]
            labels = batch["label"].tolist()
            assert len(labels) <= len(lengths)
            starts = batch["lst"].tokens[batch["lst"].positions.eq(0) & batch["lst"].segment_ids.gt(0)]
            assert labels == starts.tolist()  # sample i holds i, i + 1, ...


def test_a_renamed_column_and_lengths_of_another_column(made: Make) -> None:
    data = made("parquet")
    lengths = [len(row["lst"]) for row in data.samples]
    for source in (None, "lst", np.array(lengths), lambda catalog: lengths):
        batching = Packed(8, "words", window=16, lengths=source)
        dataset = data.open(columns={"words": "lst"})
        with DataLoader(dataset, 2, True, batching=batching, topology=rank(0, 1)) as loader:
            assert tokens_of(batching, delivered(loader)) == Counter(
                t for row in data.samples for t in row["lst"]
            )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", BATCHINGS)
def test_packing_windows_that_grow_hold_what_the_plan_says_and_a_state_resumes_in_any(
    tmp_path: Path, kind: str
) -> None:
    """The first packing window has 1024 samples, and the next one twice as many."""
    data, plain = make_megatron(tmp_path, 1100), BATCHINGS[kind]("tokens")
    batching = type(plain)(**{**vars(plain), "window": 4096})
    assert packing_window_bounds(1100, 4096).tolist() == [0, 1024, 1100]
    with loader_of(data, batching, shuffle=Shuffle("window", 200)) as loader:
        whole = delivered(loader)
        assert whole == expected(loader, data)
    for cut in (len(whole) // 2, len(whole) - 3):
        with loader_of(data, batching, shuffle=Shuffle("window", 200)) as loader:
            for _ in islice(loader, cut):
                pass
            state = through_json(loader.state_dict())
            loader.load_state_dict(state)
            assert delivered(loader) == whole[cut:]


# ---- state ------------------------------------------------------------------------------------------


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(state)
    assert len(text) < 1000
    return dict(json.loads(text))


def test_split_rows_may_outnumber_the_samples(made: Make) -> None:
    data = made("megatron")
    with loader_of(data, Packed(1)) as loader:
        count = sum(1 for _ in loader)
        iterator = iter(loader)
        for _ in range(count - 2):
            next(iterator)
        state = through_json(loader.state_dict())
    assert state["position"] > len(data.samples)
    with loader_of(data, Packed(1)) as loader:
        loader.load_state_dict(state)
        assert len(delivered(loader)) == 2


@pytest.mark.parametrize(
    "other",
    [
        Packed(9, window=16),
        Packed(8, window=17),
        Packed(8, window=16, overlong="truncate"),
        TokenBudget(24),
        Packed(8, window=16, lengths=np.ones(47, np.int64)),
        None,
    ],
    ids=str,
)
def test_a_state_of_other_batches_is_refused(made: Make, other: Batching | None) -> None:
    data = made("megatron")
    with loader_of(data, Packed(8, window=16)) as loader:
        next(iter(loader))
        state = loader.state_dict()
    if other is None:
        with DataLoader(data.open(columns=["tokens"]), 1, topology=rank(0, 1)) as loader:
            with pytest.raises(ValueError, match="of kind packed, and this loader has batching=None"):
                loader.load_state_dict(state)
            next(iter(loader))
            plain = loader.state_dict()
        assert plain["batching"] is None
        with (
            loader_of(data, Packed(8, window=16)) as loader,
            pytest.raises(ValueError, match="batching=None, and this loader has batching of kind packed"),
        ):
            loader.load_state_dict(plain)
        return
    cause = "length=9|window=17|overlong='truncate'|kind token_budget|lengths of samples"
    with loader_of(data, other) as loader, pytest.raises(ValueError, match=f"this loader has .*({cause})"):
        loader.load_state_dict(state)


def test_a_position_beyond_the_units_is_refused_and_changes_nothing(made: Make) -> None:
    data = made("megatron")
    with loader_of(data, Packed(8, window=16)) as loader:
        state = loader.state_dict()
        with pytest.raises(ValueError, match="units"):
            loader.load_state_dict(edited(state, position=48, epoch=3))
        assert loader.state_dict() == state
        with pytest.raises(ValueError, match="batching must be an object"):
            loader.load_state_dict(edited(state, batching=3))


def test_large_samples_are_planned_in_smaller_windows_which_a_state_keeps(made: Make) -> None:
    data = made("megatron")
    with loader_of(data, Packed(8), memory_limit=1 << 20) as loader:
        whole = delivered(loader)
    blocks = data.open().catalog.blocks
    bytes_ = int(blocks.length.sum())
    small = make_planner(Packed(8), data.open(), bytes_ // 4)
    assert small.batching.window == 47 // 4
    with loader_of(data, Packed(8)) as loader:
        state = loader.state_dict()
        token = small.token | {"first_sample": 0, "units_before": 0}
        loader.load_state_dict(edited(state, batching=token))
        assert json.loads(loader.state_dict()["batching"])["window"] == small.batching.window
        assert delivered(loader) != whole
    with loader_of(data, Packed(8, window=16)) as loader, pytest.raises(ValueError, match="window=11"):
        loader.load_state_dict(edited(state, batching=token, position=1))


@pytest.mark.reads_here
def test_a_planning_window_that_memory_cannot_hold_is_an_error_that_says_so(tmp_path: Path) -> None:
    lengths = np.full(64, 1 << 15, np.int32)
    write_megatron(tmp_path / "shard-0.bin", [[0] * n for n in lengths.tolist()])
    dataset = ShardedDataset(str(tmp_path / "*.bin"), format="megatron", block_bytes=1 << 17)
    limit = {"memory_limit": 1 << 21, "topology": rank(0, 1), "shuffle": Shuffle("window", 4)}
    with DataLoader(dataset, batching=Packed(1 << 12), **limit) as loader:
        assert sum(1 for _ in loader) == 64 * 8
    with (
        DataLoader(dataset, batching=Packed(1 << 12, window=64), **limit) as loader,
        pytest.raises(MemoryLimitError, match="window= of batching"),
    ):
        list(loader)


# ---- figures, errors, the user's own functions ------------------------------------------------------------


def test_stats_tell_how_full_the_rows_are_and_what_was_lost(made: Make) -> None:
    data = made("megatron")
    with loader_of(data, Packed(3, overlong="truncate")) as loader:
        list(loader)
        stats = loader.stats()
    lost = [len(row["tokens"]) - 3 for row in data.samples if len(row["tokens"]) > 3]
    assert stats.lengths is not None
    assert (stats.lengths.truncated, stats.lengths.truncated_tokens) == (len(lost), sum(lost))
    assert 0.8 < stats.lengths.efficiency <= 1
    assert stats.samples == stats.lengths.segments == len(data.samples)
    with DataLoader(data.open(), 4, topology=rank(0, 1)) as loader:
        assert loader.stats().lengths is None


@pytest.mark.parametrize("kind", ["packed", "budget", "buckets"])
def test_a_sample_that_is_not_as_long_as_planned_is_an_error_or_left_out(made: Make, kind: str) -> None:
    data = made("megatron")
    lengths = np.array([len(row["tokens"]) for row in data.samples])
    lengths[11] += 1
    plain = BATCHINGS[kind]("tokens")
    batching = type(plain)(**{**vars(plain), "lengths": lengths})
    with (
        loader_of(data, batching) as loader,
        pytest.raises(SampleError, match="6 elements, but lengths= says 7"),
    ):
        list(loader)
    dataset = data.open(on_error="skip")
    with DataLoader(dataset, shuffle=True, batching=batching, topology=rank(0, 1)) as loader:
        got = tokens_of(batching, delivered(loader))
        assert loader.stats().skipped_samples == 1
    assert got == Counter(t for i, row in enumerate(data.samples) for t in row["tokens"] if i != 11)


@pytest.mark.parametrize("kind", ["budget", "buckets"])
def test_a_collate_function_gets_the_transformed_samples_of_a_batch(made: Make, kind: str) -> None:
    data, batching = made("megatron"), BATCHINGS[kind]("tokens")
    dataset = data.open(transform=lambda sample: sample["tokens"].repeat(2))
    with DataLoader(
        dataset, shuffle=True, batching=batching, collate_fn=list, seed=3, topology=rank(0, 1)
    ) as loader:
        got = [[value.tolist() for value in batch] for batch in loader]
        units = units_of(loader, data)
    assert got == [[document * 2 for document, _, _ in unit] for unit in units]


def test_a_batch_transform_gets_the_finished_batch(made: Make) -> None:
    data = made("megatron")
    dataset = data.open(batch_transform=lambda batch: batch["tokens"].tokens.shape)
    with DataLoader(dataset, 3, True, batching=Packed(8), topology=rank(0, 1)) as loader:
        assert next(iter(loader)) == (3, 8)


def test_overlong_samples_are_refused_where_asked(made: Make) -> None:
    says = r"sample '\d+': column 'tokens' has .* elements, more than the 3 that Packed takes, as have"
    with pytest.raises(SampleError, match=says):
        loader_of(made("megatron"), Packed(3, overlong="error"))
