"""A transform with a batch form gives what it gives sample by sample, and names a bad sample as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets_kit import Made, Make, make_ints_tar
from torch.utils.data import DataLoader as TorchLoader

from dataflow import DataLoader, Mixture, Ragged, SampleError
from dataflow.batch.transforms import BatchTransform

Sample = dict[str, Any]
ODD = 13


class Squares:
    """Adds the square of "cls" and a list that is as long as it; notes how many samples it gets at a time."""

    lists = ("ones",)

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.bad = bad
        self.sizes: list[int] = []

    def __call__(self, sample: Sample) -> Sample:
        return self.batch([sample])[0]

    def batch(self, samples: list[Sample]) -> list[Sample]:
        self.sizes.append(len(samples))
        return [self._one(sample) for sample in samples]

    def _one(self, sample: Sample) -> Sample:
        if sample["cls"] in self.bad:
            raise ValueError(f"{sample['cls']} is bad")
        ones = torch.ones(sample["cls"] % 5, dtype=torch.int32)
        return {**sample, "square": sample["cls"] ** 2, "ones": ones}


@pytest.fixture
def ints(tmp_path: Path) -> Made:
    return make_ints_tar(tmp_path)


def numbers(batches: list[Any], column: str = "cls") -> list[int]:
    return [number for batch in batches for number in batch[column].tolist()]


class Halves(Squares):
    """Has another call than the class whose batch form it inherits."""

    def __call__(self, sample: Sample) -> Sample:
        return {**sample, "square": sample["cls"] / 2}


class Around:
    """Gives all attributes of what it wraps, but for the call."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, sample: Sample) -> Sample:
        return {**sample, "square": self.inner(sample)["square"] + 1}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


@pytest.mark.parametrize(
    ("transform", "expected"), [(Halves(), lambda n: n / 2), (Around(Squares()), lambda n: n * n + 1)]
)
def test_a_call_that_is_a_class_own_is_not_passed_over_for_an_inherited_batch_form(
    ints: Made, transform: Any, expected: Any
) -> None:
    with DataLoader(ints.open(transform=transform), 10, num_workers=0) as loader:
        batches = list(loader)
    assert numbers(batches, "square") == [expected(number) for number in numbers(batches)]


def test_a_function_may_have_a_batch_form(ints: Made) -> None:
    squares = Squares()

    def transform(sample: Sample) -> Sample:
        raise AssertionError("it has a batch form")

    transform.batch, transform.lists = squares.batch, squares.lists  # type: ignore[attr-defined]
    with DataLoader(ints.open(transform=transform), 10, num_workers=0) as loader:
        assert numbers(list(loader), "square")
    assert squares.sizes


def test_the_batch_form_gets_whole_batches_and_gives_what_single_calls_give(ints: Made) -> None:
    squares: BatchTransform = Squares()
    dataset = ints.open(transform=squares)
    with DataLoader(dataset, 10, num_workers=0) as loader:
        batches = list(loader)
    assert squares.sizes == [10, 10, 10, 10, 7]
    alone = [dataset[i] for i in range(len(dataset))]
    assert numbers(batches) == [sample["cls"] for sample in alone]
    assert numbers(batches, "square") == [sample["square"] for sample in alone]
    rows = [row.tolist() for batch in batches for row in batch["ones"].rows()]
    assert rows == [sample["ones"].tolist() for sample in alone]


@pytest.mark.parametrize("workers", [{"num_workers": 2}, {"num_workers": 2, "workers": "thread"}])
def test_lists_are_ragged_whoever_builds(ints: Made, workers: dict[str, Any]) -> None:
    with DataLoader(ints.open(transform=Squares()), 10, **workers) as loader:
        batches = list(loader)
    assert all(isinstance(batch["ones"], Ragged) for batch in batches)
    assert [n for batch in batches for n in batch["ones"].lengths.tolist()] == [n % 5 for n in range(47)]


def test_a_collate_fn_gets_the_samples(ints: Made) -> None:
    with DataLoader(ints.open(transform=Squares()), 10, collate_fn=list, num_workers=0) as loader:
        samples = [sample for batch in loader for sample in batch]
    assert [len(sample["ones"]) for sample in samples] == [n % 5 for n in range(47)]


def test_a_bad_sample_among_many_is_named(ints: Made) -> None:
    dataset = ints.open(transform=Squares((ODD,)))
    with DataLoader(dataset, 10, num_workers=0) as loader, pytest.raises(SampleError) as caught:
        list(loader)
    assert (caught.value.key, caught.value.stage) == (f"{ODD:05d}", "transform")
    assert caught.value.reason == "ValueError: 13 is bad"
    with pytest.raises(SampleError, match="13 is bad"):
        dataset.__getitems__([1, ODD, 2])


def test_bad_samples_are_left_out_one_by_one(ints: Made) -> None:
    dataset = ints.open(transform=Squares((ODD, 14, 46)), on_error="skip")
    with DataLoader(dataset, 10, num_workers=0) as loader:
        assert numbers(list(loader)) == [n for n in range(47) if n not in (ODD, 14, 46)]
        assert loader.stats().skipped_samples == 3


