"""Accelerate around our loaders: its batches, the user's loader inside, states that are exact."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from ecosystem_kit import Numbers, Stream, make_shards, numbers_of
from forked_kit import exit_code_in_child
from torch.utils.data import DataLoader as TorchDataLoader

from dataflow import Bucketed, DataLoader, Topology

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    accelerate = pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration

from dataflow.integrations.accelerate import prepare_loader

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

SIZE = 22


@pytest.fixture(autouse=True)
def a_process_of_its_own() -> Iterator[None]:
    """Accelerate keeps its state in classes."""
    yield
    forget()


def forget() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def accelerator(**settings: Any) -> Accelerator:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings))


def epochs(loader: Any, num_epochs: int = 2) -> list[list[list[int]]]:
    return [[numbers_of(batch) for batch in loader] for _ in range(num_epochs)]


def shuffled(cls: Any, workers: int = 0, **arguments: Any) -> Any:
    return cls(Numbers(SIZE), 4, shuffle=True, num_workers=workers, **arguments)


class Own(DataLoader):
    """A user's subclass, whose arguments Accelerate does not know."""

    def __init__(self, path: str, *, size: int) -> None:
        super().__init__(Numbers(size), 4, shuffle=True, memory_limit="5MB")
        self.path = path


# ---- one process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seedable", [False, True])
def test_batches_are_those_of_accelerate_around_torch(workers: int, seedable: bool) -> None:
    torch.manual_seed(1)
    theirs = accelerator(use_seedable_sampler=seedable).prepare(shuffled(TorchDataLoader, workers))
    expected = epochs(theirs)
    torch.manual_seed(1)
    ours = prepare_loader(accelerator(use_seedable_sampler=seedable), shuffled(DataLoader, workers))
    assert epochs(ours) == expected
    assert len(ours) == len(theirs)


def test_the_loader_inside_is_of_the_user_s_class_with_its_settings() -> None:
    own = Own("somewhere", size=SIZE)
    prepared = prepare_loader(accelerator(), own)
    assert type(prepared.base_dataloader) is Own
    assert isinstance(prepared, Own)
    assert isinstance(prepared, DataLoaderShard)
    assert (prepared.path, prepared.memory_limit) == ("somewhere", 5_000_000)
    assert prepared.base_dataloader is not own


def test_prepare_itself_gives_the_same_batches_by_torch_s_loader() -> None:
    torch.manual_seed(1)
    prepared = accelerator().prepare(shuffled(DataLoader))
    found = epochs(prepared)
    torch.manual_seed(1)
    assert found == epochs(accelerator().prepare(shuffled(TorchDataLoader)))
    assert type(prepared.base_dataloader) is TorchDataLoader


def test_other_loaders_are_refused() -> None:
    with pytest.raises(TypeError, match=r"dataflow\.DataLoader, got DataLoader; use accelerator\.prepare"):
        prepare_loader(accelerator(), shuffled(TorchDataLoader))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cut", [1, 4])
def test_save_state_and_load_state_keep_the_place(tmp_path: Path, workers: int, cut: int) -> None:
    """In the second epoch, whose number Accelerate tells its seedable sampler."""

    def make() -> tuple[Accelerator, Any]:
        here = accelerator(use_seedable_sampler=True, data_seed=7)
        return here, prepare_loader(here, shuffled(DataLoader, workers))

    here, loader = make()
    whole = epochs(loader, 3)
    forget()
    here, loader = make()
    epochs(loader, 1)
    head = []
    for batch in loader:
        head.append(numbers_of(batch))
        if len(head) == cut:
            here.save_state(str(tmp_path))
            break
    forget()
    torch.manual_seed(1234)
    here, again = make()
    here.load_state(str(tmp_path))
    (rest, after) = epochs(again)
    assert [head + rest, after] == whole[1:]


def test_the_end_of_an_epoch_and_its_remainder_are_told_to_gradient_accumulation() -> None:
    here = accelerator()
    loader = prepare_loader(here, shuffled(DataLoader))
    state = here.gradient_state
    seen = [(state.end_of_dataloader, state.remainder) for _ in loader]
    assert seen == [(False, 2)] * 5 + [(True, 2)]


