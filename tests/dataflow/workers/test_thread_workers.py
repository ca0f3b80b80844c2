"""Threads as workers: the batches of the plain loop, whoever fetches what, and nothing left behind."""

from __future__ import annotations

import gc
import json
import random
import re
import signal
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_kit import OLD_TORCH
from parameters_kit import in_pairs
from programs_kit import run_script
from threads_kit import compute_until_interrupted, threads_left
from torch.utils.data import (
    BatchSampler,
    DataLoader as TorchDataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from dataflow import DataLoader
from dataflow.workers.info import install, uninstall
from dataflow.workers.worker import WorkerLimits
from prefetch.engine.pool import PriorityPool

TIMEOUT_S = 20
OWN_CODE = get_worker_info.__code__


def worker_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("dataflow-worker")]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    interval, torch_threads = sys.getswitchinterval(), torch.get_num_threads()
    yield
    if worker_threads():
        gc.collect()  # a failed test's iterator is held by its traceback
    assert worker_threads() == []
    assert get_worker_info.__code__ is OWN_CODE
    assert sys.getswitchinterval() == interval
    assert torch.get_num_threads() == torch_threads


class Squares(Dataset):
    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"i": i, "x": torch.full((2, 3), i * i), "name": f"item {i}"}


class Bulk(Squares):
    """Asked for whole batches."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [super(Bulk, self).__getitem__(i) for i in indices]

    def __getitem__(self, i: Any) -> Any:
        assert not isinstance(i, int)
        return self.__getitems__(i)


class Lines(IterableDataset):
    """Numbers, dealt out among the workers as `get_worker_info` tells."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        yield from range(first, self.count, step)


class Gated(Dataset):
    """Some items come only when a gate is opened."""

    def __init__(self, count: int, *closed: int) -> None:
        self.count = count
        self.gates = {i: threading.Event() for i in closed}
        self.fetched: list[int] = []
        self.begun = {i: threading.Event() for i in range(count)}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> int:
        self.begun[i].set()
        if i in self.gates:
            assert self.gates[i].wait(TIMEOUT_S)
        self.fetched.append(i)
        return i


