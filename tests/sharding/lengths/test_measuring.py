"""Lengths that are measured on the way: who measures which samples, and plans of what is known so far."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from sharding.lengths.batching import Bucketed, Packed
from sharding.lengths.measuring import producer_counts, producers
from sharding.lengths.unit_plan import LEFT_OUT, UNKNOWN, UnitPlan, UnitSequence
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle

ORDER = Order(np.full(10, 7), Shuffle("none"), seed=0, epoch=0)


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 5), st.integers(1, 9))
def test_each_sample_has_one_finder_and_all_have_about_as_many(
    sizes: list[int], num_lanes: int, num_producers: int
) -> None:
    bounds = np.cumsum([0, *sizes])
    counts = [producer_counts(bounds, producer, num_producers).tolist() for producer in range(num_producers)]
    for packing_window, size in enumerate(sizes):
        of = producers(int(bounds[packing_window]), int(bounds[packing_window + 1]), num_lanes, num_producers)
        assert np.bincount(of, minlength=num_producers).tolist() == [own[packing_window] for own in counts]
        assert {own[packing_window] for own in counts} <= {size // num_producers, -(-size // num_producers)}
        lanes = (bounds[packing_window] + np.arange(size)) % num_lanes
        by_lane = of[np.argsort(lanes, kind="stable")]
        assert (np.diff(by_lane) >= 0).all()  # each maker has a run of whole lanes


def unmeasured(size: int = 20) -> UnitSequence:
    return UnitSequence(Packed(10, window=size), 70, lambda packing_window: None)


def test_how_many_batches_there_are_shows_when_the_last_packing_window_was_found() -> None:
    known = unmeasured()
    plan = UnitPlan(ORDER, known, batch_size=2, rank=0, world_size=2, tail="uneven")
    for packing_window in range(4):
        assert not known.is_complete
        assert plan.num_batches == plan.num_global_batches == UNKNOWN
        assert plan.position_after(3) == 12
        size = int(np.diff(known.bounds)[packing_window])
        known.add(packing_window, np.full(size, 5))
    assert known.is_complete
    assert known.num_units == 35
    assert plan.num_batches == plan.num_global_batches == 9
    assert plan.position_after(9) == 35


def test_a_packing_window_is_planned_of_its_own_lengths_alone() -> None:
    lengths = np.array([3, LEFT_OUT, 4, 12, 0, 3])
    one, other = unmeasured(6), unmeasured(6)
    other.add(0, np.full(6, 9))
    units = other.add(1, lengths)
    assert [p.tolist() for p in vars(one.cut(1, lengths).segments).values()] == [
        p.tolist() for p in vars(units.segments).values()
    ]
    assert sorted(set(units.segments.position.tolist())) == [0, 2, 3, 5]
    assert units.segments.length.sum() == 22


def test_a_place_names_the_packing_window_that_is_to_be_found_again() -> None:
    known = unmeasured()
    known.add(0, np.full(20, 5))
    assert [known.at(unit) for unit in (0, 9, 10, 17)] == [(0, 0), (0, 0), (1, 10), (1, 10)]


def test_other_lengths_than_before_are_refused() -> None:
    known = unmeasured()
    known.add(0, np.full(20, 5))
    known.add(0, np.full(20, 5))
    with pytest.raises(ValueError, match="from position 0 on have other lengths"):
        known.add(0, np.full(20, 6))


def test_a_last_batch_that_is_short_of_samples_is_left_out_by_drop() -> None:
    known = UnitSequence(Bucketed(4, boundaries=2, window=40), 70, lambda packing_window: None)
    for packing_window, size in enumerate(np.diff(known.bounds)):
        known.add(packing_window, np.arange(size))
    assert known.num_units == 18
    dealing = {"batch_size": 1, "rank": 0, "world_size": 1}
    assert UnitPlan(ORDER, known, tail="drop", **dealing).num_batches == 17
    assert UnitPlan(ORDER, known, tail="uneven", **dealing).num_batches == 18
