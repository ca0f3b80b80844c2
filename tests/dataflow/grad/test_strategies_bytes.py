"""`bytes_sent()` against the payload bytes that this process's sockets sent, as Linux counts them.

The counters are of each rank's own TCP sockets, so other traffic on the machine does not matter. What gloo
adds (about 100 bytes a message) is bounded by a hundredth, and 60 kB for the many messages of small buckets.
"""

import sys

import pytest
import strategies_kit as kit
import torch.distributed as dist
from forked_kit import RankSet
from test_strategies import STRATEGIES, on_nodes

from benchmarks.training.strategies import bytes_sent_since, socket_bytes_sent
from dataflow.grad.strategies import Hierarchical, Int8, PostLocalSGD

if sys.platform != "linux":
    pytest.skip("reads Linux's socket counters", allow_module_level=True)

WIDTH, STEPS = 200, 6
two, four, four_in_full = RankSet(2), RankSet(4), RankSet(4)


def counted(strategy, topology=None):
    """(what the strategy says, what the sockets sent)."""
    loop = kit.Loop(strategy, kit.mlp(width=WIDTH), topology=topology, bucket_mb=0.1)
    dist.barrier()
    before = socket_bytes_sent()
    loop.run(range(STEPS), kit.regression)
    said = loop.strategy.bytes_sent()
    dist.barrier()  # the others have received all, so none of it still waits in this kernel to be sent
    sent = bytes_sent_since(before)
    dist.barrier()  # a rank that closes its groups closes the others' sockets with them, counters and all
    loop.close()
    return said, sent


@two.add
def on_two_ranks():
    return {name: counted(make()) for name, make in STRATEGIES.items()}


@four_in_full.add
def on_four_ranks():
    even, uneven = on_nodes((0, 0, 1, 1)), on_nodes((0, 0, 0, 1))
    return {
        "shards": counted(Hierarchical("shards"), even),
        "leaders": counted(Hierarchical("leaders"), even),
        "uneven leaders": counted(Hierarchical(), uneven),
        "int8": counted(Int8()),
        "top-k": counted(STRATEGIES["top-k"]()),
        "power-sgd": counted(STRATEGIES["power-sgd"]()),
        "in node": counted(PostLocalSGD({2: 2, 4: 4}, start_step=2, reduce_in_node=True), even),
    }


def dense_bytes(ranks):
    numels = sum(p.numel() for p in kit.mlp(width=WIDTH).parameters())
    return STEPS * 8 * numels * 2 * (ranks - 1) / ranks


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("ranks", "work"), [(two, on_two_ranks), (four_in_full, on_four_ranks)])
def test_what_a_strategy_says_is_what_the_sockets_sent(ranks, work):
    for rank in ranks.results(work):
        for name, (said, sent) in rank.items():
            assert said <= sent, name
            assert sent <= said * 1.01 + 60_000, name
            assert sent > 100_000 or name in ("local-sgd", "diloco"), name


@four.add
def between_nodes():
    found = {}
    for layout in ("shards", "leaders"):
        strategy = Hierarchical(layout)
        counted(strategy, on_nodes((0, 0, 1, 1)))
        found[layout] = strategy.bytes_between_nodes()
    return found


def test_a_hierarchical_reduction_sends_a_share_between_nodes():
    """Two nodes: n bytes a step between the leaders, or n / 2 between each of two pairs."""
    ranks = four.results(between_nodes)
    dense = dense_bytes(2)
    assert [rank["leaders"] for rank in ranks] == pytest.approx([dense, 0, dense, 0], rel=1e-3)
    assert [rank["shards"] for rank in ranks] == pytest.approx([dense / 2] * 4, rel=1e-3)
