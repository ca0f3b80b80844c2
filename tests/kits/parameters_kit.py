"""Which values and combinations of arguments a test tries, where all would test the same thing again."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def in_full(*values: Any) -> list[Any]:
    """Values of a parameter that have a representative among others: tried with `--full`."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


def others_in_full(values: Iterable[Any], *representatives: Any) -> list[Any]:
    """All values of a parameter: the others of them are tried with `--full`."""
    return [one for value in values for one in ([value] if value in representatives else in_full(value))]


def meeting_in_pairs(*axes: Collection[Any]) -> list[tuple[Any, ...]]:
    """Combinations in which every two values of different axes meet; not every three.

    With m the length of the shortest axis: those whose places in the axes add up to a multiple of m. Two
    values leave the others a remainder, and each axis has places of all remainders.
    """
    shortest = min(map(len, axes))
    places = itertools.product(*(enumerate(axis) for axis in axes))
    return [
        tuple(value for _, value in one) for one in places if sum(place for place, _ in one) % shortest == 0
    ]


def in_pairs(*axes: Collection[Any]) -> list[Any]:
    """Every combination as a parameter; those that `meeting_in_pairs` leaves out are tried with `--full`."""
    shortest = min(map(len, axes))
    found = []
    for one in itertools.product(*(enumerate(axis) for axis in axes)):
        left_out = sum(place for place, _ in one) % shortest
        found.append(pytest.param(*(value for _, value in one), marks=[pytest.mark.full] if left_out else []))
    return found


def one_in(number: int, combinations: Collection[tuple[Any, ...]]) -> list[Any]:
    """Every combination as a parameter; all but one in so many are tried with `--full`."""
    marks = pytest.mark.full
    return [pytest.param(*one, marks=[marks] if at % number else []) for at, one in enumerate(combinations)]


def not_met(combinations: Collection[tuple[Any, ...]], *axes: Collection[Any]) -> list[tuple[Any, Any]]:
    """Pairs of values of different axes that no combination has."""
    return [
        pair
        for one, other in itertools.combinations(range(len(axes)), 2)
        for pair in itertools.product(axes[one], axes[other])
        if not any((each[one], each[other]) == pair for each in combinations)
    ]
