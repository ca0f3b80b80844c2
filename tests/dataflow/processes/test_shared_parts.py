"""The samples of slow batches are made by several processes, and come as if one had made them."""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from datasets_kit import make_tar
from loader_kit import session_of
from worker_kit import Gate

from dataflow import DataLoader, SampleError, ShardedDataset, ShardWriter
from dataflow.processes import parts
from dataflow.processes.builders import ProcessBuilders
from dataflow.processes.parts import Sharing, plain_bytes, sharing_s
from prefetch.memory.open_files import OpenFile

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
TIMEOUT_S = 60.0
SAMPLES = 60
WAITS_AT = 44
"""The sample of the eighth batch, which is shared."""
Sample = dict[str, Any]


@pytest.fixture(autouse=True)
def _every_sample_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here and in the processes, which are forked behind it."""
    monkeypatch.setattr(parts, "SAMPLE_S", 0.0)
    monkeypatch.setattr(parts, "_MOST_RATE", math.inf)


def numbers(folder: Path, transform: Callable[..., Any], **options: Any) -> ShardedDataset:
    if not (folder / "x.tar").exists():
        with ShardWriter(f"{folder}/x.tar") as writer:
            for i in range(SAMPLES):
                writer.write({"__key__": f"{i:02d}", "cls": i})
    return ShardedDataset(f"{folder}/x.tar", transform=transform, **options)


def loader_of(dataset: Any, count: int = 3, **options: Any) -> DataLoader[Any, Any]:
    if count:
        options["workers"] = "process"
    return DataLoader(dataset, 6, num_workers=count, timeout=TIMEOUT_S, **options)


def builders_of(loader: DataLoader[Any, Any]) -> ProcessBuilders:
    builders = session_of(loader).resources.engine._builders
    assert isinstance(builders, ProcessBuilders)
    return builders


def drawn(sample: Sample, *, rng: np.random.Generator) -> Sample:
    return {
        "cls": sample["cls"],
        "x": torch.tensor([random.random(), rng.random(), float(torch.rand(()))]),
        "text": [f"sample {sample['cls']}", {"a": (np.float32(sample["cls"]), None)}],
    }


def listed(samples: list[Sample]) -> list[Sample]:
    return samples


@pytest.mark.parametrize("collate", [None, listed], ids=["default", "collate_fn"])
def test_batches_are_those_of_one_process(tmp_path: Path, collate: Any) -> None:
    def told(sample: Sample, *, rng: np.random.Generator) -> Sample:
        made = drawn(sample, rng=rng)
        return made if collate else {"cls": made["cls"], "x": made["x"]}

    dataset, seen = numbers(tmp_path, told), []
    for count in (1, 3):
        with loader_of(dataset, count, shuffle=True, seed=3, collate_fn=collate) as loader:
            seen.append([repr(batch) for _ in range(2) for batch in loader])
    assert seen[0] == seen[1]


def marked(sample: Sample) -> Sample:
    return {"cls": sample["cls"], "by": os.getpid()}


def test_several_processes_make_the_samples_of_a_batch(tmp_path: Path) -> None:
    with loader_of(numbers(tmp_path, marked), shuffle=False) as loader:
        batches = [batch for _ in range(3) for batch in loader]
    assert [n for batch in batches for n in batch["cls"].tolist()] == 3 * [*range(SAMPLES)]
    assert max(len(set(batch["by"].tolist())) for batch in batches) > 1


class Named(NamedTuple):
    """A sample whose class the training process would have to know."""

    cls: int
    by: int


class Forgets:
    """It pickles less than it holds."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def __getstate__(self) -> dict[str, Any]:
        return {"values": {}}


def named(sample: Sample) -> Named:
    return Named(**marked(sample))


def forgetful(sample: Sample) -> Forgets:
    return Forgets(**marked(sample))


def values_of(samples: list[Any]) -> list[tuple[int, int]]:
    return [(one.values["cls"], one.values["by"]) for one in samples]


