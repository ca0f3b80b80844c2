"""Where samples come: the inverse of every order gives back the positions of the order itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from numpy.typing import NDArray

from prefetch.core.kernels import kernels
from sharding.mixture.interleaving import MixtureSpec
from sharding.mixture.inverse import places_in_permutation, places_in_selection, positions_of
from sharding.mixture.token_schedule import TokenEpochs
from sharding.mixture.windows import MixtureWindows, source_seed
from sharding.order.balanced import Balance, BalancedOrder
from sharding.order.epoch_order import EpochOrder
from sharding.order.order import Order
from sharding.order.permutations import feistel, seeded_permutation
from sharding.order.selection import SelectedOrder, Selection
from sharding.order.shuffle import Shuffle

KEYS = st.integers(0, 2**64 - 1)
TABLES = st.lists(st.integers(0, 7), min_size=1, max_size=40) | st.lists(
    st.integers(0, 300), min_size=1, max_size=6
)
SHUFFLES = st.just(Shuffle("full")) | st.builds(
    lambda kind, window, lanes, share, ramp: Shuffle(
        kind, max(window, lanes), lanes, 1 if kind == "none" else share, ramp=ramp
    ),
    st.sampled_from(["window", "blocks", "none"]),
    st.integers(1, 20),
    st.integers(1, 9),
    st.sampled_from([1, 0.5, 0]),
    st.booleans(),
)


def check(order: EpochOrder, num_samples: int, begin: int = 0, end: int | None = None) -> None:
    """Compare with a search through the whole epoch, for all samples, asked for in another order."""
    asked = np.random.default_rng(num_samples).permutation(num_samples)
    which, positions = positions_of(order, asked, begin, end)
    first = max(begin, order.known_from)
    forward = order.samples(np.arange(first, min(order.num_samples, 1 << 62 if end is None else end)))
    expected = [(i, first + at) for i, sample in enumerate(asked) for at in np.flatnonzero(forward == sample)]
    assert list(zip(which.tolist(), positions.tolist(), strict=True)) == expected


@given(st.integers(1, 40_000), KEYS, st.data())
@example(16_385, 7, None)
def test_a_place_in_a_permutation_is_where_its_value_stands(n: int, key: int, data: Any) -> None:
    asked = st.lists(st.integers(0, n - 1), max_size=20)
    values = np.array([n - 1, 0, 0] if data is None else data.draw(asked), np.int64)
    places = places_in_permutation(n, key, values)
    assert seeded_permutation(n, key)[places].tolist() == values.tolist()


@given(st.integers(1, 1 << 62), KEYS, st.integers(1, 12), st.data())
def test_a_feistel_network_runs_backwards(n: int, key: int, rounds: int, data: Any) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), np.uint64)
    assert (feistel(feistel(index, n, key, rounds), n, key, rounds, inverse=True) == index).all()


@given(TABLES, SHUFFLES, KEYS, st.integers(0, 3), st.integers(0, 50))
def test_of_an_order(table: list[int], shuffle: Shuffle, seed: int, epoch: int, begin: int) -> None:
    order = Order(table, shuffle, seed=seed, epoch=epoch)
    which, positions = positions_of(order, np.arange(sum(table)))
    assert which.tolist() == list(range(sum(table)))
    assert order.samples(positions).tolist() == which.tolist()
    check(order, sum(table), min(begin, sum(table)), max(0, sum(table) - begin))


@st.composite
def selections(draw: st.DrawFn) -> Selection:
    """Some samples of blocks, of a view of a view."""
    total = np.array(draw(st.lists(st.integers(0, 9), min_size=1, max_size=8)))
    mask = np.array(draw(st.lists(st.booleans(), min_size=int(total.sum()), max_size=int(total.sum()))), bool)
    selection = Selection.whole(total).at(np.flatnonzero(mask))
    return selection.between(draw(st.integers(0, 2)), len(selection)) if len(selection) > 2 else selection


@given(selections(), SHUFFLES, KEYS)
def test_of_a_view(selection: Selection, shuffle: Shuffle, seed: int) -> None:
    check(SelectedOrder(selection, shuffle, seed=seed, epoch=1), len(selection))
    total = selection.num_samples.shape[0]
    kept = selection.locate(np.arange(len(selection)))
    assert places_in_selection(selection, *kept).tolist() == list(range(len(selection)))
    sizes = selection.total
    blocks = np.repeat(np.arange(total), sizes)
    rows = np.arange(len(blocks)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    number = {pair: i for i, pair in enumerate(zip(*(each.tolist() for each in kept), strict=True))}
    expected = [number.get(pair, -1) for pair in zip(blocks.tolist(), rows.tolist(), strict=True)]
    assert places_in_selection(selection, blocks, rows).tolist() == expected


@given(selections(), SHUFFLES, st.lists(st.integers(0, 20), min_size=3, max_size=3), st.integers(0, 5))
def test_of_classes_that_are_balanced(
    selection: Selection, shuffle: Shuffle, drawn: list[int], epoch: int
) -> None:
    classes = np.arange(len(selection), dtype=np.int32) % 3
    balance = Balance(classes, np.array(drawn[: len(set(classes.tolist()))], np.int64))
    check(BalancedOrder(selection, balance, shuffle, seed=3, epoch=epoch), len(selection))


BLOCKS = [[3, 4, 0, 5, 2, 6, 3, 3, 1, 2], [5, 6], [4, 4, 4]]
SIZES = [sum(counts) for counts in BLOCKS]
MIXES = [
    MixtureSpec.weighted(SIZES, [0.5, 0.3, 0.2], stop="all"),
    MixtureSpec.weighted(SIZES, {0: [1, 1, 0], 20: [0, 1, 2]}, stop="first", run_length=3),
    MixtureSpec.weighted(SIZES, [1, 8, 0], stop="all"),
    MixtureSpec.repeated(SIZES, [1, 2, 0.5]),
]


def mixture_order(spec: MixtureSpec, epoch: int, shuffle: Shuffle) -> MixtureWindows:
    def order(source: int, source_epoch: int) -> Order:
        return Order(BLOCKS[source], shuffle, seed=source_seed(1, source), epoch=source_epoch)

    num_blocks = [np.count_nonzero(counts) for counts in BLOCKS]
    return MixtureWindows(
        spec.epoch(epoch),
        seed=1,
        epoch=epoch,
        shuffle=shuffle,
        sizes=SIZES,
        num_blocks=num_blocks,
        orders=order,
    )


@pytest.mark.parametrize("spec", MIXES)
@pytest.mark.parametrize(
    "shuffle", [Shuffle("window", 2, 1), Shuffle("window", 4, 4), Shuffle("none", 3)], ids=str
)
@pytest.mark.parametrize("span", [(0, None), (7, 20), (12, 12)])
def test_of_a_mixture(spec: MixtureSpec, shuffle: Shuffle, span: tuple[int, int | None]) -> None:
    for epoch in range(3):
        check(mixture_order(spec, epoch, shuffle), sum(SIZES), *span)


def test_of_a_mixture_whose_weights_change_and_of_one_without_end() -> None:
    spec = MixtureSpec.weighted(SIZES, [1, 1, 1], stop="all")
    changed = spec.changed(spec.epoch(0), 0, [0, 1, 3], position=11)
    check(mixture_order(changed, 0, Shuffle("window", 2, 1)), sum(SIZES))
    endless = mixture_order(MixtureSpec.weighted(SIZES, [1, 1, 1], stop="never"), 0, Shuffle("window", 2, 1))
    check(endless, sum(SIZES), 1_000_000_000, 1_000_000_200)


def token_order(
    blocks: list[list[int]], spec: MixtureSpec, seed: int, epoch: int, shuffle: Shuffle
) -> MixtureWindows:
    """The epoch of a mixture whose shares count the tokens of samples, which have 0 to 9 each."""

    def order(source: int, source_epoch: int) -> Order:
        return Order(blocks[source], shuffle, seed=source_seed(seed, source), epoch=source_epoch)

    def lengths(source: int, source_epoch: int) -> NDArray[np.int64]:
        own = np.random.default_rng([seed, source]).integers(0, 10, sum(blocks[source]))
        own[0] = 5  # a source has some
        return own[order(source, source_epoch).samples(np.arange(len(own)))]

    return MixtureWindows(
        TokenEpochs(spec, lengths, take=kernels().token_draws).epoch(epoch),
        seed=seed,
        epoch=epoch,
        shuffle=shuffle,
        sizes=[sum(counts) for counts in blocks],
        num_blocks=[np.count_nonzero(counts) for counts in blocks],
        orders=order,
    )


SOURCES = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any), min_size=1, max_size=3)
WEIGHTS = st.lists(st.integers(1, 9), min_size=3, max_size=3)
PARTS = st.integers(0, 100)


@settings(max_examples=25)
@given(
    SOURCES,
    WEIGHTS,
    st.sampled_from(["first", "all"]),
    SHUFFLES.filter(lambda shuffle: shuffle.kind != "full"),
    st.tuples(st.integers(0, 99), st.integers(0, 2)),
    st.none() | WEIGHTS,
    st.tuples(PARTS, PARTS, PARTS),
)
@example([[2], [4, 4, 3]], [1, 1, 1], "all", Shuffle("window", 2, 1), (3, 1), None, (0, 0, 100))
@example([[2], [4, 4, 3]], [1, 1, 1], "all", Shuffle("window", 2, 1), (3, 2), [1, 5, 1], (50, 25, 75))
def test_of_a_mixture_by_tokens(
    blocks: list[list[int]],
    weights: list[int],
    stop: Any,
    shuffle: Shuffle,
    seed_and_epoch: tuple[int, int],
    later: list[int] | None,
    parts: tuple[int, int, int],
) -> None:
    """Whatever came before; with other weights from a place of the epoch on; of a part of the epoch."""
    sizes, (seed, epoch) = [sum(counts) for counts in blocks], seed_and_epoch
    spec = MixtureSpec.weighted(sizes, weights[: len(sizes)], stop=stop, counts="tokens")
    order = token_order(blocks, spec, seed, epoch, shuffle)
    if later is not None:
        place = order.num_samples * parts[0] // 100
        spec = spec.changed(order.interleaving, epoch, later[: len(sizes)], position=place)
        order = token_order(blocks, spec, seed, epoch, shuffle)
    begin, end = sorted(order.num_samples * part // 100 for part in parts[1:])
    check(order, sum(sizes), begin, end)


@pytest.mark.parametrize("numbers", [[-1], [30], [0, 99]])
def test_numbers_that_are_no_sample_s_are_refused(numbers: list[int]) -> None:
    asked, whole = np.array(numbers), Selection.whole(np.array([10, 20]))
    balance = Balance(np.zeros(30, np.int32), np.array([30]))
    orders: list[EpochOrder] = [
        Order([10, 20], Shuffle("window", 2), seed=0, epoch=0),
        Order([10, 20], Shuffle("full"), seed=0, epoch=0),
        BalancedOrder(whole, balance, Shuffle("none"), seed=0, epoch=0),
    ]
    for order in orders:
        with pytest.raises(IndexError, match=r"samples must be in \[0, 30\)"):
            positions_of(order, asked)
    with pytest.raises(IndexError, match="samples must be in"):
        positions_of(mixture_order(MIXES[0], 0, Shuffle("window", 2, 1)), np.array([sum(SIZES)]))
