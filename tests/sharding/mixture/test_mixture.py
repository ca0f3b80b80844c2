"""Mixtures: shares, stop rules, schedules, epochs and ranks, against plain loops."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from sharding.mixture import weight_steps
from sharding.mixture.interleaving import Interleaving, MixtureSpec
from sharding.mixture.shares import (
    ENDLESS,
    MAX_PERIOD,
    QuotaPattern,
    exact_weights,
    fair_pattern,
    integer_shares,
    temperature_weights,
)
from sharding.mixture.weight_steps import NOTHING_SET
from sharding.mixture.windows import MixturePlan, MixtureWindows, source_seed
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle
from sharding.plan.batch_plan import Tail

SHARES = st.lists(st.integers(0, 60), min_size=1, max_size=20).filter(any)
WEIGHTS = [0, 1, 0.5, 0.3, 0.7, Fraction(1, 3), 2]


def sources_of(mix: Interleaving) -> tuple[list[int], list[int]]:
    source, index = mix.locate(np.arange(mix.num_samples))
    return source.tolist(), index.tolist()


# ---- fair sequences --------------------------------------------------------------------------------------


@given(SHARES)
def test_every_prefix_is_within_one_draw_of_its_share_for_any_number_of_sources(shares: list[int]) -> None:
    source = fair_pattern(tuple(shares)).source
    counts = np.cumsum(source[:, None] == np.arange(len(shares)), axis=0)
    ideal = np.arange(1, len(source) + 1)[:, None] * np.array(shares) / sum(shares)
    used = sum(share > 0 for share in shares)
    assert np.abs(counts - ideal).max() <= (1 - 1 / (2 * used - 2) if used > 1 else 0) + 1e-9


def test_the_largest_deficit_rule_would_break_the_bound_that_holds_here() -> None:
    shares = np.array([1, 1, 1, 1, 1, 3, 5, 5, 5, 9, 30, 30, 30, 30])
    total = int(shares.sum())
    ideal = np.arange(1, total + 1)[:, None] * shares / total

    counts = np.zeros(len(shares))
    worst = 0.0
    for row in ideal:
        counts[np.argmax(row - counts)] += 1
        worst = max(worst, np.abs(row - counts).max())
    assert worst > 1.3

    fair = np.cumsum(fair_pattern(tuple(shares.tolist())).source[:, None] == np.arange(len(shares)), axis=0)
    assert np.abs(fair - ideal).max() < 1


@given(SHARES, st.integers(0, 10**12))
def test_draws_and_sources_are_inverse_anywhere(shares: list[int], start: int) -> None:
    pattern = fair_pattern(tuple(shares))
    draws = np.arange(start, start + 200)
    source, index = pattern.locate(draws)
    for number in set(source.tolist()):
        assert pattern.draws(number, index[source == number]).tolist() == draws[source == number].tolist()
        assert index[source == number][0] == pattern.counts(start)[number]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8).filter(any), st.integers(8, 200))
def test_a_quota_is_met_exactly_and_evenly_with_any_table_size(quota: list[int], limit: int) -> None:
    pattern = QuotaPattern(quota, limit)
    source, index = pattern.locate(np.arange(sum(quota)))
    seen = [0] * len(quota)
    for number, nth in zip(source.tolist(), index.tolist(), strict=True):
        assert nth == seen[number]
        seen[number] += 1
    assert seen == quota
    for number, count in enumerate(quota):
        assert pattern.draws(number, np.arange(count)).tolist() == np.flatnonzero(source == number).tolist()
    counts = np.cumsum(source[:, None] == np.arange(len(quota)), axis=0)
    ideal = np.arange(1, sum(quota) + 1)[:, None] * np.array(quota) / sum(quota)
    assert np.abs(counts - ideal).max() < (1 if sum(quota) <= limit else len(quota) + 3)
    middle = sum(quota) // 2
    assert pattern.counts(middle).tolist() == np.bincount(source[:middle], minlength=len(quota)).tolist()


# ---- weights ---------------------------------------------------------------------------------------------


def test_decimal_weights_are_exact_fractions() -> None:
    assert integer_shares(exact_weights([0.7, 0.2, 0.1])) == (7, 2, 1)
    assert integer_shares(exact_weights([1 / 3, 2 / 3])) == (1, 2)
    assert integer_shares(exact_weights([3, 1])) == (3, 1)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20))
def test_weights_without_a_small_common_denominator_are_rounded_within_the_bound(
    weights: list[float],
) -> None:
    exact = exact_weights(weights)
    shares = integer_shares(exact)
    assert min(shares) >= 1
    assert sum(shares) <= MAX_PERIOD
    errors = [abs(Fraction(n, sum(shares)) - w) for n, w in zip(shares, exact, strict=True)]
    allowed = 1 if min(exact) * MAX_PERIOD >= 1 else len(weights)
    assert max(errors) <= Fraction(allowed, MAX_PERIOD)


def test_a_tiny_weight_is_still_drawn() -> None:
    assert integer_shares(exact_weights([1e-9, 1, 1]))[0] == 1
    assert sum(integer_shares(exact_weights([1e-9] * 50 + [1]))) == MAX_PERIOD


def test_temperature_goes_from_sizes_to_equal_weights() -> None:
    assert temperature_weights([300, 100], 1) == (Fraction(3, 4), Fraction(1, 4))
    assert temperature_weights([400, 100], 2)[0] == Fraction(2, 3)
    assert temperature_weights([300, 100], math.inf) == (Fraction(1, 2), Fraction(1, 2))


# ---- stop rules ------------------------------------------------------------------------------------------


def test_first_ends_with_the_source_that_is_seen_whole_first() -> None:
    mix = MixtureSpec.weighted([7, 100], [0.7, 0.3], stop="first").epoch(0)
    counts = Counter(sources_of(mix)[0])
    assert counts[0] == 7
    assert sources_of(mix)[0][-1] == 0
    assert mix.num_samples in (9, 10)


def test_all_ends_when_every_source_was_seen_and_small_ones_repeat() -> None:
    mix = MixtureSpec.weighted([7, 100], [0.7, 0.3], stop="all").epoch(0)
    counts = Counter(sources_of(mix)[0])
    assert counts[1] == 100
    assert sources_of(mix)[0][-1] == 1
    assert counts[0] > 2 * 100


def test_never_goes_on() -> None:
    mix = MixtureSpec.weighted([7, 100], [0.7, 0.3], stop="never").epoch(0)
    assert mix.num_samples == ENDLESS
    source, index = mix.locate(np.arange(10**15, 10**15 + 10))
    assert Counter(source.tolist()) == {0: 7, 1: 3}
    assert index[source == 0][0] == 7 * 10**14


def test_repeats_give_every_source_exactly_as_often_as_asked() -> None:
    spec = MixtureSpec.repeated([10, 7, 4], [1, 2, 0.5])
    for epoch in range(3):
        source, index = sources_of(spec.epoch(epoch))
        assert Counter(source) == {0: 10, 1: 14, 2: 2}
        assert sorted(i for s, i in zip(source, index, strict=True) if s == 2) == [2 * epoch, 2 * epoch + 1]


def test_a_billion_samples_keep_a_small_source_spread_out() -> None:
    mix = MixtureSpec.repeated([700_000_001, 300_000_007, 12_345], [1, 1, 1]).epoch(0)
    assert mix.counts(mix.num_samples).tolist() == [700_000_001, 300_000_007, 12_345]
    assert abs(int(mix.counts(mix.num_samples // 2)[2]) - 12_345 // 2) < 6


# ---- schedules, runs and epochs --------------------------------------------------------------------------


def test_weights_change_at_their_step_and_hold_over_epochs() -> None:
    spec = MixtureSpec.weighted([1000, 1000], {0: [1, 0], 30: [0.5, 0.5], 130: [0, 1]}, stop="never")
    source, _ = spec.epoch(0).locate(np.arange(200))
    assert source[:30].tolist() == [0] * 30
    assert source[130:].tolist() == [1] * 70
    assert Counter(source[30:130].tolist()) == {0: 50, 1: 50}
    short = MixtureSpec.weighted([10, 10], {0: [1, 0], 15: [0, 1]}, stop="first")
    runs = [sources_of(short.epoch(epoch))[0] for epoch in range(3)]
    assert runs == [[0] * 10, [0] * 5 + [1] * 10, [1] * 10]


def test_runs_make_batches_of_one_source() -> None:
    source, index = sources_of(MixtureSpec.weighted([64, 64], [3, 1], run_length=8).epoch(0))
    batches = [source[at : at + 8] for at in range(0, len(source) - 7, 8)]
    assert all(len(set(batch)) == 1 for batch in batches)
    assert Counter(batch[0] for batch in batches[:8]) == {0: 6, 1: 2}
    assert index[:8] == list(range(8)) or source[0] == 1


def specs(sizes: list[int], draw: Any) -> MixtureSpec:
    weights = st.lists(st.sampled_from(WEIGHTS), min_size=len(sizes), max_size=len(sizes)).filter(any)
    run_length = draw(st.sampled_from([1, 1, 2, 3, 7]))
    if draw(st.booleans()):
        repeats = draw(weights)
        assume(any(round(times * size) for times, size in zip(repeats, sizes, strict=True)))
        return MixtureSpec.repeated(sizes, repeats, run_length=run_length)
    steps = [0, *draw(st.lists(st.integers(1, 80), max_size=3, unique=True))]
    schedule = {step: draw(weights) for step in steps}
    return MixtureSpec.weighted(
        sizes, schedule, stop=draw(st.sampled_from(["first", "all"])), run_length=run_length
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.data())
def test_every_source_counts_on_without_a_gap_through_all_epochs(sizes: list[int], data: Any) -> None:
    spec = specs(sizes, data.draw)
    had = [0] * len(sizes)
    for epoch in range(3):
        mix = spec.epoch(epoch)
        assert mix.first.tolist() == had
        source, index = mix.locate(np.arange(mix.num_samples))
        for number, nth in zip(source.tolist(), index.tolist(), strict=True):
            assert nth == had[number]
            had[number] += 1
        for number in range(len(sizes)):
            own = np.flatnonzero(source == number)
            assert mix.positions(number, index[own]).tolist() == own.tolist()
            outside = np.array([mix.first[number] - 1, had[number]])
            assert mix.positions(number, outside).tolist() == [-1, -1]
        cut = data.draw(st.integers(0, mix.num_samples))
        assert mix.counts(cut).tolist() == np.bincount(source[:cut], minlength=len(sizes)).tolist()


def test_the_digest_tells_mixtures_apart_and_nothing_else() -> None:
    spec = MixtureSpec.weighted([5, 5], [0.5, 0.5])
    assert spec.digest == MixtureSpec.weighted([5, 5], [1, 1]).digest
    others = [
        MixtureSpec.weighted([5, 6], [1, 1]),
        MixtureSpec.weighted([5, 5], [1, 2]),
        MixtureSpec.weighted([5, 5], {0: [1, 1], 9: [1, 2]}),
        MixtureSpec.weighted([5, 5], [1, 1], stop="all"),
        MixtureSpec.weighted([5, 5], [1, 1], run_length=2),
        MixtureSpec.repeated([5, 5], [1, 1]),
    ]
    assert len({spec.digest, *(other.digest for other in others)}) == 7


# ---- windows and ranks -----------------------------------------------------------------------------------

BLOCKS = [[3, 4, 0, 5, 2, 6, 3, 3, 1, 2], [5, 6], [4, 4, 4]]
SIZES = [sum(counts) for counts in BLOCKS]


SHUFFLES = [Shuffle("window", 2, 1), Shuffle("window", 4, 4), Shuffle("window", 3, 3, exchange=0.5)]


def windows_of(
    spec: MixtureSpec, epoch: int, seed: int = 1, blocks: Any = BLOCKS, shuffle: Shuffle = SHUFFLES[0]
) -> MixtureWindows:
    def order(source: int, source_epoch: int) -> Order:
        return Order(blocks[source], shuffle, seed=source_seed(seed, source), epoch=source_epoch)

    return MixtureWindows(
        spec.epoch(epoch),
        seed=seed,
        epoch=epoch,
        shuffle=shuffle,
        sizes=[sum(counts) for counts in blocks],
        num_blocks=[np.count_nonzero(counts) for counts in blocks],
        orders=order,
    )


def samples_at(windows: MixtureWindows, positions: np.ndarray[Any, Any]) -> list[tuple[tuple[int, int], int]]:
    """((source, block), row in the block) of each position, window by window."""
    found = []
    for window, slot in zip(*(a.tolist() for a in windows.locate(positions)), strict=True):
        ordinal, row = windows.window_samples(window)
        block = int(windows.window_blocks(window)[ordinal[slot]])
        found.append(((windows.source_of(window)[0], block), int(row[slot])))
    return found


def test_a_window_of_a_mixture_is_a_window_of_one_of_its_sources() -> None:
    windows = windows_of(MixtureSpec.weighted(SIZES, [0.5, 0.3, 0.2], stop="all"), epoch=1)
    for number in np.unique(windows.locate(np.arange(windows.num_samples))[0]).tolist():
        own = windows.source_window(number)
        assert (own.source, own.epoch, own.number) == windows.source_of(number)
        assert own.windows.window_blocks(own.number).tolist() == windows.window_blocks(number).tolist()
        assert own.windows.source_window(own.number) == (0, None, own.windows, own.number)


MIXES = [
    MixtureSpec.weighted(SIZES, [0.5, 0.3, 0.2], stop="all"),
    MixtureSpec.weighted(SIZES, {0: [1, 1, 0], 20: [0, 1, 2]}, stop="first", run_length=3),
    MixtureSpec.repeated(SIZES, [1, 2, 0.5]),
]


@pytest.mark.parametrize("spec", MIXES)
@pytest.mark.parametrize("shuffle", SHUFFLES, ids=str)
def test_in_each_source_epoch_each_sample_comes_exactly_once(spec: MixtureSpec, shuffle: Shuffle) -> None:
    seen: Counter[Any] = Counter()
    total = [0] * len(SIZES)
    for epoch in range(4):
        windows = windows_of(spec, epoch, shuffle=shuffle)
        positions = np.arange(windows.num_samples)
        source, index = windows.interleaving.locate(positions)
        for number, nth, sample in zip(source, index, samples_at(windows, positions), strict=True):
            assert sample[0][0] == number
            seen[int(nth) // SIZES[number], sample] += 1
            total[number] += 1
    assert set(seen.values()) == {1}
    for number, counts in enumerate(BLOCKS):
        for source_epoch in range(total[number] // SIZES[number]):
            for block, rows in enumerate(counts):
                assert all(seen[source_epoch, ((number, block), row)] for row in range(rows))


@pytest.mark.parametrize("spec", MIXES)
@pytest.mark.parametrize("shuffle", SHUFFLES, ids=str)
def test_samples_count_those_of_the_sources_before(spec: MixtureSpec, shuffle: Shuffle) -> None:
    first_row = [np.cumsum(counts) - counts for counts in BLOCKS]
    for epoch in range(2):
        windows = windows_of(spec, epoch, shuffle=shuffle)
        positions = np.arange(windows.num_samples)[::-1]
        numbers = [
            sum(SIZES[:source]) + int(first_row[source][block]) + row
            for (source, block), row in samples_at(windows, positions)
        ]
        assert windows.samples(positions).tolist() == numbers


@pytest.mark.parametrize("spec", MIXES)
@pytest.mark.parametrize("shuffle", SHUFFLES, ids=str)
@pytest.mark.parametrize("begin", [0, 7])
def test_numbering_all_positions_in_order_gives_what_asking_for_them_gives(
    spec: MixtureSpec, shuffle: Shuffle, begin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharding.mixture.windows._AT_ONCE", 5)
    windows = windows_of(spec, 1, shuffle=shuffle)
    parts = [*windows.in_order(begin)]
    assert np.concatenate([positions for positions, _ in parts]).tolist() == [
        *range(begin, windows.num_samples)
    ]
    for positions, samples in parts:
        assert np.array_equal(samples, windows.samples(positions))


@pytest.mark.parametrize("weights", [[1, 1], [20, 1], [1, 20]])
def test_numbering_a_mixture_mixes_each_window_once_whatever_its_weights(
    weights: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharding.mixture.windows._AT_ONCE", 200)
    mixed = Counter[tuple[int, int, int]]()

    def numbers(order: Order, window: int) -> Any:
        mixed[order.seed, order.epoch, window] += 1
        return window_numbers(order, window)

    window_numbers = Order.window_numbers
    monkeypatch.setattr(Order, "window_numbers", numbers)
    blocks = [[10] * 60 * weight for weight in weights]
    spec = MixtureSpec.weighted([sum(counts) for counts in blocks], weights)
    windows = windows_of(spec, 0, blocks=blocks, shuffle=Shuffle("window", 40, 8))
    assert sum(len(positions) for positions, _ in windows.in_order()) == windows.num_samples
    assert set(mixed.values()) == {1}


@pytest.mark.parametrize("spec", MIXES)
@pytest.mark.parametrize("shuffle", SHUFFLES, ids=str)
def test_windows_know_where_their_slots_come(spec: MixtureSpec, shuffle: Shuffle) -> None:
    windows = windows_of(spec, 1, shuffle=shuffle)
    window, slot = windows.locate(np.arange(windows.num_samples))
    assert window.max() < windows.num_windows
    for number in set(window.tolist()):
        positions = windows.window_positions(number)
        assert len(positions) == windows.window_length(number)
        here = np.flatnonzero(window == number)
        assert positions[slot[here]].tolist() == here.tolist()
        assert (positions >= 0).sum() == len(here)
        assert windows.window_span(number) == (here.min(), here.max() + 1)


@given(
    st.sampled_from(MIXES),
    st.sampled_from([(12, 1), (6, 2), (4, 3), (2, 6)]),
    st.sampled_from(["drop", "pad", "even", "uneven"]),
    st.integers(0, 40),
    st.sampled_from(SHUFFLES),
)
def test_global_batches_are_the_same_in_every_world_and_ranks_own_what_they_take(
    spec: MixtureSpec, world: tuple[int, int], tail: Tail, start: int, shuffle: Shuffle
) -> None:
    windows = windows_of(spec, 0, shuffle=shuffle)
    batch_size, world_size = world
    start = min(start, windows.num_samples)

    def plan(rank: int) -> MixturePlan:
        return MixturePlan(
            windows, batch_size=batch_size, rank=rank, world_size=world_size, tail=tail, start=start
        )

    plans = [plan(rank) for rank in range(world_size)]
    for number in range((windows.num_samples - start) // 12):
        joint = np.concatenate([one.positions(number, number + 1)[0] for one in plans])
        batch = np.arange(start + 12 * number, start + 12 * (number + 1))
        assert joint.tolist() == batch[np.argsort(windows.lanes(batch), kind="stable")].tolist()
    given, _ = windows.locate(np.arange(windows.num_samples))
    for one in plans:
        positions, _ = one.positions(0, one.num_batches)
        taken = Counter(positions.tolist()) - Counter(one.padding.tolist())
        window, slot = windows.locate(np.array(sorted(taken), np.int64))
        for number in set(given.tolist()):
            own = one.rank_indices(number)
            own = np.arange(windows.window_length(number)) if own is None else own
            assert own.tolist() == sorted(set(slot[window == number].tolist()))


@pytest.mark.parametrize("spec", MIXES)
def test_a_run_resumed_at_any_position_with_another_world_gives_the_same_samples(spec: MixtureSpec) -> None:
    windows = windows_of(spec, 1)
    whole = samples_at(windows, np.arange(windows.num_samples))
    assert windows.num_lanes == 1
    for position in range(0, windows.num_samples, 5):
        again = windows_of(spec, 1)
        plans = [
            MixturePlan(again, batch_size=2, rank=rank, world_size=3, tail="uneven", start=position)
            for rank in range(3)
        ]
        rest = [
            sample
            for number in range(plans[0].num_global_batches)
            for plan in plans
            if number < plan.num_batches
            for sample in samples_at(again, plan.positions(number, number + 1)[0])
        ]
        assert whole[:position] + rest == whole


def test_another_source_leaves_the_orders_of_the_others_alone() -> None:
    two = windows_of(MixtureSpec.weighted(SIZES[:2], [1, 1]), 0, blocks=BLOCKS[:2])
    three = windows_of(MixtureSpec.weighted(SIZES, [1, 1, 1]), 0)

    def of_first(windows: MixtureWindows) -> list[Any]:
        samples = samples_at(windows, np.arange(windows.num_samples))
        return list(islice((s for s in samples if s[0][0] == 0), 10))

    assert of_first(two) == of_first(three)


def test_a_full_shuffle_is_refused_since_it_has_no_windows() -> None:
    with pytest.raises(ValueError, match="needs windows"):
        windows_of(MIXES[0], 0, shuffle=Shuffle("full"))


@pytest.mark.parametrize("stop", ["first", "all"])
def test_sources_go_on_sample_by_sample_through_weights_that_are_set(stop):
    spec = MixtureSpec.weighted([50, 30, 20], [5, 3, 2], stop=stop)
    changed = spec.changed(spec.epoch(1), 1, [1, 1, 8], position=20)
    again = changed.changed(changed.epoch(2), 2, [3, 3, 1], position=7)
    located = []
    for number in range(5):
        epoch = again.epoch(number)
        located.append(epoch.locate(np.arange(epoch.num_samples)))
    source, index = (np.concatenate(each) for each in zip(*located, strict=True))
    for number in range(3):
        own = index[source == number]
        assert np.array_equal(own, np.arange(len(own)))


@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    data=st.data(),
    stop=st.sampled_from(["first", "all", "never"]),
    most=st.sampled_from([4, 64]),
)
def test_weights_that_are_set_change_nothing_before_and_are_known_from_a_state(sizes, data, stop, most):
    """Whatever was set and wherever, against a mixture that merges early; each is read from a state."""
    weights = st.lists(st.integers(0, 4), min_size=len(sizes), max_size=len(sizes)).filter(any)
    whole = few = MixtureSpec.weighted(sizes, {0: data.draw(weights), 17: data.draw(weights)}, stop=stop)
    epoch, since = 0, 0
    for _ in range(data.draw(st.integers(1, 9))):
        if data.draw(st.booleans()) and stop != "never":
            epoch, since = epoch + 1, 0
        current, shares = whole.epoch(epoch), data.draw(weights)
        last = min(current.num_samples, since + 50)
        since = data.draw(st.integers(since, last))
        at = data.draw(st.integers(since, last))
        before = whole
        whole = whole.changed(current, epoch, shares, position=at, since=since)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weight_steps, "MAX_STEPS", most)
            few = few.changed(few.epoch(epoch), epoch, shares, position=at, since=since)
        assert len(few.changes.steps) <= max(most, 4)
        few = replace(few, changes=NOTHING_SET).resumed(json.loads(json.dumps(few.changes.to_json())))
        assert_alike(before.epoch(epoch), whole.epoch(epoch), np.arange(at))
        for number in range(epoch if few.changes.base else 0, epoch + (1 if stop == "never" else 3)):
            expected, got = whole.epoch(number), few.epoch(number)
            assert got.num_samples == expected.num_samples
            assert number > epoch or got.begin <= since
            assert_alike(expected, got, np.arange(got.begin, min(got.num_samples, at + 200)))
        since = at


def assert_alike(one, other, positions):
    for left, right in zip(one.locate(positions), other.locate(positions), strict=True):
        assert np.array_equal(left, right)


def test_what_came_before_the_oldest_weights_that_are_kept_is_refused():
    spec = MixtureSpec.weighted([50, 30], [1, 1], stop="all")
    for number in range(70):
        spec = spec.changed(spec.epoch(number), number, [1, 1 + number], position=10)
    assert len(spec.changes.steps) <= 64
    known = spec.changes.known_from[0]
    assert 0 < known < 69
    spec.epoch(known)
    with pytest.raises(
        ValueError, match=f"epoch {known - 1} of the mixture is over, and weights were set more"
    ):
        spec.epoch(known - 1)


def test_epochs_between_two_changes_are_counted_once():
    spec = MixtureSpec.weighted([50, 30], [1, 1]).changed(
        MixtureSpec.weighted([50, 30], [1, 1]).epoch(3), 3, [1, 3], position=10
    )
    spec = spec.changed(spec.epoch(10**9), 10**9, [3, 1], position=10)
    first = spec.epoch(10**9 + 1).first
    one_by_one = sum(epoch.counts(epoch.num_samples) for epoch in map(spec.epoch, range(5)))
    each = spec.epoch(5).counts(spec.epoch(5).num_samples)
    last = spec.epoch(10**9).counts(spec.epoch(10**9).num_samples)
    assert np.array_equal(first, one_by_one + (10**9 - 5) * each + last)