def fields_of(samples: list[Named]) -> list[tuple[int, int]]:
    return [tuple(one) for one in samples]


@pytest.mark.parametrize(("transform", "collate"), [(named, fields_of), (forgetful, values_of)])
def test_samples_that_a_pickle_may_change_stay_where_they_were_made(
    tmp_path: Path, transform: Any, collate: Any
) -> None:
    with loader_of(numbers(tmp_path, transform), collate_fn=collate) as loader:
        batches = [batch for _ in range(3) for batch in loader]
    assert sorted(n for batch in batches for n, _ in batch) == sorted(3 * [*range(SAMPLES)])
    assert {len({by for _, by in batch}) for batch in batches} == {1}


def sometimes_forgetful(sample: Sample) -> Any:
    return forgetful(sample) if sample["cls"] > SAMPLES // 2 else marked(sample)


def either(samples: list[Any]) -> list[int]:
    return [one["cls"] if isinstance(one, dict) else one.values["cls"] for one in samples]


def test_where_they_come_later_they_are_made_by_who_makes_the_batch(tmp_path: Path) -> None:
    with loader_of(numbers(tmp_path, sometimes_forgetful), shuffle=False, collate_fn=either) as loader:
        assert [n for _ in range(3) for batch in loader for n in batch] == 3 * [*range(SAMPLES)]


# ---- what fails -------------------------------------------------------------------------------------------


def odd(sample: Sample) -> Sample:
    if sample["cls"] % 7 == 5:
        raise ZeroDivisionError(f"no {sample['cls']}")
    return marked(sample)


def test_an_error_names_its_sample_and_is_told_once(tmp_path: Path) -> None:
    seen = []
    for count in (0, 3):
        with loader_of(numbers(tmp_path, odd), count, shuffle=False) as loader:
            with pytest.raises(SampleError) as caught:
                list(loader)
            seen.append((str(caught.value), type(caught.value.__cause__)))
    assert seen[0] == seen[1]
    assert "sample '05'" in seen[0][0]


def test_samples_that_are_skipped_are_counted_once(tmp_path: Path) -> None:
    seen = []
    for count in (0, 3):
        dataset = numbers(tmp_path, odd, on_error="skip")
        with loader_of(dataset, count, shuffle=True, seed=1) as loader:
            batches = [batch["cls"].tolist() for _ in range(2) for batch in loader]
            stats = loader.stats()
        seen.append((batches, stats.skipped_samples, sorted(stats.skipped)))
    assert seen[0] == seen[1]
    assert seen[0][1] == 2 * len([n for n in range(SAMPLES) if n % 7 == 5])


def waiting(sample: Sample, arrived: Gate, go_on: Gate) -> Sample:
    if sample["cls"] == WAITS_AT:
        arrived.open(os.getpid())
        go_on.wait()
    return marked(sample)


def gates_in(folder: Path) -> dict[str, Gate]:
    return {name: Gate(folder / name) for name in ("arrived", "go_on")}


def test_a_process_that_dies_at_a_part_costs_none(tmp_path: Path) -> None:
    gates = gates_in(tmp_path)
    with loader_of(numbers(tmp_path, partial(waiting, **gates)), shuffle=False) as loader:
        loop = iter(loader)
        seen = next(loop)["cls"].tolist()
        os.kill(int(gates["arrived"].wait()), signal.SIGKILL)
        gates["arrived"].wait()  # the one in its place
        gates["go_on"].open()
        seen += [n for batch in loop for n in batch["cls"].tolist()]
        assert builders_of(loader).num_restarts == 1
    assert seen == [*range(SAMPLES)]


def killed(sample: Sample) -> Sample:
    if sample["cls"] == WAITS_AT:
        os.kill(os.getpid(), signal.SIGKILL)
    return marked(sample)


