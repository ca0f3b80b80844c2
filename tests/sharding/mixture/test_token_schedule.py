"""Draws by tokens: against the rule as a plain loop over fractions, its bound, and stop rules by the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from prefetch.core.kernels import kernels
from sharding.mixture import token_schedule
from sharding.mixture.interleaving import MixtureSpec
from sharding.mixture.token_schedule import TokenEpochs, TokenSchedule

SHARES = st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(any)


def draws_of(shares: Sequence[int], lengths: Sequence[Sequence[int]], most: int) -> list[int]:
    """Draws until a source has no more samples."""
    ends = np.cumsum([len(own) for own in lengths])
    upcoming = ends - [len(own) for own in lengths]
    flat = np.array([length for own in lengths for length in own], np.int64)
    out = np.empty(most, np.uint16)
    owed = np.zeros(len(shares), np.int64)
    return out[: kernels().token_draws(np.array(shares), owed, flat, upcoming, ends, out)].tolist()


def by_the_loop(shares: Sequence[int], lengths: Sequence[Sequence[int]]) -> list[int]:
    """The ideal mixture as fractions: it has begun, and would end first."""
    weights = [Fraction(share, sum(shares)) for share in shares]
    tokens, nth, found = [0] * len(shares), [0] * len(shares), list[int]()
    used = [source for source, share in enumerate(shares) if share]
    while all(nth[source] < len(lengths[source]) for source in used):
        total = sum(tokens)
        begun = [source for source in used if tokens[source] <= weights[source] * total]
        best = min(begun, key=lambda s: ((tokens[s] + lengths[s][nth[s]]) / weights[s], s))
        tokens[best] += lengths[best][nth[best]]
        nth[best] += 1
        found.append(best)
    return found


def lengths_for(shares: Sequence[int], seed: int, longest: int, count: int = 60) -> list[list[int]]:
    drawn = np.random.default_rng(seed)
    return [drawn.integers(0, longest + 1, count).tolist() for _ in shares]


def worst_deviation(shares: Sequence[int], lengths: Sequence[Sequence[int]], draws: Sequence[int]) -> float:
    """Of any source from its share, over all prefixes, in elements."""
    nth, tokens = [0] * len(shares), np.zeros((len(draws) + 1, len(shares)))
    for number, source in enumerate(draws, 1):
        tokens[number] = tokens[number - 1]
        tokens[number, source] += lengths[source][nth[source]]
        nth[source] += 1
    ideal = tokens.sum(axis=1, keepdims=True) * np.array(shares) / sum(shares)
    return float(np.abs(tokens - ideal).max())


@given(shares=SHARES, seed=st.integers(0, 999), longest=st.sampled_from([1, 9, 1 << 33]))
def test_draws_are_those_of_the_ideal_mixture(shares: list[int], seed: int, longest: int) -> None:
    lengths = lengths_for(shares, seed, longest)
    expected = by_the_loop(shares, lengths)
    assert draws_of(shares, lengths, 2000) == expected
    assert draws_of(shares, lengths, len(expected) // 2) == expected[: len(expected) // 2]


@given(shares=SHARES, seed=st.integers(0, 999), longest=st.sampled_from([1, 3, 50]))
def test_every_prefix_is_within_the_longest_sample_of_every_share(
    shares: list[int], seed: int, longest: int
) -> None:
    lengths = lengths_for(shares, seed, longest)
    draws = draws_of(shares, lengths, 2000)
    assert worst_deviation(shares, lengths, draws) <= max(max(own) for own in lengths) + 1e-9


def test_usual_rules_would_break_the_bound_that_holds_here() -> None:
    shares = [15, *[1] * 15]
    lengths = [[4] * 200 for _ in shares]
    middles = [
        ((nth + 0.5) / share, source) for source, share in enumerate(shares) for nth in range(12 * share)
    ]
    by_virtual_time = [source for _, source in sorted(middles)]
    assert worst_deviation(shares, lengths, by_virtual_time) > 3 * 4
    assert worst_deviation(shares, lengths, draws_of(shares, lengths, 300)) <= 4


def test_a_share_that_no_other_has_takes_all_draws_and_empty_samples_do_no_harm() -> None:
    assert draws_of([0, 3], [[], [2, 0, 5]], 10) == [1, 1, 1]
    assert draws_of([1, 1], [[0, 0, 4, 4], [4, 0, 4]], 10) == by_the_loop([1, 1], [[0, 0, 4, 4], [4, 0, 4]])


@given(seed=st.integers(0, 99), num=st.integers(1, 5), count=st.integers(1, 60))
def test_tabulated_draws_and_sources_are_inverse(seed: int, num: int, count: int) -> None:
    source = np.random.default_rng(seed).integers(0, num, count).astype(np.uint16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_schedule, "_CHUNK", 8)
        draws = TokenSchedule(source, num)
        positions = np.random.default_rng(seed).permutation(count)
        found, index = draws.locate(positions)
        assert found.tolist() == source[positions].tolist()
        assert index.tolist() == [int((source[:p] == source[p]).sum()) for p in positions]
        for number in range(num):
            assert draws.draws(number, index[found == number]).tolist() == positions[found == number].tolist()
        for draw in (0, count // 2, count):
            assert draws.counts(draw).tolist() == np.bincount(source[:draw], minlength=num).tolist()
        assert draws.totals.tolist() == np.bincount(source, minlength=num).tolist()


# ---- epochs ----------------------------------------------------------------------------------------------

SIZES = (23, 7, 11)


def lengths_of(source: int, epoch: int) -> NDArray[np.int64]:
    """Another order in each epoch of a source."""
    lengths = np.arange(SIZES[source]) * (source + 2) % 9
    return np.random.default_rng([source, epoch]).permutation(lengths)


def epochs_of(weights: Any, stop: Any = "first", **options: Any) -> TokenEpochs:
    spec = MixtureSpec.weighted(SIZES, weights, stop=stop, counts="tokens")
    return TokenEpochs(spec, lengths_of, take=kernels().token_draws, **options)


def epochs_by_the_loop(shares: Sequence[int], stop: str, num_epochs: int) -> list[list[tuple[int, int]]]:
    """(source, index) of each position of each epoch."""
    before, found = [0] * len(SIZES), list[list[tuple[int, int]]]()
    for _ in range(num_epochs):
        lengths = [
            [int(lengths_of(s, i // n)[i % n]) for i in range(before[s], before[s] + 300)]
            for s, n in enumerate(SIZES)
        ]
        given, draws = [0] * len(SIZES), list[tuple[int, int]]()
        for source in by_the_loop(shares, lengths):
            draws.append((source, before[source] + given[source]))
            given[source] += 1
            seen = [given[s] >= n for s, n in enumerate(SIZES) if shares[s]]
            if any(seen) if stop == "first" else all(seen):
                break
        before = [b + g for b, g in zip(before, given, strict=True)]
        found.append(draws)
    return found


def positions_of(epochs: TokenEpochs, epoch: int) -> list[tuple[int, int]]:
    made = epochs.epoch(epoch)
    source, index = made.locate(np.arange(made.num_samples))
    return list(zip(source.tolist(), index.tolist(), strict=True))


@pytest.mark.parametrize("known", [1, 1 << 22])
@pytest.mark.parametrize("stop", ["first", "all"])
@pytest.mark.parametrize("shares", [(3, 1, 1), (1, 5, 0), (1, 1, 1)])
def test_epochs_end_by_the_stop_rule_and_sources_go_on_in_the_next(
    shares: tuple[int, ...], stop: str, known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_schedule, "_KNOWN", known)
    expected = epochs_by_the_loop(shares, stop, 3)
    assert [positions_of(epochs_of(list(shares), stop), epoch) for epoch in range(3)] == expected


@pytest.mark.parametrize("stop", ["first", "all"])
def test_an_epoch_begins_where_a_state_says_without_those_before(stop: str) -> None:
    whole = epochs_of([3, 1, 1], stop)
    asked: list[tuple[int, int]] = []

    def noted(source: int, epoch: int) -> NDArray[np.int64]:
        asked.append((source, epoch))
        return lengths_of(source, epoch)

    resumed = TokenEpochs(replace(whole.spec, begun=(2, whole.first(2))), noted, take=kernels().token_draws)
    assert positions_of(resumed, 2) == positions_of(whole, 2)
    assert all(epoch >= whole.first(2)[source] // SIZES[source] for source, epoch in asked)
    assert positions_of(resumed, 3) == positions_of(whole, 3)
    assert positions_of(resumed, 1) == positions_of(whole, 1)


def test_a_schedule_begins_the_sequence_anew_at_each_step() -> None:
    epochs = epochs_of({0: [1, 0, 0], 9: [1, 2, 1]})
    positions = positions_of(epochs, 0)
    assert positions[:9] == [(0, index) for index in range(9)]
    rest = [lengths_of(0, 0)[9:].tolist(), lengths_of(1, 0).tolist(), lengths_of(2, 0).tolist()]
    assert [source for source, _ in positions[9:]] == by_the_loop((1, 2, 1), rest)
    source, index = positions_of(epochs, 1)[0]
    assert index == sum(own == source for own, _ in positions)


def test_epochs_are_asked_for_while_another_thread_finds_where_later_ones_start() -> None:
    epochs = epochs_of([3, 1, 1])

    class Asked(int):
        """An epoch whose comparison takes as long as the other thread needs."""

        def __ge__(self, other: int) -> bool:
            epochs.first(2)
            return int(self) >= other

    assert epochs.first(Asked(1)) == epochs_of([3, 1, 1]).first(1)


def test_a_source_without_tokens_cannot_have_a_share_of_them() -> None:
    spec = MixtureSpec.weighted((3, 3), [1, 1], counts="tokens")
    epochs = TokenEpochs(spec, lambda source, epoch: np.full(3, 1 - source), take=kernels().token_draws)
    with pytest.raises(ValueError, match="source 1 of the mixture has no tokens"):
        epochs.epoch(0)
