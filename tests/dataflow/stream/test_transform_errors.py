"""Errors in what a user gives over shards name stage, column, sample and cure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets_kit import Made, make_parquet, make_tar
from torch.utils.data import default_collate

from dataflow import DataLoader, Packed, Pad, SampleError
from dataflow.batch.samples import misfit_of

Sample = dict[str, Any]
ODD = 13
"""The sample of the second shard that transforms here make odd."""


@pytest.fixture
def ints(tmp_path: Path) -> Made:
    """Of which columns "cls", an int, and "key", eight bytes, are delivered."""
    made = make_tar(tmp_path)
    made.kwargs["columns"] = ["cls", "key"]
    return made


def odd(value: Any, else_value: Any) -> Callable[[Sample], Sample]:
    """A transform after which column "x" of one sample has another value."""
    return lambda sample: {**sample, "x": value if sample["cls"] == ODD else else_value}


def error_of(dataset: Any, **options: Any) -> Exception:
    with DataLoader(dataset, 4, shuffle=False, **options) as loader, pytest.raises(Exception) as caught:  # noqa: PT011
        list(loader)
    return caught.value


# ---- samples that cannot be put together ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "else_value", "says"),
    [
        (
            torch.zeros(5),
            torch.zeros(4),
            "column 'x': float32 [5], but sample '00012' has float32 [4]; pad",
        ),
        (
            np.zeros((2, 3)),
            np.zeros((2, 2)),
            "column 'x': an array float64 [2, 3], but sample '00012' has",
        ),
        ([1, 2, 3], [1, 2], "column 'x': a list of 3, but sample '00012' has a list of 2; pad or cut"),
        (
            {"y": [torch.zeros(2)]},
            {"y": [torch.zeros(3)]},
            "column 'x.y[0]': float32 [2], but sample '00012",
        ),
        ({"y": 1}, {"z": 1}, "column 'x.z': missing, but sample '00012' has int; return the same columns"),
        ("text", 1.5, "column 'x': str, but sample '00012' has float; return one type"),
        ((1, 2), {"y": 1}, "column 'x': a tuple of 2, but sample '00012' has a dict of 'y'; return one type"),
    ],
)
def test_samples_that_do_not_fit_each_other_are_named_with_column_and_cure(
    ints: Made, value: Any, else_value: Any, says: str
) -> None:
    for on_error in "raise", "skip":  # neither of the two is bad by itself
        error = error_of(ints.open(transform=odd(value, else_value), on_error=on_error))
        assert isinstance(error, SampleError)
        assert (error.shard, error.key, error.stage) == (str(ints.shards[1]), "00013", "collate")
        assert error.offset is not None
        assert error.reason.startswith(says)
        assert error.__cause__ is not None


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "column 'x': None; return a value, or leave such samples out by on_error='skip'"),
        (object(), "column 'x': object; return tensors, arrays, numbers, text, or lists and dicts of"),
        (np.array(["a"], object), "column 'x': an array object [1]; return tensors"),
        (torch.eye(2).to_sparse(), "column 'x': float32 [2, 2]; Batches of sparse tensors are not currently"),
    ],
)
def test_a_sample_that_no_batch_can_hold_is_a_bad_one(ints: Made, value: Any, says: str) -> None:
    transform = odd(value, 1.0)
    error = error_of(ints.open(transform=transform))
    assert isinstance(error, SampleError)
    assert (error.key, error.stage) == ("00013", "collate")
    assert error.reason.startswith(says)
    with DataLoader(ints.open(transform=transform, on_error="skip"), 4, shuffle=False) as loader:
        classes = [number for batch in loader for number in batch["cls"].tolist()]
        assert ODD not in classes
        assert classes == [row["cls"] for row in ints.samples if row["cls"] != ODD]
        assert loader.stats().skipped_samples == 1


def test_an_array_that_lies_backwards_says_so(ints: Made) -> None:
    def flipped(sample: Sample) -> Sample:  # made there, since on its way it would be laid out anew
        return {**sample, "x": np.arange(3)[:: -1 if sample["cls"] == ODD else 1]}

    error = error_of(ints.open(transform=flipped))
    assert isinstance(error, SampleError)
    assert error.reason.startswith(
        "column 'x': an array int64 [3]; At least one stride in the given numpy array"
    )


class UntoldError(Exception):
    """An error that fails to tell itself, as one that lost an attribute."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 1}], ids=str)
def test_an_error_without_a_text_is_one_of_its_sample(ints: Made, options: Any) -> None:
    def transform(sample: Sample) -> Sample:
        if sample["cls"] == ODD:
            raise UntoldError
        return sample

    error = error_of(ints.open(transform=transform), **options)
    assert isinstance(error, SampleError)
    assert (error.key, error.reason) == ("00013", "UntoldError")
    with DataLoader(ints.open(transform=transform, on_error="skip"), 4, **options) as loader:
        assert sum(len(batch["cls"]) for batch in loader) == len(ints.samples) - 1