def test_a_part_that_kills_two_processes_is_an_error_and_those_before_come(tmp_path: Path) -> None:
    seen: list[int] = []
    dying = pytest.raises(RuntimeError, match="is killed by signal: Killed")
    with loader_of(numbers(tmp_path, killed), shuffle=False) as loader, dying as caught:
        for batch in loader:
            seen += batch["cls"].tolist()
    assert "2 processes have died on the same batches" in caught.value.__notes__[0]
    assert seen == [*range(len(seen))]
    assert len(seen) <= WAITS_AT


def test_closing_while_parts_are_made_waits_for_nobody(tmp_path: Path) -> None:
    gates = gates_in(tmp_path)
    with loader_of(numbers(tmp_path, partial(waiting, **gates)), shuffle=False) as loader:
        loop = iter(loader)
        next(loop)
        gates["arrived"].wait()
        processes = builders_of(loader)._processes.pool.processes
    assert not any(process.is_alive() for process in processes)


def test_processes_that_cannot_read_files_of_this_one_are_sent_the_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_tar(tmp_path).open(transform=lambda sample: {"n": repr(sorted(sample.items()))})
    with loader_of(dataset, 0, shuffle=True, seed=5) as loader:
        whole = [batch["n"] for _ in range(2) for batch in loader]
    monkeypatch.setattr(OpenFile, "of", lambda fd, status: OpenFile(os.getpid(), fd, -1, -1))
    with loader_of(dataset, shuffle=True, seed=5) as loader:
        assert [batch["n"] for _ in range(2) for batch in loader] == whole


# ---- what is shared, and when -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        ({"a": torch.zeros(3), "b": ["xy", 1, None]}, 16),  # with its keys
        ((np.zeros((2, 2), np.int16), b"abc", np.float64(1)), 11),
        ([True, 1.5, 1j], 0),
        (Named(1, 2), math.inf),
        (torch.zeros(3, requires_grad=True), math.inf),
        (torch.nn.Parameter(torch.zeros(3)), math.inf),
        (torch.zeros(3).to_sparse(), math.inf),
        (torch.zeros(3, dtype=torch.complex64).conj(), math.inf),
        (np.array([object()]), math.inf),
        (np.arange(3)[::-1], math.inf),
        ({1, 2}, math.inf),
    ],
)
def test_only_what_a_pickle_keeps_as_it_is_counts_as_plain(value: Any, nbytes: float) -> None:
    assert plain_bytes(value) == nbytes


def test_a_value_within_itself_is_not_plain() -> None:
    value: list[Any] = []
    value.append(value)
    assert plain_bytes(value) == math.inf


def test_samples_are_shared_where_they_take_long_for_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert sharing_s(torch.zeros(1000, dtype=torch.uint8), 0.1) == 0.1
    assert sharing_s(torch.zeros(1000, dtype=torch.uint8), 0.001) == 0.0
    assert sharing_s(torch.zeros(10_000_000, dtype=torch.uint8), 0.1) == 0.0


def test_one_fast_batch_among_slow_ones_ends_no_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sharing = Sharing()
    assert sharing.parts(64, 4) == []
    sharing.note(0.03)
    assert [len(rows) for rows in sharing.parts(64, 4)] == 16 * [4]
    sharing.note(0.0)
    assert sharing.parts(64, 4)
    for _ in range(8):
        sharing.note(0.0)
    assert sharing.parts(64, 4) == []


@pytest.mark.parametrize(("num_rows", "num_builders"), [(2, 2), (7, 3), (64, 16), (5, 64)])
def test_parts_are_all_rows_once(num_rows: int, num_builders: int) -> None:
    sharing = Sharing()
    sharing.note(1.0)
    assert [row for rows in sharing.parts(num_rows, num_builders) for row in rows] == [*range(num_rows)]


def test_a_batch_of_one_and_a_builder_alone_have_no_parts() -> None:
    sharing = Sharing()
    sharing.note(1.0)
    assert sharing.parts(1, 4) == sharing.parts(64, 1) == []