def test_skip_first_batches_skips_them() -> None:
    torch.manual_seed(5)
    ours = prepare_loader(accelerator(), DataLoader(Numbers(SIZE), 4))
    assert epochs(skip_first_batches(ours, 2), 1) == [epochs(ours, 1)[0][2:]]


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_datasets_are_dispatched_and_resume(workers: int) -> None:
    def make() -> Any:
        return prepare_loader(accelerator(), DataLoader(Stream(SIZE), 4, num_workers=workers))

    loader = make()
    assert isinstance(loader, DataLoaderDispatcher)
    (whole,) = epochs(loader, 1)
    assert sorted(chain(*whole)) == list(range(SIZE))
    batches = iter(make_it := make())
    head = [numbers_of(batch) for batch in islice(batches, 3)]
    state = make_it.state_dict()
    batches.close()
    again = make()
    again.load_state_dict(state)
    assert [head + epochs(again, 1)[0]] == [whole]


# ---- shards ---------------------------------------------------------------------------------------------


def test_a_loader_over_shards_keeps_its_order_and_resumes_in_a_later_epoch(tmp_path: Path) -> None:
    dataset = make_shards(tmp_path)

    def make() -> Any:
        return prepare_loader(accelerator(), DataLoader(dataset, 7, shuffle=True, seed=3))

    with DataLoader(dataset, 7, shuffle=True, seed=3) as plain:
        whole = epochs(plain, 3)
    loader = make()
    assert epochs(loader, 1) == whole[:1]
    head = []
    for batch in loader:
        head.append(numbers_of(batch))
        if len(head) == 2:
            state = loader.state_dict()
            break
    again = make()
    again.load_state_dict(state)
    (rest, after) = epochs(again)
    assert [head + rest, after] == whole[1:]


def test_a_state_goes_on_with_other_data_between_epochs_only(tmp_path: Path) -> None:
    def make(name: str, num_samples: int) -> Any:
        dataset = make_shards(tmp_path / name, num_samples)
        return prepare_loader(accelerator(), DataLoader(dataset, 10, shuffle=True, seed=3))

    loader = make("old", 40)
    states = [loader.state_dict() for _ in loader]
    grown = make("grown", 60)
    with pytest.raises(ValueError, match=r"4 shards, and this loader has 6 shards.*give the shards"):
        grown.load_state_dict(states[1])
    grown.load_state_dict(loader.state_dict())
    assert sorted(chain(*epochs(grown, 1)[0])) == [*range(60)]


def test_prepare_refuses_to_take_a_loader_over_shards_apart(tmp_path: Path) -> None:
    prepared = accelerator().prepare(DataLoader(make_shards(tmp_path), 4))
    with pytest.raises(TypeError, match=r"dataflow\.integrations\.accelerate\.prepare_loader"):
        next(iter(prepared))


def test_batches_of_shards_are_not_skipped_by_taking_their_loader_apart(tmp_path: Path) -> None:
    loader = prepare_loader(accelerator(), DataLoader(make_shards(tmp_path), 4))
    with pytest.raises(
        TypeError, match=r"accelerator\.load_state or load_state_dict.*integrations\.transformers"
    ):
        next(iter(skip_first_batches(loader, 2)))


def test_a_run_over_shards_that_was_killed_resumes_with_the_batch_after_its_last_save(tmp_path: Path) -> None:
    dataset = make_shards(tmp_path)
    with DataLoader(dataset, 7, shuffle=True, seed=3) as plain:
        whole = epochs(plain, 2)

    def make() -> tuple[Accelerator, Any]:
        here = accelerator()
        return here, prepare_loader(here, DataLoader(dataset, 7, shuffle=True, seed=3))

    def run() -> None:
        here, loader = make()
        for number, _ in enumerate(loader):
            if number == 2:
                here.save_state(str(tmp_path / "state"))
            if number == 4:
                os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code_in_child(run) == -signal.SIGKILL
    forget()
    here, loader = make()
    here.load_state(str(tmp_path / "state"))
    assert epochs(loader) == [whole[0][3:], whole[1]]


