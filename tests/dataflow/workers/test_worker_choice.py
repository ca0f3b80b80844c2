"""`workers="auto"`: what decides, what is tried, and that nothing of the trial is seen."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, default_convert, get_worker_info

from dataflow import DataLoader
from dataflow.processes.choice import LockCounter, TrialTimes, WorkerChoice, decide
from dataflow.workers import iterator as worker_loader
from dataflow.workers.auto import observe, shares_memory
from dataflow.workers.worker import WorkerJob
from prefetch.workers.threads import WorkerThreads

MS = 1e-3


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [t.name for t in threading.enumerate() if t.name.startswith("dataflow")]


# ---- the decision -----------------------------------------------------------------------------------------


def seen(work: float, cpu: float, locked: float, pack: float, unpack: float) -> TrialTimes:
    """In milliseconds."""
    return TrialTimes(
        work_s=work * MS,
        cpu_s=cpu * MS,
        locked_s=locked * MS,
        locked_is_bound=False,
        pack_s=pack * MS,
        unpack_s=unpack * MS,
    )


@pytest.mark.parametrize(
    ("observed", "num_workers", "num_cores", "expected"),
    [
        pytest.param(seen(100, 100, 100, 1, 1), 4, 8, "process", id="Python code: one lock for four threads"),
        pytest.param(seen(100, 100, 100, 1, 1), 1, 8, "process", id="which the training code wants, too"),
        pytest.param(seen(100, 100, 5, 10, 1), 4, 8, "thread", id="decoders and copies"),
        pytest.param(seen(100, 100, 15, 1, 1), 4, 8, "process", id="a lock that is held most of the time"),
        pytest.param(seen(100, 1, 1, 1, 1), 4, 1, "thread", id="waiting for storage"),
        pytest.param(seen(100, 100, 40, 1, 1), 4, 1, "thread", id="one core: processes are no faster"),
        pytest.param(seen(100, 100, 3, 1, 1), 16, 16, "process", id="a little of the lock, sixteen times"),
        pytest.param(seen(100, 100, 3, 1, 1), 4, 4, "thread", id="a little of the lock, four times"),
        pytest.param(seen(0.02, 0.02, 0.02, 0.1, 0.1), 4, 8, "thread", id="less work than handing over"),
        pytest.param(seen(10, 10, 2, 1, 40), 8, 8, "thread", id="large batches that take long to unpack"),
        pytest.param(seen(10, 10, 1, 0.1, 0.01), 100, 8, "process", id="more threads than the lock serves"),
        pytest.param(seen(0, 0, 0, 0, 0), 1, 1, "thread", id="nothing at all"),
        pytest.param("the dataset has a state", 4, 8, "process", id="an obstacle"),
    ],
)
def test_it_is_decided_by(observed: Any, num_workers: int, num_cores: int, expected: str) -> None:
    decision = decide(observed, num_workers=num_workers, num_cores=num_cores)
    assert decision.value == expected
    assert decision.reason
    if isinstance(observed, str):
        assert decision.reason == observed


def test_the_reason_has_the_figures() -> None:
    reason = decide(seen(100, 100, 5, 20, 1), num_workers=4, num_cores=8).reason
    assert "25 ms a batch with threads" in reason
    assert "30 ms with processes" in reason
    assert "held for 5 ms" in reason
    assert "busy" not in reason


def test_figures_that_are_bounds_say_so() -> None:
    observed = replace(seen(1000, 1000, 1000, 0, 0), locked_is_bound=True)
    assert "the lock may be held for less" in decide(observed, num_workers=2, num_cores=2).reason


# ---- the trial --------------------------------------------------------------------------------------------


def job(dataset: Any, **changes: Any) -> WorkerJob:
    batched = changes.get("auto_collation", True)
    options = {
        "kind": int(isinstance(dataset, IterableDataset)),
        "auto_collation": True,
        "collate_fn": default_collate if batched else default_convert,
        "drop_last": False,
        "init_fn": None,
        "base_seed": 0,
        "num_workers": 2,
    }
    return WorkerJob(dataset=dataset, **{**options, **changes})


class Rows(Dataset):
    """Rows that are made when they are asked for, by `make` if there is one."""

    def __init__(self, make: Callable[[int], Any] = lambda i: torch.full((8,), i)) -> None:
        self.make = make

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


def tried(dataset: Any, index: Any = range(8), **changes: Any) -> TrialTimes | str:
    return observe(job(dataset, **changes), index, 0.0)


def test_a_dataset_without_peculiarities_is_measured() -> None:
    measured = tried(Rows())
    assert isinstance(measured, TrialTimes)
    assert measured.work_s > 0
    assert measured.locked_s >= 0
    assert measured.pack_s > 0
    assert measured.unpack_s > 0


def test_what_is_measured_is_scaled_to_the_whole_batch() -> None:
    def slow(i: int) -> int:
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass
        return i

    measured = tried(Rows(slow), range(16))
    assert isinstance(measured, TrialTimes)
    assert measured.cpu_s > 0.9 * 16 * 0.02, "though only a few of the sixteen were fetched"


class Keeping(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.zeros(16, 3)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.rows[i]


class Noting(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, int] = {}

    def __getitem__(self, i: int) -> int:
        self.seen[i] = 1
        return i


class NotingInArray(Noting):
    def __init__(self) -> None:
        super().__init__()
        self.seen = np.zeros(16)  # type: ignore[assignment]


class OwnGenerator(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def __getitem__(self, i: int) -> float:
        return float(self.rng.random())


class WithState(Rows):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Lines(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)


def locked() -> Rows:
    dataset = Rows()
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    return dataset


def failing(i: int) -> int:
    raise KeyError(i)


@pytest.mark.parametrize(
    ("dataset", "changes", "reason"),
    [
        (Rows(lambda i: random.random()), {}, "global random generators"),
        (Rows(lambda i: np.random.rand()), {}, "global random generators"),
        (Rows(lambda i: torch.rand(3)), {}, "global random generators"),
        (Rows(), {"collate_fn": lambda items: torch.rand(3)}, "global random generators"),
        (Rows(lambda i: get_worker_info().id), {}, "get_worker_info"),
        (Rows(), {"collate_fn": lambda items: get_worker_info().id}, "get_worker_info"),
        (Rows(), {"init_fn": lambda number: None}, "worker_init_fn"),
        (Noting(), {}, "changes the dataset"),
        (NotingInArray(), {}, "changes the dataset"),
        (OwnGenerator(), {}, "changes the dataset"),
        (Keeping(), {"collate_fn": list}, "its own memory"),
        (Keeping(), {"auto_collation": False}, "its own memory"),
        (Rows(failing), {}, "KeyError"),
        (Rows(), {"collate_fn": failing}, "KeyError"),
        (locked(), {}, "cannot be copied"),
        (Lines(), {}, "dealt out"),
        (WithState(), {}, "dealt out"),
    ],
)
def test_processes_it_is_where_values_might_differ(dataset: Any, changes: Any, reason: str) -> None:
    index = 3 if changes.get("auto_collation") is False else range(8)
    found = tried(dataset, index, **changes)
    assert isinstance(found, str)
    assert reason in found


def test_collating_by_torch_does_not_count_as_asking_who_one_is() -> None:
    assert isinstance(tried(Keeping()), TrialTimes)


def test_a_trial_leaves_the_generators_as_they_were() -> None:
    random.seed(1)
    torch.manual_seed(1)
    np.random.seed(1)
    states = random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()
    drawing = Rows(lambda i: (random.random(), torch.rand(1), np.random.rand()))
    assert isinstance(tried(drawing), str)
    assert (random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()) == states


def test_a_trial_leaves_the_dataset_as_it_was() -> None:
    dataset = Noting()
    tried(dataset)
    assert dataset.seen == {}


HOLD = threading.Event()


class Hanging(Rows):
    def __getitem__(self, i: int) -> int:
        HOLD.wait()
        return i


def test_a_trial_that_hangs_ends_with_timeout() -> None:
    threading.Timer(0.5, HOLD.set).start()  # the thread is waited for when the time is up
    with pytest.raises(RuntimeError, match=r"timed out after 0\.2 seconds") as caught:
        observe(job(Hanging()), range(2), 0.2)
    assert "HOLD.wait()" in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ([1, "a", b"b", None, 2.5], [1, "a", b"b", None, 2.5], False),
        (torch.zeros(2), torch.zeros(2), False),
        (torch.zeros(0), torch.zeros(0), False),
        ({"x": [np.zeros(3)]}, {"x": [np.zeros(3)]}, False),
        ((), (), False),
    ],
)
def test_results_without_anything_in_common(one: Any, other: Any, shared: bool) -> None:
    assert shares_memory(one, other) is shared


@pytest.mark.parametrize(
    "thing", [torch.zeros(2), np.zeros(2), {"x": torch.zeros(1)}, [1], {"a": 1}, object(), set()]
)
def test_results_that_are_one_object(thing: Any) -> None:
    assert shares_memory(thing, thing)
    assert shares_memory((1, {"k": thing}), (1, {"k": thing}))


# ---- in a loader ------------------------------------------------------------------------------------------


def deciding(value: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let the decision fall so; what it was asked with."""
    asked: list[Any] = []

    def decided(observed: Any, **facts: Any) -> WorkerChoice:
        asked.append(observed)
        return WorkerChoice(value, "as the test says")

    monkeypatch.setattr(worker_loader, "decide", decided)
    return asked


