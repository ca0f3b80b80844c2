"""Packed tensors against rows built element by element."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dataflow.batch.packed import batch_columns, cut, packed, padded
from dataflow.ragged import Ragged
from sharding.lengths.batching import Bucketed, Packed, TokenBudget
from sharding.lengths.unit_plan import UnitPlanner
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle

documents = st.lists(st.integers(0, 20), min_size=1, max_size=40)


def ragged(rows, dtype=torch.int32):
    lengths = torch.tensor([0, *map(len, rows)])
    return Ragged(torch.tensor([v for row in rows for v in row], dtype=dtype), lengths.cumsum(0))


def expected_row(pieces, length, pad):
    tokens, segments, positions = [], [], []
    for number, piece in enumerate(pieces, 1):
        tokens += piece
        segments += [number] * len(piece)
        positions += range(len(piece))
    rest = length - len(tokens)
    return tokens + [pad] * rest, segments + [0] * rest, positions + [0] * rest


@given(st.lists(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=4), max_size=3), max_size=6))
def test_rows_hold_their_pieces(rows):
    of_row = np.array([len(pieces) for pieces in rows], np.int64)
    made = packed(ragged([p for pieces in rows for p in pieces]), of_row, 12, pad=-1)
    expected = [expected_row(pieces, 12, -1) for pieces in rows]
    assert made.tokens.tolist() == [row[0] for row in expected]
    assert made.segment_ids.tolist() == [row[1] for row in expected]
    assert made.positions.tolist() == [row[2] for row in expected]
    assert made.segment_ids.dtype == made.positions.dtype == torch.int32
    assert made.tokens.dtype == torch.int64


@given(st.lists(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=4), max_size=3), max_size=6))
def test_cumulative_lengths_cut_the_flat_rows_at_segments(rows):
    of_row = np.array([len(pieces) for pieces in rows], np.int64)
    made = packed(ragged([p for pieces in rows for p in pieces]), of_row, 12)
    lengths = [n for pieces in rows for n in (*map(len, pieces), 12 - sum(map(len, pieces))) if n]
    assert made.cu_seqlens.tolist() == np.cumsum([0, *lengths]).tolist()
    assert made.cu_seqlens.dtype == torch.int32
    assert made.max_seqlen == max(lengths, default=0)


@given(documents, st.sampled_from([Packed(8, window=16), Packed(8, overlong="truncate"), TokenBudget(40)]))
def test_an_epoch_of_batches_holds_every_token_once(lengths, batching):
    order = Order([len(lengths)], Shuffle("window", 4), seed=0, epoch=0)
    numbers = order.samples(np.arange(len(lengths)))
    rows = 2 if isinstance(batching, Packed) else 1
    planner = UnitPlanner(batching, lengths=np.array(lengths))
    plan = planner.plan(order, batch_size=rows, rank=0, world_size=1, tail="uneven")
    tokens_of = [[1000 * i + t for t in range(n)] for i, n in enumerate(lengths)]
    found = plan.batches(0, plan.num_batches)
    bounds = np.cumsum([0, *found.sizes]).tolist()
    seen = []
    for b in range(plan.num_batches):
        samples = numbers[found.segments.position[bounds[b] : bounds[b + 1]]].tolist()
        columns = {"tokens": ragged([tokens_of[i] for i in samples]), "id": samples}
        batch = batch_columns(batching, found.one(b), columns)
        assert batch["id"] == samples
        made = batch["tokens"]
        if isinstance(batching, Packed):
            assert made.tokens.shape == (found.rows[b], 8)
            seen += made.tokens[made.segment_ids > 0].tolist()
        else:
            assert made.tokens.numel() <= 40
            seen += made.tokens[torch.arange(made.tokens.shape[1]) < made.lengths[:, None]].tolist()
    kept = 8 if batching == Packed(8, overlong="truncate") else 99
    assert sorted(seen) == sorted(t for tokens in tokens_of for t in tokens[:kept])


def test_whole_rows_are_not_copied():
    values = ragged([[1, 2], [3]])
    assert cut(values, np.array([0, 0]), np.array([2, 1])) is values
    assert [r.tolist() for r in cut(values, np.array([1, 0]), np.array([1, 0])).rows()] == [[2], []]


def test_padding_is_rounded_up():
    made = padded(ragged([[1, 2, 3], [4]]), multiple=4, pad=9)
    assert made.tokens.tolist() == [[1, 2, 3, 9], [4, 9, 9, 9]]
    assert made.lengths.tolist() == [3, 1]
    assert padded(ragged([]), 4).tokens.shape == (0, 0)


@pytest.mark.parametrize(
    ("dtype", "delivered"),
    [
        *((dtype, torch.int64) for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.int64)),
        *((dtype, dtype) for dtype in (torch.bool, torch.float16, torch.float32, torch.uint64)),
    ],
    ids=str,
)
def test_integers_are_packed_and_padded_as_int64_and_others_as_stored(dtype, delivered):
    if dtype == torch.bool:
        assert padded(ragged([[1], []], dtype)).tokens.tolist() == [[True], [False]]
        assert padded(ragged([[1], []], dtype)).tokens.dtype == dtype
        return
    values = ragged([[1, 2, 3], [4]], dtype)
    assert cut(values, np.array([1, 0]), np.array([2, 1])).values.tolist() == [2, 3, 4]
    assert packed(values, np.array([2]), 5).tokens.tolist() == [[1, 2, 3, 4, 0]]
    assert padded(values).tokens.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert packed(values, np.array([2]), 5).tokens.dtype == padded(values).tokens.dtype == delivered


def test_lengths_that_disagree_with_the_data_are_an_error():
    with pytest.raises(ValueError, match=r"segment 1 are shorter.*lengths="):
        cut(ragged([[1, 2], [3]]), np.array([0, 0]), np.array([2, 2]))
    with pytest.raises(ValueError, match="exceeds length=2"):
        packed(ragged([[1, 2], [3]]), np.array([2]), 2)


def test_a_column_of_fixed_length_cannot_be_batched_by_length():
    order = Order([3], Shuffle("none", 1), seed=0, epoch=0)
    batching = Bucketed(3, boundaries=(4,))
    planner = UnitPlanner(batching, lengths=np.array([1, 2, 3]))
    plan = planner.plan(order, batch_size=1, rank=0, world_size=1, tail="pad")
    with pytest.raises(ValueError, match="variable length"):
        batch_columns(batching, plan.batches(0, 1), {"tokens": torch.zeros(3, 4, 2)})
