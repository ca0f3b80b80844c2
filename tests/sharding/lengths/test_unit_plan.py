"""Plans over units: every world deals the same sequence, and any number of units done resumes it."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from sharding.lengths import units as units_module
from sharding.lengths.batching import Bucketed, Packed, TokenBudget
from sharding.lengths.unit_plan import UnitPlan, UnitPlanner, UnitSequence, epoch_lengths
from sharding.lengths.units import PackingWindowStart, units_key
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle

TAILS = ["drop", "pad", "even", "uneven"]
BATCHINGS = [
    Packed(8, window=16),
    Packed(8, overlong="truncate", window=7),
    TokenBudget(24, window=16, overlong="truncate"),
    Bucketed(3, boundaries=(2, 5), window=16),
    Bucketed(4, boundaries=3, window=10),
]
worlds = st.integers(1, 5)
batchings = st.sampled_from(BATCHINGS)
# Lists of any size are mostly short ones: half of them shall fill several windows.
sample_lengths = st.lists(st.integers(0, 30), min_size=1, max_size=60) | st.lists(
    st.integers(0, 12), min_size=30, max_size=60
)


@pytest.fixture(autouse=True, scope="module")
def _small_first_windows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units_module, "FIRST_PACKING_WINDOW_SAMPLES", 4)
        yield


def order_of(num_samples, epoch=0, kind="window", lanes=1):
    blocks = [5] * (num_samples // 5) + [num_samples % 5]
    shuffle = Shuffle(kind) if kind == "full" else Shuffle(kind, 3, canonical_nodes=lanes)
    return Order(blocks, shuffle, seed=1, epoch=epoch)


def sequence_of(lengths, batching, order=None):
    order = order or order_of(len(lengths))
    return order, UnitPlanner(batching, lengths=np.array(lengths, np.int64)).sequence(order)


def plans_of(made, world_size, tail, start=0, rows=1):
    order, sequence = made
    rows = rows if sequence.batching.rows_are_units else 1
    given = {"batch_size": rows, "world_size": world_size, "tail": tail, "start": start}
    return [UnitPlan(order, sequence, rank=rank, **given) for rank in range(world_size)]


def units_of_batches(plan):
    """Each batch as a list of units, each a tuple of (position, begin, length)."""
    out = []
    for b in range(plan.num_batches):
        found = plan.batches(b, b + 1)
        p = found.segments
        flat = list(zip(p.position.tolist(), p.begin.tolist(), p.length.tolist(), strict=True))
        assert found.sizes.tolist() == [len(flat)]
        bounds = np.cumsum([0, *found.segments_of_row.tolist()]).tolist()
        assert len(found.segments_of_row) == found.rows.sum()
        out.append([tuple(flat[a:b]) for a, b in pairwise(bounds)])
    return out


def delivered(plans):
    """All units, global batch after global batch, rank after rank."""
    of_rank = [units_of_batches(plan) for plan in plans]
    steps = range(plans[0].num_global_batches)
    return [unit for b in steps for batches in of_rank if b < len(batches) for unit in batches[b]]


@given(sample_lengths, batchings, worlds, st.integers(1, 3), st.sampled_from(TAILS))
def test_each_world_delivers_the_same_sequence(lengths, batching, world_size, rows, tail):
    made = sequence_of(lengths, batching)
    alone = delivered(plans_of(made, 1, "uneven"))
    plans = plans_of(made, world_size, tail, rows=rows)
    together = delivered(plans)
    if tail == "drop":
        assert together == alone[: len(together)]
        assert plans[0].position_after(plans[0].num_global_batches) == len(together)
        assert len(alone) - len(together) <= plans[0].batch_plan.global_batch_size
    elif tail == "uneven":
        assert Counter(together) == Counter(alone)
    else:
        assert together[: len(alone)] == alone
        assert len(together) - len(alone) == plans[0].num_padded_global


@given(sample_lengths, batchings, worlds, st.integers(1, 3))
def test_all_ranks_have_the_same_number_of_batches(lengths, batching, world_size, rows):
    made = sequence_of(lengths, batching)
    for tail in ("drop", "pad", "even"):
        plans = plans_of(made, world_size, tail, rows=rows)
        assert len({plan.num_batches for plan in plans}) == 1


@given(sample_lengths, batchings)
def test_nothing_is_lost_or_doubled(lengths, batching):
    order, sequence = made = sequence_of(lengths, batching)
    numbers = order.samples(np.arange(len(lengths)))
    tokens = Counter()
    pieces = Counter()
    for unit in delivered(plans_of(made, 1, "uneven")):
        for position, begin, length in unit:
            pieces[int(numbers[position])] += 1
            tokens[int(numbers[position])] += length
            assert begin + length <= lengths[numbers[position]]
    assert sum(tokens.values()) == sequence.stats.tokens
    assert sequence.stats.tokens + sequence.stats.truncated_tokens == sum(lengths)
    if isinstance(batching, Packed):
        assert set(pieces) == {i for i, size in enumerate(lengths) if size}
    else:
        assert pieces == Counter(range(len(lengths)))


@given(sample_lengths, batchings, worlds, worlds, st.integers(1, 3), st.data())
def test_a_position_resumes_in_any_world(lengths, batching, world_size, other, rows, data):
    made = sequence_of(lengths, batching)
    plans = plans_of(made, world_size, "uneven", rows=rows)
    done = data.draw(st.integers(0, plans[0].num_global_batches))
    of_rank = [units_of_batches(plan)[:done] for plan in plans]
    head = [unit for b in range(done) for batches in of_rank if b < len(batches) for unit in batches[b]]
    start = plans[0].position_after(done)
    rest = delivered(plans_of(made, other, "uneven", start=start, rows=rows))
    assert Counter(head + rest) == Counter(delivered(plans_of(made, 1, "uneven")))


def located(order, positions):
    windows, slots = order.locate(np.array(positions, np.int64))
    return Counter(zip(windows.tolist(), slots.tolist(), strict=True))


@given(sample_lengths, batchings, worlds, st.integers(1, 3), st.sampled_from(TAILS), st.data())
def test_rank_indices_are_those_the_batches_take(lengths, batching, world_size, rows, tail, data):
    order = order_of(len(lengths), lanes=data.draw(st.integers(1, 3)))
    order, sequence = made = sequence_of(lengths, batching, order)
    start = data.draw(st.integers(0, sequence.num_units))
    for plan in plans_of(made, world_size, tail, start, rows):
        positions = [p for batch in units_of_batches(plan) for unit in batch for p, _, _ in unit]
        if plan.num_padded:  # padding brings its windows once more
            last = units_of_batches(plan)[-1][-plan.num_padded :]
            positions = positions[: len(positions) - sum(len(unit) for unit in last)]
        found = []
        for window in range(order.num_windows):
            slots = plan.rank_indices(window)
            assert slots.tolist() == sorted(slots.tolist())
            found += [(window, slot) for slot in slots.tolist()]
        assert Counter(found) == located(order, positions)
        padding = [p for unit in last for p, _, _ in unit] if plan.num_padded else []
        assert plan.padding.tolist() == padding


@given(sample_lengths, worlds)
def test_dropping_the_tail_leaves_whole_batches_only(lengths, world_size):
    for plan in plans_of(sequence_of(lengths, BATCHINGS[3]), world_size, "drop"):
        assert (plan.positions(0, plan.num_batches)[1] == 3).all()


@given(sample_lengths, batchings, worlds)
def test_in_file_order_units_follow_their_first_samples(lengths, batching, world_size):
    """In each packing window; the order alone differs from that of a shuffle."""
    made = order, sequence = sequence_of(lengths, batching, order_of(len(lengths), kind="none"))
    units = delivered(plans_of(made, 1, "uneven"))
    short = len(lengths) % batching.sizes_multiple > 0  # comes last in any order
    for window, (first, end) in enumerate(pairwise(sequence.first_unit.tolist())):
        own = units[first:end]
        ordered = own[:-1] if short and end == sequence.num_units else own
        assert ordered == sorted(ordered, key=lambda unit: unit[0])
        assert all(list(unit) == sorted(unit) for unit in own), f"of packing window {window}"
    key_of = units_key(order.seed, order.epoch, True)
    least = batching.least_samples(sequence.lengths)
    keyed = UnitSequence(batching, len(lengths), key_of, least=least, lengths=sequence.lengths)
    assert Counter(map(sorted_unit, units)) == Counter(
        map(sorted_unit, delivered(plans_of((order, keyed), 1, "uneven")))
    )
    assert delivered(plans_of(made, world_size, "even"))[: len(units)] == units


def sorted_unit(unit):
    return tuple(sorted(unit))


@given(sample_lengths, batchings)
def test_a_range_of_batches_is_its_batches_one_by_one(lengths, batching):
    plan = plans_of(sequence_of(lengths, batching), 2, "pad", rows=2)[0]
    positions, sizes = plan.positions(0, plan.num_batches)
    assert positions.dtype == sizes.dtype == np.int64
    assert sizes.sum() == len(positions)
    one_by_one = [plan.positions(b, b + 1)[0].tolist() for b in range(plan.num_batches)]
    assert [p for batch in one_by_one for p in batch] == positions.tolist()


@given(sample_lengths, batchings, st.data())
def test_from_any_packing_window_on_the_units_are_those_of_the_whole_epoch(lengths, batching, data):
    """A packing window takes over nothing from those before, whose lengths need not be known."""
    order, whole = sequence_of(lengths, batching)
    packing_window = data.draw(st.integers(0, whole.num_packing_windows - 1))
    position, unit = int(whole.bounds[packing_window]), int(whole.first_unit[packing_window])
    in_order, least = whole.lengths.copy(), batching.least_samples(whole.lengths)
    in_order[:position] = data.draw(st.integers(0, 9))
    key_of, start = units_key(order.seed, order.epoch, True), PackingWindowStart(order.epoch, position, unit)
    rest = UnitSequence(batching, len(lengths), key_of, least=least, begin=start, lengths=in_order)
    assert (rest.begin, rest.num_units, rest.num_short) == (unit, whole.num_units, whole.num_short)
    assert delivered(plans_of((order, rest), 1, "uneven", unit)) == delivered(
        plans_of((order, whole), 1, "uneven", unit)
    )
    measured = UnitSequence(batching, len(lengths), key_of, least=least, begin=start)
    for number in range(packing_window, whole.num_packing_windows):
        assert not measured.is_complete
        measured.add(number, whole.lengths[slice(*whole.bounds[number : number + 2])])
    assert measured.first_unit[packing_window:].tolist() == whole.first_unit[packing_window:].tolist()
    assert (measured.is_complete, measured.num_short) == (True, whole.num_short)


def test_a_last_batch_is_filled_up_with_its_own_units():
    made = sequence_of([1] * 70, Packed(2, window=70))
    (plan,) = plans_of(made, 1, "pad", start=30, rows=3)
    alone = [unit for batch in units_of_batches(plan) for unit in batch]
    assert plan.num_padded == 1
    assert alone[-1] == alone[-3] == units_of_batches(plan)[-1][0]


@pytest.mark.parametrize("kind", ["window", "full", "blocks", "none"])
def test_lengths_follow_the_order(kind):
    order, lengths = order_of(43, kind=kind), np.arange(43, dtype=np.int32)
    in_order = epoch_lengths(order, lengths)
    assert in_order.dtype == np.int32
    assert in_order.tolist() == order.samples(np.arange(43)).tolist()


def test_epochs_differ_and_repeat():
    lengths = np.random.default_rng(0).integers(1, 9, 200)
    made = [sequence_of(lengths, BATCHINGS[0], order_of(200, epoch)) for epoch in (0, 1, 0)]
    first, second, again = (delivered(plans_of(one, 1, "uneven")) for one in made)
    assert first == again
    assert first != second


def test_windows_start_small_and_are_whole_batches():
    bounds = units_module.packing_window_bounds(100, 16, 3).tolist()
    assert bounds == [0, 6, 15, 33, 51, 69, 87, 100]
    assert units_module.packing_window_bounds(0, 16).tolist() == [0]
    assert units_module.packing_window_bounds(3, 2).tolist() == [0, 2, 3]


@pytest.mark.parametrize("batching", BATCHINGS)
def test_what_a_batching_says_of_itself_survives_json(batching):
    assert json.loads(json.dumps(batching.to_json())) == batching.to_json()


def test_a_fingerprint_tells_lengths_and_batching_apart():
    lengths = np.arange(1, 30)
    tokens = [UnitPlanner(b, lengths=ls).token for ls in (lengths, lengths[::-1]) for b in BATCHINGS]
    assert len({json.dumps(token) for token in tokens}) == len(tokens)
    assert UnitPlanner(BATCHINGS[0], lengths=lengths.astype(np.int32)).token == tokens[0]


def test_the_units_of_an_epoch_are_found_once():
    planner, order = UnitPlanner(BATCHINGS[0], lengths=np.arange(1, 44)), order_of(43)
    first, again, other = (planner.sequence(order_of(43, epoch)) for epoch in (0, 0, 1))
    assert first is again is not other
    assert first.lengths.tolist() == (order.samples(np.arange(43)) + 1).tolist()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Packed(0), "length must be"),
        (lambda: Packed(8, overlong="cut"), "overlong must be one of split, truncate, error"),
        (lambda: Packed(8, window=0), "window must be"),
        (lambda: TokenBudget(8, multiple=16), "multiple=16 exceeds max_tokens=8"),
        (lambda: TokenBudget(8, overlong="split"), "truncate or error"),
        (lambda: TokenBudget(8, max_samples=0), "max_samples must be"),
        (lambda: Bucketed(0), "batch_size must be"),
        (lambda: Bucketed(4, boundaries=(5, 3)), "boundaries must be ascending"),
        (lambda: Bucketed(4, boundaries=0), "boundaries must be"),
        (lambda: sequence_of([3, -1], Packed(8)), "lengths must be >= 0"),
        (lambda: plans_of(sequence_of([3], Packed(8)), 1, "what"), "tail must be"),
        (lambda: plans_of(sequence_of([3], Packed(8)), 1, "pad", start=2), "start must be"),
    ],
)
def test_bad_arguments_say_what_to_do(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_batches_of_whole_batchings_have_no_rows():
    order, sequence = sequence_of([3, 4], TokenBudget(8))
    with pytest.raises(ValueError, match="leave batch_size out"):
        UnitPlan(order, sequence, batch_size=2, rank=0, world_size=1, tail="drop")