class Steps:
    """A sampler that tells its state, and how far it was asked."""

    def __init__(self) -> None:
        self.at = self.begin = 0

    def __iter__(self) -> Iterator[int]:
        self.at, self.begin = self.begin, 0
        while self.at < 10:
            self.at += 1
            yield self.at - 1

    def __len__(self) -> int:
        return 10

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


@pytest.mark.parametrize("value", ["thread", "process"])
def test_either_way_each_batch_comes_once_and_in_order(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = deciding(value, monkeypatch)
    loader = DataLoader(range(10), 3, sampler=Steps(), num_workers=2, workers="auto")
    assert loader.stats().workers == "auto"
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
        assert loader.stats().workers == value
        assert loader.stats().workers_reason == "as the test says"
    assert len(asked) == 1, "the second loop knows"
    assert isinstance(asked[0], TrialTimes)


def test_a_state_taken_right_after_the_trial_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    deciding("thread", monkeypatch)

    def make() -> DataLoader:
        return DataLoader(range(10), 3, sampler=Steps(), num_workers=2, workers="auto")

    whole = [batch.tolist() for batch in make()]
    for cut in range(len(whole) + 1):
        loader = make()
        it = iter(loader)
        head = [next(it).tolist() for _ in range(cut)]
        state = loader.state_dict()
        resumed = make()
        resumed.load_state_dict(state)
        assert head + [batch.tolist() for batch in resumed] == whole


class Handles(Rows):
    """Opens something for itself when it is first used, and leaves it behind when it is sent."""

    handle: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handle": None}

    def __getitem__(self, i: int) -> tuple[int, int]:
        if self.handle is None:
            self.handle = threading.get_ident()
        return self.handle, threading.get_ident()


def test_each_thread_has_a_dataset_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    deciding("thread", monkeypatch)
    dataset = Handles()
    loader = DataLoader(dataset, 1, num_workers=2, workers="auto", collate_fn=list)
    seen = [item for batch in loader for item in batch]
    assert len(seen) == 16
    assert all(opened == used for opened, used in seen)
    assert dataset.handle is None


def test_a_loop_without_batches_decides_nothing_in_particular() -> None:
    loader = DataLoader([], 3, num_workers=1, workers="auto")
    assert list(loader) == []
    assert loader.stats().workers_reason == "there was no batch to try"


def test_nothing_of_the_trial_is_left_in_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    deciding("thread", monkeypatch)
    loader = DataLoader(range(10), 5, num_workers=2, workers="auto")
    assert Tally(i for batch in loader for i in batch.tolist()) == Tally(range(10))
    assert loader.stats().batches == 2


# ---- how long the lock is held ----------------------------------------------------------------------------


def held_by(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds under the lock, and of processor time."""
    threads, counter = WorkerThreads(1, "dataflow-test"), LockCounter()
    try:
        threads.submit(0, counter.run)
        began = time.thread_time()
        locked_s = counter.locked_s(work)
        return locked_s, time.thread_time() - began
    finally:
        threads.close()


def test_python_code_holds_the_lock() -> None:
    def count() -> None:
        began = time.thread_time()
        while time.thread_time() - began < 0.03:
            pass

    locked_s, ran_s = held_by(count)
    assert locked_s > 0.7 * ran_s


def test_waiting_does_not() -> None:
    locked_s, ran_s = held_by(lambda: threading.Event().wait(0.05))
    assert locked_s <= ran_s < 0.03


def test_work_that_fails_stops_the_counter() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        held_by(fail)
