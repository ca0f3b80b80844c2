"""Hot spots among reads, against counts of all runs of them."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dataflow.tools.inspect.read_cost import hot_spot
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(1, 50))
def test_the_hot_spot_is_the_worst_of_all_runs_of_reads(labels, ahead):
    run = min(ahead, len(labels))
    share = np.bincount(labels) * run / len(labels)
    runs = [np.bincount(labels[at : at + run], minlength=len(share)) for at in range(len(labels) - run + 1)]
    found = hot_spot(labels, ahead)
    assert found.ahead == run
    assert found.most == max(counts[found.label] for counts in runs)
    assert found.share == pytest.approx(share[found.label])
    assert found.most - found.share == pytest.approx(max((counts - share).max() for counts in runs))
    assert found.ratio == found.most / max(1, found.share)


@pytest.mark.parametrize("window", [32, 64, 512])
def test_no_shard_or_folder_is_asked_for_much_more_than_its_share(window):
    even = Order([100] * 4096, Shuffle("window", window), seed=1, epoch=2)
    uneven = Order(50 + np.arange(4096) % 100, Shuffle("window", window), seed=1, epoch=2)
    shard, folder = np.arange(4096) // 16, np.arange(4096) // 512
    for order, more in ((even, 1), (uneven, 4)):
        for labels in (shard, folder):
            found = hot_spot(labels[order.table.read_block], window)
            assert found.most <= np.ceil(found.share) + more