def plain(value: Any) -> Any:
    """A batch as plain values, with the types of tensors."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def threaded(dataset: Any, *arguments: Any, num_workers: int = 2, **options: Any) -> DataLoader:
    options = {"num_workers": num_workers, "workers": "thread", **options}
    return DataLoader(dataset, *arguments, **options)


def numbers(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


# ---- the batches of the plain loop ----------------------------------------------------------------------


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


CASES: dict[str, dict[str, Any]] = {
    "in order": {"batch_size": 4},
    "the last one dropped": {"batch_size": 4, "drop_last": True},
    "one batch": {"batch_size": 99},
    "no batching": {"batch_size": None},
    "shuffled": {"batch_size": 5, "shuffle": True, "generator": seeded},
    "own sampler": {"batch_size": 3, "sampler": [7, 1, 1, 22, 0]},
    "own batches": {"batch_sampler": [[3], [1, 2, 5], (9, 9)]},
    "own collate_fn": {"batch_size": 4, "collate_fn": lambda items: [item["name"] for item in items]},
}


@pytest.mark.parametrize(("case", "num_workers"), in_pairs(CASES, [1, 2, 5]))
def test_batches_are_those_of_the_plain_loop(case: str, num_workers: int) -> None:
    options = CASES[case]
    made = [{name: o() if o is seeded else o for name, o in options.items()} for _ in range(2)]
    expected = [plain(batch) for batch in TorchDataLoader(Squares(), **made[0])]
    loader = threaded(Squares(), num_workers=num_workers, prefetch_factor=1 + num_workers % 2, **made[1])
    assert [plain(batch) for batch in loader] == expected


@pytest.mark.parametrize(
    "dataset", [Squares(), Bulk(), Subset(Squares(), range(20, 3, -1)), Subset(Bulk(), range(5))]
)
def test_items_are_asked_for_as_the_dataset_likes(dataset: Any) -> None:
    expected = [plain(batch) for batch in TorchDataLoader(dataset, 4)]
    assert [plain(batch) for batch in threaded(dataset, 4)] == expected


def test_a_sampler_of_lists_asks_for_lists() -> None:
    sampler = BatchSampler(SequentialSampler(range(23)), 5, False)
    expected = [plain(b) for b in TorchDataLoader(Bulk(), batch_size=None, sampler=sampler)]
    assert [plain(b) for b in threaded(Bulk(), batch_size=None, sampler=sampler)] == expected


def test_persistent_threads_serve_every_epoch() -> None:
    loader = threaded(range(10), 3, persistent_workers=True)
    with loader:
        it = iter(loader)
        idents = set(worker_threads())
        assert numbers(it) == numbers(range_batches(10, 3))
        for _ in range(3):
            assert numbers(loader) == numbers(range_batches(10, 3))
            assert set(worker_threads()) == idents


def range_batches(count: int, size: int) -> list[torch.Tensor]:
    return [torch.arange(first, min(first + size, count)) for first in range(0, count, size)]


def test_a_growing_dataset_is_seen_by_the_next_loop() -> None:
    dataset = [0, 1, 2]
    loader = threaded(dataset, 2)
    assert numbers(loader) == [[0, 1], [2]]
    dataset.append(3)
    assert numbers(loader) == [[0, 1], [2, 3]]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", ["shuffled", "by batch", "iterable", "iterable with a state"])
def test_worker_processes_give_the_same_batches(case: str) -> None:
    def epochs(**options: Any) -> list[Any]:
        torch.manual_seed(11)
        with STATEFUL[case](**options) as loader:
            return [draws(loader) for _ in range(2)]

    assert epochs() == epochs(workers="process")


# ---- iterable datasets ----------------------------------------------------------------------------------


def test_each_thread_is_a_worker_of_an_iterable_dataset() -> None:
    assert numbers(threaded(Lines(10), 2)) == [[0, 2], [1, 3], [4, 6], [5, 7], [8], [9]]


class Sized(IterableDataset):
    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(self.sizes[info.id])


@pytest.mark.parametrize(("drop_last", "expected"), [(False, [0, 1, 3]), (True, [0, 0, 2])])
@pytest.mark.parametrize("prefetch_factor", [1, 2, 4])
def test_workers_end_one_by_one(drop_last: bool, expected: list[int], prefetch_factor: int) -> None:
    loader = threaded(
        Sized([0, 4, 20]), 7, num_workers=3, drop_last=drop_last, prefetch_factor=prefetch_factor
    )
    assert len(list(loader)) == sum(expected)


class Moving(IterableDataset):
    """Changes while it is iterated, the arrays too."""

    def __init__(self) -> None:
        self.order, self.at = np.arange(6), 0

    def __iter__(self) -> Iterator[int]:
        self.order[:] = self.order[::-1] + get_worker_info().id * 10
        for self.at in range(6):
            yield int(self.order[self.at])


def test_workers_have_datasets_of_their_own_and_leave_the_given_one_alone() -> None:
    dataset = Moving()
    assert numbers(threaded(dataset, 6)) == [[5, 4, 3, 2, 1, 0], [15, 14, 13, 12, 11, 10]]
    assert dataset.at == 0
    assert dataset.order.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_worker_stays_on_one_thread() -> None:
    class Bound(IterableDataset):
        def __iter__(self) -> Iterator[bool]:
            mine = threading.get_ident()
            for _ in range(8):
                yield threading.get_ident() == mine

    assert all(all(batch) for batch in threaded(Bound(), 2))


def test_a_dataset_that_cannot_be_copied_serves_one_thread() -> None:
    dataset = Lines(5)
    dataset.lock = threading.Lock()
    assert numbers(threaded(dataset, 3, num_workers=1)) == [[0, 1, 2], [3, 4]]
    with pytest.raises(RuntimeError, match="2 threads needs a copy"):
        iter(threaded(dataset, 3))


def test_persistent_workers_of_iterables_begin_anew() -> None:
    with threaded(Lines(7), 2, persistent_workers=True) as loader:
        whole = numbers(loader)
        next(iter(loader))
        assert [numbers(loader) for _ in range(2)] == [whole, whole]


# ---- whoever is free takes the next item ------------------------------------------------------------------


class Chained(Dataset):
    """Item 0 comes when another one is fetched."""

    def __init__(self, count: int, waits_for: int) -> None:
        self.count, self.waits_for = count, waits_for
        self.there, self.seen = threading.Event(), -1
        self.at_release = -1

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> int:
        if i == 0:
            assert self.there.wait(TIMEOUT_S), f"item {self.waits_for} was not fetched, only {self.seen}"
            self.at_release = self.seen
        self.seen = max(self.seen, i)
        if i == self.waits_for:
            self.there.set()
        return i


def test_a_slow_item_does_not_hold_up_the_others_of_its_batch() -> None:
    assert numbers(threaded(Chained(8, waits_for=7), 8)) == [list(range(8))]


def test_items_of_one_batch_are_fetched_side_by_side() -> None:
    together = threading.Barrier(3, timeout=TIMEOUT_S)

    class Meeting(Dataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> int:
            together.wait()
            return i

    assert numbers(threaded(Meeting(), 3, num_workers=3)) == [[0, 1, 2]]


def test_while_the_training_code_waits_threads_run_ahead_of_the_usual() -> None:
    usual = 2 * 2 * 4  # prefetch_factor * num_workers * batch_size
    dataset = Chained(100, waits_for=3 * usual)
    assert numbers(threaded(dataset, 4)) == numbers(range_batches(100, 4))


def drawn_while_batch_0_is_away(**options: Any) -> int:
    """How many batches of one item are asked for until nothing more happens without the first."""
    it = iter(threaded(range(400), 1, **options))
    receive, wait = it.runners.receive, it.runners.wait
    first: list[Any] = []
    received = drawn = 0

    def others(responses: list[Any]) -> list[Any]:
        nonlocal received
        first.extend(response for response in responses if response.task == 0)
        rest = [response for response in responses if response.task != 0]
        received += len(rest)
        return rest

    def wait_or_let_it_come(timeout_s: float | None) -> list[Any]:
        nonlocal drawn
        while not drawn:
            asked_for, _ = it.num_ahead
            if first and received == asked_for - 1:  # all others are here, and nothing more was asked for
                drawn = asked_for
                return first
            if rest := others(wait(timeout_s)):
                return rest
        return wait(timeout_s)

    it.runners.wait, it.runners.receive = wait_or_let_it_come, lambda: others(receive())
    next(it)
    it.close()
    return drawn


def test_but_not_without_a_bound() -> None:
    assert drawn_while_batch_0_is_away() == 8 * 2 * 2


def test_nor_beyond_the_memory_limit() -> None:
    assert drawn_while_batch_0_is_away(memory_limit=1) == 2 * 2


class DrawsAsItGoes(Sampler[int]):
    """Torch's sampler for all that anybody sees, but for its class."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(400))

    def __len__(self) -> int:
        return 400


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(6)