def test_none_in_place_of_a_sample_is_a_bad_sample(ints: Made) -> None:
    def transform(sample: Sample) -> Sample | None:
        return sample if sample["cls"] % 2 else None

    error = error_of(ints.open(transform=transform))
    assert isinstance(error, SampleError)
    assert (error.key, error.stage) == ("00000", "collate")
    assert error.reason.startswith(
        "transform= returned None; return the sample, or leave such samples out by"
    )
    with DataLoader(ints.open(transform=transform, on_error="skip"), 4, shuffle=False) as loader:
        classes = [number for batch in loader for number in batch["cls"].tolist()]
    assert classes == [row["cls"] for row in ints.samples if row["cls"] % 2]


def test_a_collate_fn_may_take_samples_that_are_none(ints: Made) -> None:
    dataset = ints.open(transform=lambda sample: None)
    with DataLoader(dataset, 4, collate_fn=len) as loader:
        assert sum(loader) == len(ints.samples)


def test_what_is_no_dict_among_dicts_is_named(ints: Made) -> None:
    def transform(sample: Sample) -> Any:
        return (sample["key"], 1) if sample["cls"] == ODD else sample

    error = error_of(ints.open(transform=transform))
    assert isinstance(error, SampleError)
    assert error.reason.startswith("transform= returned a tuple of 2, but for sample '00012' a dict of")


@pytest.mark.parametrize("wrong", [7, (1, 2), {"cls": ODD}], ids=repr)
def test_who_is_no_dict_or_lacks_a_column_of_the_others_is_left_out(ints: Made, wrong: Any) -> None:
    def transform(sample: Sample) -> Any:
        return wrong if sample["cls"] == ODD else sample

    assert "return" in str(error_of(ints.open(transform=transform)))
    with DataLoader(ints.open(transform=transform, on_error="skip"), 4, shuffle=False) as loader:
        classes = [number for batch in loader for number in batch["cls"].tolist()]
        assert loader.stats().skipped_samples == 1
    assert classes == [row["cls"] for row in ints.samples if row["cls"] != ODD]


def test_a_sample_that_holds_itself_is_a_bad_one(ints: Made) -> None:
    def transform(sample: Sample) -> Sample:
        x: list[Any] = [1]
        x.append(x if sample["cls"] == ODD else 2)
        return {**sample, "x": x}

    error = error_of(ints.open(transform=transform))
    assert isinstance(error, SampleError)
    assert (error.key, error.stage) == ("00013", "collate")
    assert "holds itself" in error.reason
    with DataLoader(ints.open(transform=transform, on_error="skip"), 4) as loader:
        assert sum(len(batch["cls"]) for batch in loader) == len(ints.samples) - 1


# ---- what is raised that is no Exception --------------------------------------------------------------


class Panic(BaseException):
    """As what libraries in Rust raise where they panic."""


BUILDERS = [{"num_workers": 0}, {"num_workers": 2, "workers": "thread"}, {"num_workers": 1}]


@pytest.mark.parametrize("builders", BUILDERS, ids=["none", "threads", "process"])
def test_a_panic_of_a_library_is_an_error_of_the_sample(ints: Made, builders: Any) -> None:
    def transform(sample: Sample) -> Sample:
        if sample["cls"] == ODD:
            raise Panic("index out of bounds")
        return sample

    error = error_of(ints.open(transform=transform), **builders)
    assert isinstance(error, SampleError)
    assert (error.key, error.shard) == ("00013", str(ints.shards[1]))
    assert error.reason == "Panic: index out of bounds"
    with DataLoader(ints.open(transform=transform, on_error="skip"), 4, **builders) as loader:
        assert sum(len(batch["cls"]) for batch in loader) == len(ints.samples) - 1
        assert loader.stats().skipped_samples == 1


