"""Arguments that mean nothing, and shards that hold nothing, are refused in words that say what was given."""

# mypy: disable-error-code="arg-type,list-item"

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets_kit import make_parquet
from formats_kit import RecordFormat, arrow_block, build_catalog, lengths_of, records

from dataflow import DataflowError, ShardedDataset
from prefetch.core.kernels import kernels
from sharding.catalog.table import Catalog
from sharding.errors import CorruptShardError, ShardReadError
from sharding.formats.arrow.columns import columns_of
from sharding.formats.tokens import TokensFormat
from sharding.lengths.batching import Packed
from sharding.lengths.column_lengths import resolve_lengths
from sharding.mixture.interleaving import MixtureSpec
from sharding.mixture.shares import exact_weights, temperature_weights
from sharding.mixture.token_schedule import TokenEpochs
from sharding.order.order import Order
from sharding.order.permutations import feistel, seeded_permutation, spread_order
from sharding.order.shuffle import Shuffle
from sharding.plan.placement import reads_by_node, shard_indices
from sharding.plan.plan import EpochPlan, PlanState
from sharding.topology.rank_facts import facts_of, with_facts
from sharding.topology.replicas import DataParallel
from sharding.topology.topology import Topology
from sharding.write.writer import ShardWriter

SHUFFLE = Shuffle().to_json()
FULL = Order([4] * 16, Shuffle("full"), seed=0, epoch=0)


def catalog_of(at: Path, content: bytes | None) -> Catalog:
    """A catalog of one shard, or of a pipe."""
    os.mkfifo(at / "part-1.rec") if content is None else (at / "part-1.rec").write_bytes(content)
    return build_catalog([str(at / "part-1.rec")], RecordFormat(blobs=True), block_bytes=64)


def plan_of(**settings: Any) -> EpochPlan:
    order = Order([3, 3, 3, 1], Shuffle("window", 8), seed=1, epoch=0)
    return EpochPlan(order, **{"batch_size": 4, "rank": 0, "world_size": 2, "tail": "drop", **settings})


def state_of(**changes: Any) -> PlanState:
    state = PlanState(seed=7, epoch=3, position=40, num_samples=100, shuffle=Shuffle(), fingerprint="ab")
    return PlanState.from_json(state.to_json() | changes)


def job_of(**facts: Any) -> Topology:
    """Rank 0 of four on two nodes."""
    return Topology(0, 4, 0, 2, node=0, num_nodes=2, **facts)


def tokens(**options: Any) -> MixtureSpec:
    return MixtureSpec.weighted((23, 7, 11), [1, 1, 1], **{"counts": "tokens", **options})


def ones(*_: int) -> Any:
    return np.ones(3, np.int64)


def lengths_in(at: Path, lengths: Any) -> Any:
    return resolve_lengths(lengths, make_parquet(at).open().catalog, "lst", None)


def parquet(at: Path, **columns: Any) -> ShardedDataset:
    pq.write_table(pa.table(columns), at / "a.parquet")
    return ShardedDataset(str(at / "a.parquet"))