@pytest.mark.parametrize(
    ("sampler", "drawn"),
    [
        (DrawsAsItGoes(), 4),
        (BatchSampler(DrawsAsItGoes(), 1, False), 4),
        (RandomSampler(range(400), replacement=True), 4),
        (RandomSampler(range(300), num_samples=400), 4),
        (RandomSampler(range(400), num_samples=20, generator=generator()), 20),
        (RandomSampler(range(20), generator=generator()), 20),
        (RandomSampler(range(400)), 32),
        (RandomSampler(range(400), generator=generator()), 32),
        (SubsetRandomSampler(range(400), generator=generator()), 32),
        (WeightedRandomSampler([1.0] * 400, 400), 32),
        (DistributedSampler(range(400), 1, 0, shuffle=False), 32),
    ],
)
def test_only_samplers_that_have_drawn_everything_are_read_ahead_of_the_usual(
    sampler: Any, drawn: int
) -> None:
    own = {"batch_sampler": sampler} if isinstance(sampler, BatchSampler) else {"sampler": sampler}
    assert drawn_while_batch_0_is_away(**own) == drawn


def test_without_order_batches_come_as_they_finish() -> None:
    dataset = Gated(6, 0)
    it = iter(threaded(dataset, 1, in_order=False))
    assert sorted(int(next(it)) for _ in range(5)) == [1, 2, 3, 4, 5]
    dataset.gates[0].set()
    assert [int(batch) for batch in it] == [0]


