"""A state tells by which transforms its batches were made, and other ones are warned of."""

from __future__ import annotations

import copy
import functools
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from datasets_kit import Made, make_ints_tar, rank

from dataflow import DataLoader, Mixture, provenance
from dataflow.explain.batch import mark_of
from sharding.plan.difference import TRANSFORMS

Transform = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def ints(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_ints_tar(tmp_path_factory.mktemp("ints"))


def added(sample: dict[str, Any], by: int = 1) -> dict[str, Any]:
    return {**sample, "cls": sample["cls"] + by}


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "cls": sample["cls"] * 2}


class Scaled:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "cls": sample["cls"] * self.factor}


class Named(Scaled):
    fingerprint = "scaled-1"


def state_with(made: Made, transform: Any, steps: int = 2, **options: Any) -> dict[str, Any]:
    with DataLoader(made.open(transform=transform, **options), 4, num_workers=0) as loader:
        for _, _ in zip(range(steps), loader, strict=False):
            pass
        return loader.state_dict()


def marked(state: dict[str, Any]) -> str | None:
    told: str | None = json.loads(state["data"]).get(TRANSFORMS)
    return told


def test_a_state_has_the_name_and_a_hash_of_what_has_no_fingerprint(ints: Made) -> None:
    plain = state_with(ints, None)
    assert marked(plain) is None
    assert marked(state_with(ints, Named(2))) is None
    assert marked(state_with(ints, added)) == mark_of(added)
    assert mark_of(added).startswith("added ")
    assert mark_of(functools.partial(added, by=2)) == mark_of(added)
    assert mark_of(Scaled(2)) == mark_of(Scaled(3)) != mark_of(added)
    assert (
        marked(state_with(ints, added, batch_transform=doubled)) == f"{mark_of(added)} + {mark_of(doubled)}"
    )


def test_a_state_grows_by_60_bytes_at_most(ints: Made) -> None:
    def a_name_that_says_so_much_that_it_takes_several_lines(sample: dict[str, Any]) -> dict[str, Any]:
        return sample

    def größer_als_ein_name_sein_sollte(sample: dict[str, Any]) -> dict[str, Any]:
        return sample

    long = a_name_that_says_so_much_that_it_takes_several_lines
    plain = len(json.dumps(state_with(ints, None)))
    for transform in (long, größer_als_ein_name_sein_sollte, Scaled(1)):
        state = state_with(ints, transform, batch_transform=long)
        assert 20 < len(json.dumps(state)) - plain <= 60
        assert 20 < len(json.dumps(state_with(ints, transform))) - plain <= 60


def test_what_has_no_source_is_told_by_its_name() -> None:
    typed: dict[str, Any] = {}
    exec("def typed(sample): return sample", typed)  # as at a prompt
    assert mark_of(typed["typed"]) == "typed"
    assert mark_of(len) == "len"


def moved(is_deeper: bool) -> Transform:
    if is_deeper:
        for _ in range(1):

            def one(sample: dict[str, Any]) -> dict[str, Any]:
                return sample

        return one

    def one(sample: dict[str, Any]) -> dict[str, Any]:
        return sample

    return one


def test_a_source_that_was_moved_to_another_depth_is_the_same() -> None:
    assert mark_of(moved(True)) == mark_of(moved(False))


def test_batches_made_again_with_another_transform_are_warned_of(ints: Made) -> None:
    state = state_with(ints, added)
    for transform, name in ((doubled, mark_of(doubled)), (None, "none")):
        with DataLoader(ints.open(transform=transform), 4, num_workers=0) as loader:
            loader.load_state_dict(state)
            said = (
                rf"taken with transform= {mark_of(added)} .* here it is {name}: batches made again may differ"
            )
            with pytest.warns(UserWarning, match=said):
                loader.batch_at(0)
            with copy.copy(loader) as other, pytest.warns(UserWarning, match=said):
                other.batch_at(0)


def test_a_table_warns_of_another_transform_but_needs_none(ints: Made) -> None:
    state = state_with(ints, added)
    with pytest.warns(UserWarning, match="may differ from those that were trained on"):
        provenance(state, ints.open(transform=doubled), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        provenance(state, ints.open(), 0)
        provenance(state, ints.open(transform=added), 0)
        with DataLoader(ints.open(transform=added), 4, num_workers=0) as loader:
            loader.load_state_dict(state)
            loader.batch_at(1)


def test_a_state_goes_on_with_another_transform_without_a_word(ints: Made) -> None:
    """A run may change what has no fingerprint: only what was is warned of."""
    with warnings.catch_warnings(), DataLoader(ints.open(transform=doubled), 4, num_workers=0) as loader:
        warnings.simplefilter("error")
        loader.load_state_dict(state_with(ints, added))
        assert next(iter(loader))["cls"].tolist() == [2 * n for n in range(8, 12)]


def test_other_data_are_the_cause_though_transforms_differ(ints: Made) -> None:
    state = state_with(ints, added)
    loader = DataLoader(ints.open(transform=doubled).take(20), 4, num_workers=0)
    with loader, pytest.raises(ValueError, match="a view of samples 20"):
        loader.load_state_dict(state)


def test_mixtures_and_ranks_tell_the_same(ints: Made) -> None:
    def over(r: int) -> dict[str, Any]:
        parts = [ints.open(transform=one) for one in (added, doubled)]
        with DataLoader(Mixture(dict.fromkeys(parts, 1)), 2, topology=rank(r, 2), num_workers=0) as loader:
            next(iter(loader))
            return loader.state_dict()

    states = [over(0), over(1)]
    assert states[0] == states[1]
    assert marked(states[0]) == f"{mark_of(added)} + {mark_of(doubled)}"