# ---- two processes --------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="even"),
        pytest.param({"even_batches": False}, id="uneven"),
        pytest.param({"split_batches": True}, id="split", marks=pytest.mark.full),
    ],
)
def test_ranks_get_what_accelerate_deals_out_with_torch(settings: Any) -> None:
    def make(cls: Any, workers: int = 2) -> Any:
        torch.manual_seed(6)
        here = accelerator(**settings)
        return (prepare_loader if cls is DataLoader else Accelerator.prepare)(here, shuffled(cls, workers))

    expected = epochs(make(TorchDataLoader, workers=0))  # torch would fork a process with gloo's threads
    forget()
    loader = make(DataLoader)
    found = [[numbers_of(batch) for batch in loader]]
    second = []
    for batch in loader:
        second.append(numbers_of(batch))
        if len(second) == 1:
            state = loader.state_dict()
    assert [*found, second] == expected
    forget()
    again = make(DataLoader)
    again.load_state_dict(state)
    assert [numbers_of(batch) for batch in again] == second[1:]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("over_shards", [False, True])
def test_metrics_are_gathered_over_each_sample_once(tmp_path: Path, over_shards: bool) -> None:
    here = accelerator()
    dataset = make_shards(tmp_path / str(here.process_index), 45) if over_shards else Numbers(45)
    loader = prepare_loader(here, DataLoader(dataset, 4, shuffle=False))
    gathered = [here.gather_for_metrics(torch.tensor(numbers_of(batch))).tolist() for batch in loader]
    assert sorted(chain(*gathered)) == list(range(45))
    if over_shards:
        assert list(chain(*gathered)) == list(range(45))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("done", [4, 7])
def test_metrics_are_gathered_over_each_sample_once_after_a_resume(tmp_path: Path, done: int) -> None:
    """The last batch then is another one than the dataset's length tells."""
    here = accelerator()
    dataset = make_shards(tmp_path / str(here.process_index), 45)
    with DataLoader(dataset, done, topology=Topology()) as alone:
        next(batches := iter(alone))
        state = alone.state_dict()
        batches.close()
    loader = DataLoader(dataset, 4)
    loader.load_state_dict(state)
    loader = prepare_loader(here, loader)
    gathered = [here.gather_for_metrics(torch.tensor(numbers_of(batch))).tolist() for batch in loader]
    assert list(chain(*gathered)) == list(range(done, 45))


@pytest.mark.ranks(2)
def test_no_sample_is_cut_off_where_batches_are_no_number_of_samples(tmp_path: Path) -> None:
    here = accelerator()
    dataset = make_shards(tmp_path / str(here.process_index), 45)
    batching = Bucketed(3, "x.cls", lengths=[1 + i % 4 for i in range(45)])
    loader = prepare_loader(here, DataLoader(dataset, batching=batching, collate_fn=list))
    gathered = [
        here.gather_for_metrics([int(one["x.cls"]) for one in batch], use_gather_object=True)
        for batch in loader
    ]
    assert set(chain(*gathered)) == set(range(45))


@pytest.mark.ranks(2)
def test_no_sample_is_cut_off_where_the_padding_is_not_at_the_end(tmp_path: Path) -> None:
    here = accelerator()
    dataset = make_shards(tmp_path / str(here.process_index), 45)
    loader = prepare_loader(here, DataLoader(dataset, 4, shuffle=True))
    gathered = [here.gather_for_metrics(torch.tensor(numbers_of(batch))).tolist() for batch in loader]
    assert set(chain(*gathered)) == set(range(45))
    assert len(list(chain(*gathered))) == 46


@pytest.mark.ranks(2)
def test_shards_are_dealt_out_once(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    dataset = make_shards(tmp_path / str(rank))
    with DataLoader(dataset, 4, shuffle=True, seed=2) as plain:
        expected = epochs(plain)
    found = epochs(prepare_loader(accelerator(), DataLoader(dataset, 4, shuffle=True, seed=2)))
    assert found == expected
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, found)
    for epoch in range(2):
        assert sorted(chain(*everyone[0][epoch], *everyone[1][epoch])) == list(range(40))


@pytest.mark.ranks(2)
def test_dispatched_batches_resume_where_they_were() -> None:
    def make() -> Any:
        return prepare_loader(accelerator(), DataLoader(Stream(30), 3))

    (whole,) = epochs(make(), 1)
    loader = make()
    for number, batch in enumerate(loader):
        assert numbers_of(batch) == whole[number]
        if number == 1:
            state = loader.state_dict()
    again = make()
    again.load_state_dict(state)
    assert epochs(again, 1) == [whole[2:]]