def test_batches_are_collated_in_the_threads() -> None:
    def names(items: list[int]) -> str:
        return threading.current_thread().name

    assert all(name.startswith("dataflow-worker") for name in threaded(range(9), 2, collate_fn=names))


def test_torch_runs_one_thread_in_each() -> None:
    before = torch.get_num_threads()
    loader = threaded(range(4), 1, collate_fn=lambda _: torch.get_num_threads())
    assert list(loader) == [1, 1, 1, 1]
    assert torch.get_num_threads() == before


# ---- who am I ---------------------------------------------------------------------------------------------


class Asking(Dataset):
    """Tells what `get_worker_info` says, while all threads are asking."""

    def __init__(self, num_workers: int) -> None:
        self.together = threading.Barrier(num_workers, timeout=TIMEOUT_S)

    def __len__(self) -> int:
        return self.together.parties

    def __getitem__(self, i: int) -> Any:
        self.together.wait()
        return get_worker_info()


def test_each_thread_is_told_who_it_is() -> None:
    dataset = Asking(3)
    loader = threaded(dataset, 3, num_workers=3, collate_fn=list)
    it = iter(loader)
    infos = sorted(next(it), key=lambda info: info.id)
    assert [info.id for info in infos] == [0, 1, 2]
    assert {info.num_workers for info in infos} == {3}
    assert {info.worker_method for info in infos} == {"thread"}
    assert len({info.seed - info.id for info in infos}) == 1
    assert all(info.dataset is dataset for info in infos)
    assert re.search("worker_method='?thread", repr(infos[0]))  # torch before 2.13 quotes no text
    with pytest.raises(RuntimeError if OLD_TORCH else AttributeError):  # as torch's own
        infos[0].id = 7


def test_the_main_thread_is_no_worker() -> None:
    dataset = Gated(2, 0)
    it = iter(threaded(dataset, 2))
    assert dataset.begun[0].wait(TIMEOUT_S)
    assert get_worker_info() is None
    assert torch.utils.data.get_worker_info() is None
    dataset.gates[0].set()
    assert next(it).tolist() == [0, 1]


def test_collating_puts_nothing_into_shared_memory() -> None:
    for collate_fn in (None, lambda items: default_collate(items)):
        assert not any(batch.is_shared() for batch in threaded(torch.zeros(4, 2), 2, collate_fn=collate_fn))


def test_worker_init_fn_runs_once_in_each_thread() -> None:
    seen: list[tuple[int, int, str]] = []

    all_begun = threading.Barrier(3)

    def init(number: int) -> None:
        seen.append((number, get_worker_info().id, threading.current_thread().name))
        all_begun.wait(30)

    with threaded(range(6), 2, num_workers=3, worker_init_fn=init, persistent_workers=True) as loader:
        for _ in range(2):
            assert len(numbers(loader)) == 3
    assert sorted(seen) == [(n, n, f"dataflow-worker-{n}-0") for n in range(3)]