@pytest.mark.parametrize("builders", BUILDERS, ids=["none", "threads", "process"])
@pytest.mark.parametrize("ends", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_what_ends_programs_is_named_and_never_left_out(ints: Made, builders: Any, ends: Any) -> None:
    def transform(sample: Sample) -> Sample:
        if sample["cls"] == ODD:
            raise ends
        return sample

    dataset = ints.open(transform=transform, on_error="skip")
    with DataLoader(dataset, 4, **builders) as loader, pytest.raises(BaseException) as caught:  # noqa: PT011
        list(loader)
    error = caught.value
    if builders["num_workers"] == 0 and isinstance(ends, KeyboardInterrupt):  # it may have been a Ctrl-C
        assert error is ends
        assert "had sample '00013'" in error.__notes__[0]
    else:
        assert isinstance(error, SampleError)
        assert (error.key, error.reason.partition(":")[0]) == ("00013", type(ends).__name__)


@pytest.mark.parametrize("builders", BUILDERS, ids=["none", "threads", "process"])
@pytest.mark.parametrize("where", ["collate_fn", "batch_transform"])
def test_a_panic_in_a_function_of_batches_names_the_batch(ints: Made, builders: Any, where: str) -> None:
    def panic(_: Any) -> Any:
        raise Panic("index out of bounds")

    given = {"batch_transform": panic} if where == "batch_transform" else {}
    own = {"collate_fn": panic} if where == "collate_fn" else {}
    error = error_of(ints.open(**given), **builders, **own)
    assert "Panic: index out of bounds" in str(error)
    assert any(f"in {where}= of batch 0" in note for note in error.__notes__)


def test_a_column_that_pad_makes_even_is_told_so(tmp_path: Path) -> None:
    made = make_tar(tmp_path)
    error = error_of(made.open(transform=lambda sample: sample, columns=["bin", "cls"]))
    assert isinstance(error, SampleError)
    assert "decode={'bin': Pad()}" in error.reason
    cured = made.open(transform=lambda sample: sample, columns=["bin", "cls"], decode={"bin": Pad()})
    with DataLoader(cured, 4) as loader:
        assert sum(len(batch["bin"]) for batch in loader) == len(made.samples)


def test_who_is_at_odds_is_found_in_any_batch_that_torch_cannot_collate() -> None:
    good: list[Any] = [{"a": torch.zeros(2), "b": [1, "x"]} for _ in range(3)]
    assert misfit_of(good, []) is None
    with pytest.raises(TypeError):
        default_collate([*good, {"a": None, "b": [1, "x"]}])
    found = misfit_of([*good, {"a": None, "b": [1, "x"]}], [])
    assert found is not None
    assert (found.at, found.column, found.beside) == (3, "a", None)


# ---- functions that raise ---------------------------------------------------------------------------------


def test_a_column_that_the_sample_lacks_is_told_which_it_has(ints: Made) -> None:
    def transform(sample: Sample) -> Any:
        return sample["jpg"]

    error = error_of(ints.open(transform=transform))
    assert isinstance(error, SampleError)
    assert error.reason == "KeyError: 'jpg'; it was given a dict of 'cls', 'key'"
    assert error.stage == "transform"
    table = {0: "zero"}
    error = error_of(ints.open(transform=lambda sample: table[sample["cls"]]))
    assert "KeyError: 1; it was given" in str(error)


def test_a_transform_of_something_else_than_a_dict_is_told_what_it_was_given(ints: Made) -> None:
    def transform(image: Any) -> Any:
        return image.resize((2, 2))

    assert "'resize'; it was given a dict of 'cls', 'key'" in str(error_of(ints.open(transform=transform)))


def test_random_access_names_the_sample_whose_transform_fails(ints: Made) -> None:
    def transform(sample: Sample) -> Any:
        raise IndexError("mine")  # which a loop by index would take for the dataset's end

    with pytest.raises(SampleError) as caught:
        list(ints.open(transform=transform))
    error = caught.value
    assert (error.shard, error.key, error.stage) == (str(ints.shards[0]), "00000", "transform")
    assert error.reason == "IndexError: mine"
    assert isinstance(error.__cause__, IndexError)


def test_a_function_of_batches_is_told_its_batch_and_the_columns(ints: Made) -> None:
    def transform(batch: Any) -> Any:
        return batch["image"]

    error = error_of(ints.open(batch_transform=transform))
    assert isinstance(error, KeyError)
    note, *_ = error.__notes__
    assert note == (
        f"in batch_transform= of batch 0 of epoch 0, samples '00000' of {ints.shards[0]} to '00003' of "
        f"{ints.shards[0]}; it was given a dict of 'cls', 'key'"
    )


def test_packed_rows_are_told_their_batch_too(tmp_path: Path) -> None:
    made = make_parquet(tmp_path)
    dataset = made.open(columns=["lst"], batch_transform=lambda batch: batch["image"])
    with (
        DataLoader(dataset, 2, batching=Packed(8, column="lst")) as loader,
        pytest.raises(KeyError) as caught,
    ):
        list(loader)
    assert "in batch_transform= of batch 0 of epoch 0, samples '1' of " in caught.value.__notes__[0]


def test_a_collate_fn_is_told_its_batch_and_its_first_sample(ints: Made) -> None:
    def collate(samples: Any) -> Any:
        return torch.tensor([sample["label"] for sample in samples])

    error = error_of(ints.open(), collate_fn=collate)
    assert isinstance(error, KeyError)
    note, *_ = error.__notes__
    assert note.startswith("in collate_fn= of batch 0 of epoch 0, samples '00000' of ")
    assert note.endswith("; it was given a list of 4, the first a dict of 'cls', 'key'")


def test_a_decoder_that_fails_names_column_and_sample(ints: Made) -> None:
    def decode(data: bytes) -> Any:
        return {b"00000000": 1}[bytes(data)]

    error = error_of(ints.open(decode={"key": decode}))
    assert isinstance(error, SampleError)
    assert (error.key, error.stage) == ("00001", "decode")
    assert error.reason == "column 'key': KeyError: b'00000001'"
