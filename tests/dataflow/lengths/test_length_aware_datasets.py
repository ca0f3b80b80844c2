"""Length-aware batches of real shards, assembled by random access: the oracle for the loader's."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from datasets_kit import MAKERS

from dataflow import Bucketed, Packed, Ragged, TokenBudget
from dataflow.batch.packed import batch_columns
from sharding.lengths.column_lengths import resolve_lengths
from sharding.lengths.unit_plan import UnitPlanner
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle

FORMATS = {"parquet": "lst", "megatron": "tokens", "tar": "bin"}


def plan_of(dataset, batching, *, rank=0, world_size=1, tail="uneven", start=0, rows=1):
    order = Order(dataset.catalog.blocks.num_samples, Shuffle("window", 4), seed=3, epoch=1)
    lengths = resolve_lengths(batching.lengths, dataset.catalog, batching.column)
    made = {"rank": rank, "world_size": world_size, "tail": tail, "start": start}
    return UnitPlanner(batching, lengths=lengths).plan(order, batch_size=rows, **made)


def batches_of(dataset, plan):
    """This rank's batches: one dict a batch."""
    batching = plan.sequence.batching
    for b in range(plan.num_batches):
        found = plan.batches(b, b + 1)
        samples = dataset.__getitems__(plan.order.samples(found.segments.position).tolist())
        rows = [
            torch.as_tensor(np.frombuffer(v, np.uint8).copy() if isinstance(v, bytes) else v)
            for v in (sample[batching.column] for sample in samples)
        ]
        offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
        yield batch_columns(batching, found, {batching.column: Ragged(torch.cat(rows), offsets)})


def tokens_of(batching, batches):
    made = [batch[batching.column] for batch in batches]
    if isinstance(batching, Packed):
        return Counter(t for rows in made for t in rows.tokens[rows.segment_ids > 0].tolist())
    return Counter(
        t
        for rows in made
        for t in rows.tokens[torch.arange(rows.tokens.shape[1]) < rows.lengths[:, None]].tolist()
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "make", [lambda c: Packed(4, c), lambda c: TokenBudget(24, c), lambda c: Bucketed(5, c)]
)
def test_an_epoch_of_two_ranks_delivers_every_token_once(name, make, tmp_path):
    made = MAKERS[name](tmp_path)
    dataset, batching = made.open(), make(FORMATS[name])
    plans = [plan_of(dataset, batching, rank=rank, world_size=2) for rank in range(2)]
    found = sum((tokens_of(batching, batches_of(dataset, plan)) for plan in plans), Counter())
    assert found == Counter(t for row in made.samples for t in row[batching.column])


def test_a_run_resumed_by_more_ranks_delivers_the_rest(tmp_path):
    made = MAKERS["megatron"](tmp_path)
    dataset, batching = made.open(), Packed(8)
    whole = plan_of(dataset, batching, rows=2)
    head = [batch for _, batch in zip(range(5), batches_of(dataset, whole), strict=False)]
    start = whole.position_after(5)
    rest = [plan_of(dataset, batching, rank=r, world_size=3, start=start) for r in range(3)]
    found = tokens_of(batching, head)
    for plan in rest:
        found += tokens_of(batching, batches_of(dataset, plan))
    assert found == Counter(t for row in made.samples for t in row["tokens"])


def test_packed_rows_name_their_documents(tmp_path):
    made = MAKERS["megatron"](tmp_path)
    dataset = made.open()
    documents = {tuple(row["tokens"]) for row in made.samples}
    for batch in batches_of(dataset, plan_of(dataset, Packed(8), rows=3)):
        rows = batch["tokens"]
        bounds = rows.cu_seqlens.tolist()
        flat, segments = rows.tokens.reshape(-1), rows.segment_ids.reshape(-1)
        for a, b in pairwise(bounds):
            if segments[a]:
                assert tuple(flat[a:b].tolist()) in documents
            assert segments[a:b].unique().numel() == 1