# ---- random numbers ---------------------------------------------------------------------------------------


class Drawing(Dataset):
    def __init__(self, count: int = 12) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[float, float, float]:
        rng = get_worker_info().rng
        torchs = torch.rand((), generator=rng.torch_generator, dtype=torch.float64).item()
        return rng.random_generator.random(), torchs, rng.numpy_generator.random()


class DrawingLines(IterableDataset):
    def __iter__(self) -> Iterator[float]:
        rng = get_worker_info().rng.random_generator
        yield from (rng.random() for _ in range(8))


def draws(loader: Any) -> list[Any]:
    return [plain(batch) for batch in loader]


def drawn(num_workers: int, **options: Any) -> list[Any]:
    return draws(threaded(Drawing(), 4, num_workers=num_workers, generator=seeded(), **options))


def test_what_an_item_draws_depends_on_no_thread() -> None:
    once = drawn(1)
    assert drawn(2) == drawn(5) == once
    flat = [value for batch in once for column in batch for value in column[1]]
    assert len(set(flat)) == len(flat), "every item, and every generator, draws other numbers"


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("dataset", [Drawing(), DrawingLines()])
def test_every_epoch_draws_anew_and_the_same_again(dataset: Any, persistent: bool) -> None:
    def epochs() -> list[Any]:
        with threaded(dataset, 4, generator=seeded(), persistent_workers=persistent) as loader:
            return [draws(loader) for _ in range(3)]

    first = epochs()
    assert first[0] != first[1] != first[2] != first[0]
    assert epochs() == first


def test_a_collate_fn_draws_for_its_batch() -> None:
    def collate(items: list[int]) -> float:
        return float(get_worker_info().rng.random_generator.random())

    def run(num_workers: int) -> list[float]:
        options = {"generator": seeded(), "collate_fn": collate}
        return list(threaded(range(12), 2, num_workers=num_workers, **options))

    assert len(set(run(1))) == 6
    assert run(3) == run(1)


def test_the_global_generators_are_not_seeded() -> None:
    random.seed(1)
    torch.manual_seed(1)
    np.random.seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist()
    list(threaded(range(8), 2, generator=seeded()))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


# ---- errors -----------------------------------------------------------------------------------------------


class Failing(Dataset):
    def __init__(self, *wrong: int) -> None:
        self.wrong = wrong

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> int:
        if i in self.wrong:
            raise KeyError(f"no item {i}")
        return i


def outcomes(loader: Any) -> list[Any]:
    """Batches and errors, in the order they come."""
    found, it = [], iter(loader)
    while True:
        try:
            found.append(next(it).tolist())
        except StopIteration:
            return found
        except Exception as error:
            found.append(error)


def test_an_error_stands_in_for_its_batch_and_the_loop_goes_on() -> None:
    first, second, third = outcomes(threaded(Failing(5), 4))
    assert (first, third) == ([0, 1, 2, 3], [8, 9, 10, 11])
    assert isinstance(second, KeyError)
    text = str(second)
    assert "Caught KeyError in DataLoader worker thread" in text
    assert "raise KeyError" in text, "with the stack of where it happened"


@pytest.mark.parametrize("early", [0, 1])
def test_of_several_errors_in_a_batch_the_first_item_counts(early: int) -> None:
    both, next_batch = threading.Barrier(2, timeout=TIMEOUT_S), threading.Event()

    class Both(Failing):
        def __getitem__(self, i: int) -> int:
            if i < 2:
                both.wait()
                assert i == early or next_batch.wait(TIMEOUT_S)
            if i == 11:  # the thread that has failed is here
                next_batch.set()
            return super().__getitem__(i)

    error, last = outcomes(threaded(Both(0, 1, 7), 11))
    assert "no item 0" in str(error)
    assert last == [11]