def test_a_batch_form_that_fails_where_single_calls_do_not_is_an_error(ints: Made) -> None:
    class OneByOne(Squares):
        def batch(self, samples: list[Sample]) -> list[Sample]:
            if len(samples) > 1:
                raise RuntimeError("too many")
            return super().batch(samples)

    for on_error in "raise", "skip":
        dataset = ints.open(transform=OneByOne(), on_error=on_error)
        with DataLoader(dataset, 10, num_workers=0) as loader, pytest.raises(RuntimeError) as caught:
            list(loader)
        assert caught.value.__notes__[0].startswith("in the batch form of transform=")
        with pytest.raises(RuntimeError, match="too many"):
            dataset.__getitems__([1, 2])


def test_a_batch_form_that_loses_samples_is_an_error(ints: Made) -> None:
    class Losing(Squares):
        def batch(self, samples: list[Sample]) -> list[Sample]:
            return super().batch(samples)[: max(1, len(samples) - 1)]

    with (
        DataLoader(ints.open(transform=Losing()), 10, num_workers=0) as loader,
        pytest.raises(TypeError, match="returned 9 samples for 10"),
    ):
        list(loader)


def test_a_transform_that_takes_rng_is_called_sample_by_sample(ints: Made) -> None:
    class Random(Squares):
        def __call__(self, sample: Sample, rng: Any = None) -> Sample:
            return {"cls": sample["cls"], "draw": int(rng.integers(1 << 30))}

    transform = Random()
    with DataLoader(ints.open(transform=transform), 10, num_workers=0) as loader:
        batches = list(loader)
    assert transform.sizes == []
    assert numbers(batches, "draw") == [ints.open(transform=transform)[i]["draw"] for i in range(47)]


def test_sources_of_a_mixture_have_batch_forms_of_their_own(tmp_path: Path) -> None:
    made = []
    for name in "abc":
        (tmp_path / name).mkdir()
        made.append(make_ints_tar(tmp_path / name))

    class Negated(Squares):
        def batch(self, samples: list[Sample]) -> list[Sample]:
            return [{**sample, "square": -sample["square"]} for sample in super().batch(samples)]

    def single(sample: Sample) -> Sample:
        return {**sample, "square": 0, "ones": torch.ones(1, dtype=torch.int32)}

    a, b, c = Squares(), Negated(), single
    sources = [one.open(transform=of) for one, of in zip(made, (a, b, c), strict=True)]
    with DataLoader(Mixture(sources, repeats=[1, 1, 1]), 9, shuffle=True, num_workers=0) as loader:
        batches = list(loader)
    # Two transforms a batch, each called once, and every sample by that of its own source.
    assert len(a.sizes) <= len(batches)
    assert sum(a.sizes) == sum(b.sizes) == 47
    squares = [n * n for n in range(47)]
    assert sorted(numbers(batches, "square")) == sorted([*squares, *(-n for n in squares), *[0] * 47])


def test_torch_s_loader_calls_the_batch_form_of_a_dataset(ints: Made) -> None:
    squares = Squares()
    loader = TorchLoader(ints.open(transform=squares), 10, collate_fn=list)
    assert [sample["square"] for batch in loader for sample in batch] == [n * n for n in range(47)]
    assert squares.sizes == [10, 10, 10, 10, 7]


def test_a_column_that_only_some_samples_have_as_a_list_is_an_error(ints: Made) -> None:
    class Sometimes(Squares):
        def _one(self, sample: Sample) -> Sample:
            ones = super()._one(sample)["ones"]
            return {**sample, "ones": ones if sample["cls"] != ODD else "text"}

    with (
        DataLoader(ints.open(transform=Sometimes()), 10, num_workers=0) as loader,
        pytest.raises(SampleError, match="column 'ones': int32") as caught,
    ):
        list(loader)
    assert caught.value.stage == "collate"


def test_a_state_knows_the_fingerprint_of_a_transform(made: Make) -> None:
    class Marked(Squares):
        lists = ()

        def __init__(self, fingerprint: str) -> None:
            super().__init__()
            self.fingerprint = fingerprint

        def _one(self, sample: Sample) -> Sample:
            return {"label": sample["label"]}

    def loader(transform: Any) -> DataLoader:
        return DataLoader(made("jsonl").open(transform=transform), 10, num_workers=0)

    with loader(Marked("first")) as running:
        next(iter(running))
        state = running.state_dict()
    assert "first" in state["fingerprint"]
    with loader(Marked("first")) as same:
        same.load_state_dict(state)
        assert numbers([next(iter(same))], "label")[0] == 10
    for mark in ("m" * 33, "a@b", "a~b", "a+b", "é"):
        with pytest.raises(ValueError, match="the fingerprint of a transform is at most 32"):
            loader(Marked(mark))
    for other in (Marked("second"), Squares()):
        with (
            loader(other) as different,
            pytest.raises(
                ValueError, match=r"with a transform= .* of fingerprint first, and this loader has"
            ),
        ):
            different.load_state_dict(state)