REFUSED: list[tuple[Callable[[Path], object], type[Exception], str]] = [
    # shards and catalogs
    (lambda at: catalog_of(at, b""), CorruptShardError, r"part-1\.rec: is empty \(0 bytes\)"),
    (lambda at: catalog_of(at, records(0)), DataflowError, "no samples in 1 shards"),
    (lambda at: catalog_of(at, None), ShardReadError, "neither a file nor a directory"),
    (lambda at: build_catalog([str(at)], RecordFormat(), block_bytes=64), ShardReadError, "is a directory"),
    (lambda _: build_catalog([], RecordFormat(), block_bytes=64), ValueError, "at least one shard"),
    (lambda at: Catalog.load(str(at / "x.catalog")), ShardReadError, "no such file"),
    (lambda at: Catalog.load(f"memory://{at}/x.catalog"), ShardReadError, "no such file"),
    (lambda _: columns_of(pa.table({"a": [1], "b": [2]}), ["a", "z"], arrow_block(1)),
     CorruptShardError, "no column 'z'; the shard has a, b"),
    # tokens
    (lambda _: TokensFormat(length=0), ValueError, r"length must be >= 1 .*, got 0"),
    (lambda _: TokensFormat(length=2.5), ValueError, r"length must be >= 1 .*, got 2.5"),
    (lambda _: TokensFormat(length="8"), ValueError, r"length must be >= 1 .*, got '8'"),
    (lambda _: TokensFormat(length=4, dtype="float32"),
     ValueError, "dtype must be an integer type .*, got 'float32'"),
    (lambda _: TokensFormat(length=4, dtype="U3"), ValueError, "dtype must be an integer type .*, got 'U3'"),
    (lambda _: TokensFormat(length=4, dtype=">u2"),
     ValueError, "dtype must be an integer type .*, got '>u2'"),
    # lengths
    (lambda at: lengths_of(parquet(at, n=[1, None, -1]).catalog, "n"), ValueError, "got -1 for sample 2"),
    (lambda at: lengths_in(at, [1, 2]), ValueError, r"47 integers.*shape \(2,\)"),
    (lambda at: lengths_in(at, np.zeros(47)), ValueError, "47 integers.*float64"),
    (lambda at: lengths_in(at, np.full(47, -1)), ValueError, "got -1 for sample 0"),
    (lambda at: lengths_in(at, "nothing"), ValueError, "no column 'nothing'.*label"),
    (lambda at: lengths_in(at, "x"), ValueError, "float32 numbers"),
    (lambda _: Packed(8, balance=3), ValueError, "balance must be a column or a function of lengths"),
    (lambda _: Packed(8, balance_group=0), ValueError, "balance_group must be an integer >= 1"),
    (lambda _: Packed(8, budget={"cost": 0}), ValueError, "budget must map columns to integers >= 1"),
    (lambda _: Packed(8, budget={"tokens": 5}), ValueError, "budget names 'tokens', which is in columns"),
    (lambda _: Packed(8, lengths={"tokens": "n", "strange": "m"}), ValueError, "lengths names 'strange'"),
    # order
    (lambda _: seeded_permutation(-1, 0), ValueError, "n must be >= 0, got -1"),
    (lambda _: spread_order(-1, 0), ValueError, "n must be >= 0, got -1"),
    (lambda _: feistel(np.zeros(1, np.uint64), 2**63, 0), ValueError, r"n must be in \[0, 2\*\*62\]"),
    (lambda _: feistel(np.array([5], np.uint64), 5, 0), IndexError, r"index 5 is not in \[0, 5\)"),
    (lambda _: Shuffle("random"), ValueError, "window, full, blocks, none, got 'random'"),
    (lambda _: Shuffle(["window"]), ValueError, "shuffle kind must be"),
    (lambda _: Shuffle("window", 0),
     ValueError, r"window_blocks must be an integer in \[1, 2147483647\], got 0"),
    (lambda _: Shuffle("window", 1.5), ValueError, "window_blocks must be .* got 1.5"),
    (lambda _: Shuffle("window", 2**31), ValueError, "window_blocks must be .* got 2147483648"),
    (lambda _: Shuffle("window", True), ValueError, "window_blocks must be .* got True"),
    (lambda _: Shuffle("window", 8, 0),
     ValueError, r"canonical_nodes must be an integer in \[1, 4096\], got 0"),
    (lambda _: Shuffle("window", None, 4097), ValueError, "canonical_nodes must be .* got 4097"),
    (lambda _: Shuffle("window", 8, 16), ValueError, "window_blocks must be >= canonical_nodes=16, .* got 8"),
    (lambda _: Shuffle("window", 8, 4, 1.5), ValueError, r"exchange must be a number in \[0, 1\], got 1.5"),
    (lambda _: Shuffle("window", 8, 4, float("nan")), ValueError, "exchange must be .* got nan"),
    (lambda _: Shuffle("window", 8, 4, True), ValueError, "exchange must be .* got True"),
    (lambda _: Shuffle("window", 8, 4, "0"), ValueError, "exchange must be .* got '0'"),
    (lambda _: Shuffle("none", 8, 4, 0.5), ValueError, "file order deals the same blocks"),
    (lambda _: Shuffle("full", 3), ValueError, "a full shuffle has no windows"),
    (lambda _: Shuffle("full", None, 8), ValueError, "only a kind is given, got .*canonical_nodes=8"),
    (lambda _: Shuffle("full", None, None, 0), ValueError, "no windows and no lanes"),
    # plans
    (lambda _: plan_of(batch_size=0), ValueError, "batch_size must be >= 1, got 0"),
    (lambda _: plan_of(rank=2), ValueError, r"rank must be in \[0, world_size=2\), got 2"),
    (lambda _: plan_of(rank=-1), ValueError, r"rank must be in \[0, world_size=2\), got -1"),
    (lambda _: plan_of(world_size=0), ValueError, r"rank must be in \[0, world_size=0\)"),
    (lambda _: plan_of(tail="keep"), ValueError, "tail must be one of drop, pad, even, uneven, got 'keep'"),
    (lambda _: plan_of(start=11), ValueError, r"start must be in \[0, 10\], got 11"),
    (lambda _: plan_of(start=-1), ValueError, r"start must be in \[0, 10\], got -1"),
    (lambda _: state_of(version=1), ValueError, "state version 1, and only version 4"),
    (lambda _: state_of(version=2), ValueError, "state version 2, and only version 4"),
    (lambda _: state_of(version=True), ValueError, "state version True"),
    (lambda _: state_of(version=3), ValueError, "state version 3, and only version 4"),
    (lambda _: state_of(version=4.0), ValueError, "state version 4.0"),
    (lambda _: state_of(seed="7"), ValueError, "seed must be an integer, got '7'"),
    (lambda _: state_of(seed=2**64), ValueError, "seed must fit 64 bits"),
    (lambda _: state_of(epoch=-1), ValueError, "epoch must be >= 0"),
    (lambda _: state_of(epoch=1.0), ValueError, "epoch must be an integer, got 1.0"),
    (lambda _: state_of(position=101), ValueError, r"position must be in \[0, num_samples=100\], got 101"),
    (lambda _: state_of(position=True), ValueError, "position must be an integer, got True"),
    (lambda _: state_of(num_samples=None), ValueError, "num_samples must be an integer, got None"),
    (lambda _: state_of(shuffle="window"), ValueError, "a shuffle must be an object"),
    (lambda _: state_of(shuffle={**SHUFFLE, "kind": "mixed"}), ValueError, "shuffle kind must be one of"),
    (lambda _: state_of(fingerprint=5),
     ValueError, "fingerprint must be at most 128 printable ASCII characters, got 5"),
    (lambda _: state_of(fingerprint="x" * 129), ValueError, "fingerprint must be at most 128 printable"),
    (lambda _: state_of(fingerprint="\u00e9"), ValueError, "at most 128 printable"),
    (lambda _: state_of(fingerprint="\n"), ValueError, "at most 128 printable"),
    (lambda _: state_of(rank=0), ValueError, "the state has unknown fields: rank"),
    (lambda _: state_of(data="[1]"), ValueError, "data must be an object of facts or missing"),
    (lambda _: state_of(data={"shards": "2"}), ValueError, "data must be an object of facts"),
    (lambda _: PlanState(seed=0, epoch=0, position=0, num_samples=0, shuffle="none"),
     ValueError, "shuffle must be a Shuffle, got 'none'"),
    (lambda _: reads_by_node(FULL, [0], 8, cost=np.ones(1, int)), ValueError, "reads samples, not blocks"),
    (lambda _: shard_indices([("rack", "a"), ("b",)]), ValueError, "all ranks need the same facts"),
    # mixtures
    (lambda _: MixtureSpec.weighted([10, 0], [1, 1]),
     ValueError, "every source of a mixture must hold samples"),
    (lambda _: MixtureSpec.weighted([10, 5], [1]), ValueError, r"there are 2 sources, but weights \[1\]"),
    (lambda _: MixtureSpec.weighted([10], {5: [1]}), ValueError, "a schedule must begin at step 0"),
    (lambda _: MixtureSpec.weighted([10], [1], stop="last"),
     ValueError, "stop must be one of first, all, never"),
    (lambda _: MixtureSpec.weighted([10], [1], run_length=0), ValueError, "run_length must be >= 1"),
    (lambda _: MixtureSpec.weighted([10], [1], stop="never").epoch(1),
     ValueError, "there is no epoch 1 of a mixture with stop='never'"),
    (lambda _: MixtureSpec.weighted([5, 5], [1, 1]).epoch(0).locate(np.array([9])),
     IndexError, r"positions must be in \[0, 9\)"),
    (lambda _: MixtureSpec.repeated([10], [1, 2]), ValueError, r"there are 1 sources, but repeats \[1, 2\]"),
    (lambda _: MixtureSpec.repeated([10], [0.01]),
     ValueError, r"sources with \[10\] samples leave no samples"),
    (lambda _: tokens(counts="words"), ValueError, "shares must be one of samples, tokens"),
    (lambda _: tokens(stop="never"), ValueError, 'needs weights or a schedule, stop="first" or "all"'),
    (lambda _: tokens(run_length=2), ValueError, 'shares="tokens" needs .* no run_length'),
    (lambda _: tokens().epoch(0), ValueError, "epochs by tokens follow from lengths"),
    (lambda _: TokenEpochs(tokens(), ones, take=kernels().token_draws).epoch(-1), ValueError, "no epoch -1"),
    (lambda _: temperature_weights([1], 0), ValueError, "temperature must be > 0"),
    (lambda _: exact_weights([]), ValueError, r"at least one weight must be positive, got \[\]"),
    (lambda _: exact_weights([0, 0]), ValueError, r"at least one weight must be positive, got \[0, 0\]"),
    (lambda _: exact_weights([-1, 2]), ValueError, r"weights must be finite numbers >= 0, got \[-1"),
    (lambda _: exact_weights([float("nan"), 1]),
     ValueError, r"weights must be finite numbers >= 0, got \[nan"),
    (lambda _: exact_weights([float("inf"), 1]),
     ValueError, r"weights must be finite numbers >= 0, got \[inf"),
    (lambda _: exact_weights(["1", 2]), ValueError, r"weights must be finite numbers >= 0, got \['1'"),
    # topology
    (lambda _: Topology(rank=1), ValueError, r"rank must be in \[0, world_size=1\), got 1 \(from given\)"),
    (lambda _: Topology(world_size=0), ValueError, "world_size must be >= 1"),
    (lambda _: Topology(local_rank=2, local_world_size=2, world_size=2),
     ValueError, r"local_rank must be in \[0, local"),
    (lambda _: Topology(node=-1), ValueError, r"node must be in \[0, num_nodes=1\)"),
    (lambda _: Topology(rank=True, world_size=2), ValueError, "rank and world_size must be integers"),
    (lambda _: Topology(local_world_size=2), ValueError, "2 processes on this node and 1 nodes do not fit"),
    (lambda _: Topology(world_size=4, local_world_size=2, num_nodes=4),
     ValueError, "2 processes on this node and 4 nodes do not fit"),
    (lambda _: Topology.even(4, 3), ValueError, "divide world_size=4, got 3"),
    (lambda _: with_facts(Topology(0, 2), [facts_of(Topology())]),
     ValueError, "facts must be of 2 ranks, got 1"),
    (lambda _: job_of(hosts=("a",)), ValueError, "hosts must have 2 values, got 1"),
    (lambda _: job_of(racks=("a", "b", "c")), ValueError, "racks must have 2 values"),
    (lambda _: job_of(nodes_of_ranks=(0, 1)), ValueError, "nodes_of_ranks must have 4 values"),
    (lambda _: job_of(numa_nodes_of_ranks=()), ValueError, "numa_nodes_of_ranks must have 4 values"),
    (lambda _: job_of(nodes_of_ranks=(0, 0, 0, 0)), ValueError, "hold each of 2 nodes, got {0}"),
    (lambda _: job_of(nodes_of_ranks=(0, 0, 1, 2)), ValueError, "hold each of 2 nodes, got {0, 1, 2}"),
    (lambda _: job_of(nodes_of_ranks=(1, 1, 0, 0)), ValueError, "puts rank 0 on node 1"),
    (lambda _: job_of(nodes_of_ranks=(0, 1, 1, 1)), ValueError, "1 ranks on node 0, which has 2"),
    (lambda _: Topology(0, 4, replicate=0), ValueError, "must be >= 1 and divide world_size=4, got 0"),
    (lambda _: Topology(0, 4, replicate=3), ValueError, "divide world_size=4, got 3"),
    (lambda _: Topology(0, 4, replicate=True), ValueError, "divide world_size=4, got True"),
    (lambda _: Topology(0, 4, replicate=[0, 0, 1]), ValueError, "data rank of each of 4 ranks"),
    (lambda _: Topology(0, 4, replicate=(1, 2)), ValueError, r"pass DataParallel\(rank, size\)"),
    (lambda _: Topology(0, 4, replicate=None), ValueError, "data rank of each of 4 ranks"),
    (lambda _: Topology(0, 4, replicate=[0, 0, 2, 2]), ValueError, r"without a gap, got \[0, 2\]"),
    (lambda _: Topology(0, 4, replicate=[1, 1, 1, 1]), ValueError, "data ranks must be .* without a gap"),
    (lambda _: Topology(0, 4, replicate=[-1, 0, 1, 2]), ValueError, "data ranks must be .* without a gap"),
    (lambda _: Topology(0, 4, replicate=[0, 0, 1, 1.0]), ValueError, "data ranks must be integers"),
    (lambda _: Topology(0, 4, replicate="0011"), ValueError, "data ranks must be integers"),
    (lambda _: Topology(0, 4, replicate=DataParallel(2, 2)),
     ValueError, "data parallel rank and size must fit world_size=4"),
    (lambda _: Topology(0, 4, replicate=DataParallel(0, 5)),
     ValueError, "data parallel rank and size must fit world_size=4"),
    (lambda _: Topology(0, 4, replicate=DataParallel(-1, 2)),
     ValueError, "data parallel rank and size must fit world_size=4"),
    (lambda _: Topology(0, 4, replicate=DataParallel("0", 2)), ValueError, "data ranks must be integers"),
    # writers
    (lambda _: ShardWriter("a-%06d-{:06d}.tar"), ValueError, "a pattern must have one number at most"),
    (lambda _: ShardWriter("a-{0000..0003}.tar"), ValueError, "put %04d where the number goes"),
    (lambda _: ShardWriter("a-{0000..0003}.tar", max_count=3), ValueError, "put %04d where the number goes"),
    (lambda _: ShardWriter("a-{x,y}.tar"), ValueError, "put %04d where the number goes"),
    (lambda _: ShardWriter("a.tar", max_count=3), ValueError, "several shards need a number such as"),
    (lambda _: ShardWriter("a-%06d.tar", max_count=0), ValueError, "max_count must be >= 1"),
    (lambda _: ShardWriter("a-%06d.tar", max_bytes=-1), ValueError, "max_bytes must be >= 1"),
    (lambda _: ShardWriter("a-%06d.txt"), ValueError, "format must be one of .* got None"),
    (lambda _: ShardWriter("a-%06d.tar", format="zip"), ValueError, "format must be one of .* got 'zip'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_means_nothing_is_refused(
    call: Callable[[Path], object], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        call(tmp_path)