def test_every_batch_may_fail() -> None:
    found = outcomes(threaded(Failing(*range(12)), 1, num_workers=4))
    assert [type(error) for error in found] == [KeyError] * 12


def test_an_error_while_collating_is_told_as_well() -> None:
    def collate(items: list[int]) -> Any:
        raise ValueError("will not")

    found = outcomes(threaded(range(3), 2, collate_fn=collate))
    assert [type(error) for error in found] == [ValueError, ValueError]
    assert "Caught ValueError in DataLoader worker thread" in str(found[0])


@pytest.mark.parametrize("dataset", [range(4), Lines(4)])
def test_an_error_in_worker_init_fn_comes_with_the_first_batch(dataset: Any) -> None:
    def init(number: int) -> None:
        raise RuntimeError("Error in worker_init_fn")

    with pytest.raises(RuntimeError, match="Error in worker_init_fn"):
        list(threaded(dataset, 1, worker_init_fn=init))


def test_an_error_in_an_iterable_comes_with_the_first_batch_or_its_own() -> None:
    class NoBeginning(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            raise RuntimeError("Error in __iter__")

    class NoEnd(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise RuntimeError("Error in __next__")

    with pytest.raises(RuntimeError, match="Error in __iter__"):
        list(threaded(NoBeginning(), 1))
    it = iter(threaded(NoEnd(), 1, num_workers=1))
    assert next(it).tolist() == [1]
    with pytest.raises(RuntimeError, match="Error in __next__"):
        next(it)


def test_a_thread_survives_even_sys_exit() -> None:
    class Leaving(Dataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, i: int) -> int:
            return sys.exit(3) if i == 0 else i

    it = iter(threaded(Leaving(), 1, num_workers=1))
    with pytest.raises(SystemExit):
        next(it)
    assert next(it).tolist() == [1]


def test_an_error_of_the_sampler_is_raised_where_it_happens() -> None:
    def indices() -> Iterator[int]:
        yield 0
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(threaded(range(5), 1, sampler=indices()))


# ---- states -----------------------------------------------------------------------------------------------


class Counting(IterableDataset):
    """An iterable that knows its place."""

    def __init__(self) -> None:
        self.place = {"at": 0}

    def __iter__(self) -> Iterator[list[float]]:
        info = get_worker_info()
        while self.place["at"] < 7:
            self.place["at"] += 1
            yield [info.id, self.place["at"], *self.draw(info)]
        self.place["at"] = 0

    def draw(self, info: Any) -> list[float]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return self.place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = dict(state)


class DrawingCount(Counting):
    def draw(self, info: Any) -> list[float]:
        return [info.rng.random_generator.random(), info.rng.numpy_generator.random()]


class Remembering(Squares):
    """A map-style dataset whose items depend on those before."""

    total = 0

    def __getitem__(self, i: int) -> int:
        self.total += i
        return self.total

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


STATEFUL: dict[str, Any] = {
    "shuffled": lambda **o: threaded(Squares(), 3, shuffle=True, **o),
    "own sampler": lambda **o: threaded(
        Squares(), 3, sampler=RandomSampler(range(23), replacement=True), **o
    ),
    "by batch": lambda **o: threaded(Bulk(), 3, shuffle=True, **o),
    "random": lambda **o: threaded(Drawing(), 3, shuffle=True, **o),
    "iterable": lambda **o: threaded(Lines(20), 3, **o),
    "random iterable": lambda **o: threaded(DrawingLines(), 3, **o),
    "iterable with a state": lambda **o: threaded(Counting(), 2, **o),
    "random iterable with a state": lambda **o: threaded(DrawingCount(), 2, **o),
    "map-style with a state": lambda **o: threaded(Remembering(), 3, shuffle=True, **o),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("case", STATEFUL)
def test_resumes_at_every_position(case: str, persistent: bool) -> None:
    def make() -> DataLoader:
        loader: DataLoader = STATEFUL[case](persistent_workers=persistent)
        return loader

    torch.manual_seed(7)
    with make() as loader:
        whole = [draws(loader) for _ in range(3)]
    for cut in range(len(whole[1]) + 1):
        torch.manual_seed(7)
        with make() as loader:
            list(loader)
            head = draws(islice(loader, cut))
            state = json.loads(json.dumps(loader.state_dict()))
        torch.manual_seed(1234)
        with make() as resumed:
            resumed.load_state_dict(state)
            tail, after = draws(resumed), draws(resumed)
        assert head + tail == whole[1], f"differs when resumed after {cut}"
        assert after == whole[2], f"the epoch after differs when resumed after {cut}"


@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_a_state_is_valid_with_any_number_of_threads(num_workers: int) -> None:
    torch.manual_seed(7)
    loader = threaded(range(20), 3, shuffle=True)
    whole = numbers(loader)
    torch.manual_seed(7)
    it = iter(loader)
    head = numbers(islice(it, 3))
    state = loader.state_dict()
    other = DataLoader(
        range(20), 3, shuffle=True, num_workers=num_workers, workers="thread" if num_workers else None
    )
    other.load_state_dict(state)
    assert head + numbers(other) == whole


def test_without_order_a_resumed_loader_brings_each_item_once() -> None:
    dataset = Gated(9, 2)
    loader = threaded(dataset, 1, in_order=False)
    it = iter(loader)
    head = [int(next(it)) for _ in range(4)]
    state = loader.state_dict()
    assert 2 not in head
    dataset.gates[2].set()
    resumed = threaded(range(9), 1, in_order=False)
    resumed.load_state_dict(state)
    assert sorted(head + [int(batch) for batch in resumed]) == list(range(9))


def test_a_state_does_not_change_while_the_loop_goes_on() -> None:
    loader = threaded(Counting(), 2)
    it = iter(loader)
    next(it)
    state = loader.state_dict()
    before = json.dumps(state)
    list(it)
    assert json.dumps(state) == before


# ---- the end ----------------------------------------------------------------------------------------------


def test_leaving_a_loop_ends_the_threads() -> None:
    for batch in threaded(range(100), 2):
        assert batch.tolist() == [0, 1]
        assert worker_threads()
        break
    assert worker_threads() == []


def test_an_iterator_that_is_dropped_ends_its_threads_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        it = iter(threaded(range(100), 2))
        next(it)
        del it
        assert worker_threads() == []
    finally:
        gc.enable()


def test_ctrl_c_while_a_loop_that_was_left_ends_its_threads_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = iter(threaded(range(100), 2))
    next(it)
    join = PriorityPool.close
    monkeypatch.setattr(
        PriorityPool, "close", lambda *pool: join(*pool) and signal.raise_signal(signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  what is behind is what is tested
        del it
        compute_until_interrupted()
    monkeypatch.undo()
    assert threads_left("dataflow-worker") == []


def test_a_finished_loop_has_no_threads() -> None:
    it = iter(threaded(range(4), 2))
    assert len(list(it)) == 2
    assert worker_threads() == []
    with pytest.raises(StopIteration):
        next(it)


def test_closing_ends_persistent_threads_and_the_loop() -> None:
    loader = threaded(range(100), 2, persistent_workers=True)
    it = iter(loader)
    batch = next(it)
    loader.close()
    assert worker_threads() == []
    assert batch.tolist() == [0, 1]
    with pytest.raises(RuntimeError, match="closed"):
        next(it)
    assert len(numbers(loader)) == 50
    loader.close()


def test_what_is_not_begun_when_the_loop_is_left_is_not_fetched() -> None:
    dataset = Gated(40, 0)
    loader = threaded(dataset, 20, num_workers=1)
    loader.worker_limits = WorkerLimits(stop_s=0.0)  # the item that was begun is not waited for
    it = iter(loader)
    assert dataset.begun[0].wait(TIMEOUT_S)
    del it
    dataset.gates[0].set()
    assert threads_left("dataflow-worker") == []
    assert dataset.fetched == [0]


def test_two_iterators_do_not_disturb_each_other() -> None:
    loader = threaded(range(12), 3)
    one, two = iter(loader), iter(loader)
    pairs = [(next(one).tolist(), next(two).tolist()) for _ in range(4)]
    assert [a for a, _ in pairs] == [b for _, b in pairs] == numbers(range_batches(12, 3))
    del one
    assert len(worker_threads()) == 2
    with pytest.raises(StopIteration):
        next(two)


def test_a_loader_inside_a_dataset_of_a_loader() -> None:
    class Outer(Dataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> list[list[int]]:
            return numbers(threaded(range(i * 10, i * 10 + 3), 2))

    assert list(threaded(Outer(), batch_size=None)) == [[[i, i + 1], [i + 2]] for i in (0, 10, 20)]


def test_a_hanging_item_is_told_with_the_stacks_of_all_threads() -> None:
    dataset = Gated(4, 0)
    it = iter(threaded(dataset, 2, timeout=0.3))
    with pytest.raises(RuntimeError, match=r"timed out after 0\.3 seconds") as caught:
        next(it)
    assert "self.gates[i].wait" in str(caught.value)
    assert "worker thread 1" in str(caught.value)
    dataset.gates[0].set()
    assert next(it).tolist() == [0, 1], "nothing is lost"


HANGING = """
import threading
from dataflow import DataLoader
from dataflow.workers.worker import WorkerLimits
from prefetch.engine.pool import PriorityPool

class Hanging(list):
    def __getitem__(self, i):
        begun.set()
        threading.Event().wait()

begun = threading.Event()
loader = DataLoader(Hanging(range(4)), 1, num_workers=2, workers="thread")
loader.worker_limits = WorkerLimits(stop_s=0.1)
it = iter(loader)
begun.wait()
print("leaving")
"""


def test_an_item_that_hangs_does_not_keep_the_interpreter_from_exiting(tmp_path: Path) -> None:
    code, out, err = run_script(HANGING, how="forked", folder=tmp_path)
    assert code == 0, err
    assert "leaving" in out
    assert "in __getitem__" in err, "it is told what still runs"


# ---- arguments --------------------------------------------------------------------------------------------


def test_more_threads_than_cores_are_fine() -> None:
    assert len(list(threaded(range(100), 1, num_workers=50))) == 100


def test_without_the_interpreter_lock_code_that_somebody_may_run_is_not_taken_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as no_lock:
        no_lock.setattr("dataflow.workers.info.has_lock", lambda: False)
        for _ in range(2):
            assert len(list(DataLoader(Squares(4), batch_size=2, num_workers=1, workers="thread"))) == 2
            assert get_worker_info.__code__ is not OWN_CODE
            assert get_worker_info() is None
    install()
    uninstall()  # it is given back where there is a lock: the fixture looks


class ThreadContext(SpawnContext):
    """As MONAI's `ThreadDataLoader(use_thread_workers=True)` has one."""

    Process = threading.Thread  # type: ignore[assignment]


@pytest.mark.parametrize("workers", [None, "thread"])
def test_a_context_whose_process_is_a_thread_has_threads(workers: Any) -> None:
    loader = DataLoader(Squares(), 4, num_workers=2, multiprocessing_context=ThreadContext(), workers=workers)
    assert [batch["i"].tolist() for batch in loader] == [
        batch["i"].tolist() for batch in TorchDataLoader(Squares(), 4)
    ]
    assert loader.stats().workers == "thread"


def test_but_not_where_processes_are_asked_for() -> None:
    with pytest.raises(ValueError, match="Process is a thread"):
        DataLoader(Squares(), num_workers=2, multiprocessing_context=ThreadContext(), workers="process")
