"""Our loaders in Lightning's Trainer: what it makes anew, what it leaves, resuming from its checkpoints."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from ecosystem_kit import Numbers, Stream, Twins, make_shards, numbers_of
from forked_kit import exit_code_in_child
from loader_kit import session_of
from torch.utils.data import DataLoader as TorchDataLoader, DistributedSampler, RandomSampler
from worker_kit import Does

from dataflow import Bucketed, DataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")
    import lightning.pytorch as pl
    from lightning.pytorch.utilities import CombinedLoader

    from dataflow.integrations.lightning import resume as load_states

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of small data and few workers

SIZE = 22
ROOT = Path(__file__).parents[2]


class Own(DataLoader):
    """A user's subclass."""


class Recorder(pl.LightningModule):
    """Trains one weight, and remembers the samples of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.steps: list[tuple[int, list[int]]] = []
        self.tested: list[list[int]] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        numbers = numbers_of(batch)
        self.steps.append((self.current_epoch, numbers))
        loss: torch.Tensor = self.layer(torch.tensor(numbers, dtype=torch.float32)[:, None]).mean()
        return loss

    def test_step(self, batch: Any) -> None:
        self.tested.append(numbers_of(batch))

    def predict_step(self, batch: Any) -> list[int]:
        return numbers_of(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class SaveAt(pl.Callback):
    """Writes a checkpoint after so many training steps."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if len(module.steps) == self.step:
            trainer.save_checkpoint(self.path)


def trainer(**settings: Any) -> pl.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return pl.Trainer(accelerator="cpu", **dict.fromkeys(quiet, False), **{"devices": 1, **settings})


def steps_of(loader: Any, *, max_epochs: int = 2, resume: Path | None = None, **settings: Any) -> list[Any]:
    module = Recorder()
    torch.manual_seed(0)
    from_checkpoint = {"ckpt_path": resume, "weights_only": False} if resume else {}
    trainer(max_epochs=max_epochs, **settings).fit(module, loader, **from_checkpoint)
    return module.steps


MAKERS: dict[str, Callable[[Path], Callable[..., Any]]] = {
    "map": lambda _: lambda cls, **kw: cls(Numbers(SIZE), 4, shuffle=True, **kw),
    "iterable": lambda _: lambda cls, **kw: cls(Stream(SIZE), 4, **kw),
    "twins": lambda _: (
        lambda cls, **kw: cls(Numbers(SIZE), batch_sampler=Twins(RandomSampler(range(9)), 2, False), **kw)
    ),
}


# ---- one process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", MAKERS)
def test_fit_sees_the_batches_that_it_sees_with_torch(tmp_path: Path, kind: str, workers: int) -> None:
    make = MAKERS[kind](tmp_path)
    assert steps_of(make(DataLoader, num_workers=workers)) == steps_of(
        make(TorchDataLoader, num_workers=workers)
    )


def parent_of(index: int) -> int:
    return os.getppid()


def test_asking_for_the_start_method_as_lightning_does_chooses_none() -> None:
    """It fixes the platform's default: where that is fork, workers are forked as they are without it."""
    is_forked = multiprocessing.get_start_method() == "fork"
    loader = DataLoader(Does(parent_of), num_workers=1)
    parents = {int(parent) for batch in loader for parent in batch}
    assert (parents == {os.getpid()}) == is_forked
    assert not is_forked or loader.stats().start_reason == "the default of this Python"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_checkpoint_inside_an_epoch_resumes_exactly(tmp_path: Path, kind: str, workers: int) -> None:
    make, path = MAKERS[kind](tmp_path), tmp_path / "at.ckpt"
    for step in (2, 8):
        whole = steps_of(make(DataLoader, num_workers=workers), callbacks=[SaveAt(step, path)])
        again = steps_of(make(DataLoader, num_workers=workers), resume=path)
        assert again == whole[step:], f"differs when resumed after step {step}"


@pytest.mark.parametrize("step", [3, 10, 13, 20])
def test_a_loader_over_shards_resumes_exactly_from_any_checkpoint(tmp_path: Path, step: int) -> None:
    """Also from one that was written after the last batch of an epoch (of ten)."""
    dataset, path = make_shards(tmp_path), tmp_path / "at.ckpt"
    with DataLoader(dataset, 4, shuffle=True, seed=3) as plain:
        expected = [(epoch, numbers_of(batch)) for epoch in range(3) for batch in plain]
    whole = steps_of(
        DataLoader(dataset, 4, shuffle=True, seed=3), max_epochs=3, callbacks=[SaveAt(step, path)]
    )
    assert whole == expected
    assert (
        steps_of(DataLoader(dataset, 4, shuffle=True, seed=3), max_epochs=3, resume=path) == expected[step:]
    )


def test_a_run_over_shards_that_was_killed_resumes_from_its_last_checkpoint(tmp_path: Path) -> None:
    dataset, path = make_shards(tmp_path), tmp_path / "at.ckpt"

    class KillAt(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if len(module.steps) == 15:
                os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        steps_of(DataLoader(dataset, 4, shuffle=True, seed=3), callbacks=[SaveAt(13, path), KillAt()])

    assert exit_code_in_child(run) == -signal.SIGKILL
    with DataLoader(dataset, 4, shuffle=True, seed=3) as plain:
        expected = [(epoch, numbers_of(batch)) for epoch in range(2) for batch in plain]
    assert steps_of(DataLoader(dataset, 4, shuffle=True, seed=3), resume=path) == expected[13:]


def letters_of(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample with tokens, between none and six."""
    number = int(sample["x.cls"])
    return {"x.cls": number, "tokens": [number] * (number % 7)}


@pytest.fixture
def by_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], DataLoader]:
    """Loaders whose lengths are found on the way; their cache folder is the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dataset = make_shards(tmp_path)
    dataset.transform = letters_of
    return lambda key: DataLoader(
        dataset, shuffle=True, seed=3, batching=Bucketed(4, window=12, lengths_key=key)
    )


@pytest.mark.parametrize("step", [3, 9, 10, 11, 20])
@pytest.mark.parametrize(("key", "is_known"), [("", False), ("letters", False), ("letters", True)])
def test_a_loader_that_finds_lengths_resumes_exactly_with_a_length_and_without(
    tmp_path: Path, by_length: Callable[[str], DataLoader], key: str, is_known: bool, step: int
) -> None:
    """Of one that has no length Lightning takes a batch ahead, which no state may count as used."""
    path = tmp_path / "at.ckpt"
    with by_length(key if is_known else "") as loader:
        epochs = [[(epoch, numbers_of(batch)) for batch in loader] for epoch in range(3)]
    expected = list(chain(*epochs))
    assert [*map(len, epochs)] == [10] * 3
    assert steps_of(by_length(key), max_epochs=3, callbacks=[SaveAt(step, path)]) == expected
    assert steps_of(by_length(key), max_epochs=3, resume=path) == expected[step:]


# ---- what Lightning's users report of resuming inside an epoch ------------------------------------------


class Validated(Recorder):
    """Validates too; a schedule may ask how many steps there will be, which sets up the loaders."""

    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        self.asks, self.validated = asks, []

    def validation_step(self, batch: Any) -> None:
        self.validated.append((self.global_step, numbers_of(batch)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.asks:
            assert self.trainer.estimated_stepping_batches == 30
        return super().configure_optimizers()


class SaveInValidation(pl.Callback):
    """Writes a checkpoint when the validation after so many steps is over."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)


def fitted(module: Any, *loaders: Any, resume: Path | None = None, **settings: Any) -> Any:
    """The module after three epochs."""
    here = trainer(max_epochs=3, num_sanity_val_steps=0, **settings)
    load_states(here)
    here.fit(module, *loaders, **({"ckpt_path": resume, "weights_only": False} if resume else {}))
    return module


@pytest.mark.parametrize("step", [4, 8, 14])
def test_validation_inside_an_epoch_changes_nothing_neither_does_resuming_from_it(
    tmp_path: Path, step: int
) -> None:
    """Issues 1182, 19549: validation is whole again, and training goes on behind the step before it."""
    dataset, path = make_shards(tmp_path), tmp_path / "at.ckpt"
    train = partial(DataLoader, dataset, 4, shuffle=True, seed=3)
    with train() as plain:
        expected = [(epoch, numbers_of(batch)) for epoch in range(3) for batch in plain]
    how = {"val_check_interval": 4}
    saves = SaveInValidation(step, path)
    whole = fitted(Validated(), train(), DataLoader(dataset, 8), callbacks=[saves], **how)
    assert whole.steps == expected
    assert [numbers for _, numbers in whole.validated[:5]] == [[*range(n, n + 8)] for n in range(0, 40, 8)]
    again = fitted(Validated(), train(), DataLoader(dataset, 8), resume=path, **how)
    assert again.steps == expected[step:]
    assert again.validated == [row for row in whole.validated if row[0] > step]


@pytest.mark.parametrize("step", [3, 10, 13])
def test_a_schedule_that_asks_for_the_number_of_steps_leaves_the_state_to_be_loaded(
    tmp_path: Path, step: int
) -> None:
    """Issue 20550: Lightning forgets the states of loaders that are set up before a checkpoint is read."""
    dataset, path = make_shards(tmp_path), tmp_path / "at.ckpt"
    train = partial(DataLoader, dataset, 4, shuffle=True, seed=3)
    whole = fitted(Validated(asks=True), train(), callbacks=[SaveAt(step, path)])
    assert fitted(Validated(asks=True), train(), resume=path).steps == whole.steps[step:]
    without = steps_of(train(), max_epochs=3, resume=path)
    assert without == whole.steps[step:], "where nobody asks, Lightning loads them"
    assert load_states(here := trainer()) is load_states(here)


def test_loaders_that_are_made_anew_each_epoch_resume_inside_one(tmp_path: Path) -> None:
    """Issue 21492."""
    dataset, path = make_shards(tmp_path), tmp_path / "at.ckpt"

    class Made(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(dataset, 4, shuffle=True, seed=3)

    how = {"reload_dataloaders_every_n_epochs": 1}
    whole = fitted(Recorder(), Made(), callbacks=[SaveAt(13, path)], **how)
    assert fitted(Recorder(), Made(), resume=path, **how).steps == whole.steps[13:]


def test_the_next_epoch_of_shards_is_read_while_the_last_batch_trains(tmp_path: Path) -> None:
    """Lightning counts batches and never asks for the end of an epoch; the threads read on all the same."""
    loader = DataLoader(make_shards(tmp_path), 4)
    engines = set()

    class Look(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            engines.add(id(session_of(loader)))

    steps_of(loader, max_epochs=4, callbacks=[Look()])
    assert len(engines) == 1


def test_a_loader_made_in_a_hook_keeps_its_class_when_lightning_makes_it_anew() -> None:
    class Hooked(Recorder):
        def predict_dataloader(self) -> Any:
            return Own(Numbers(SIZE), batch_size=4, memory_limit="7MB", snapshot_every_n_steps=3)

    here = trainer()
    assert list(chain(*here.predict(Hooked()))) == list(range(SIZE))
    loader = here.predict_dataloaders
    assert type(loader) is Own
    assert (loader.memory_limit, loader.snapshot_every_n_steps) == (7_000_000, 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_predict_gives_every_sample_in_order(tmp_path: Path, workers: int) -> None:
    assert list(chain(*trainer().predict(Recorder(), Own(Numbers(SIZE), 4, num_workers=workers)))) == list(
        range(SIZE)
    )
    shards = Own(make_shards(tmp_path), 4, shuffle=False, seed=5, num_workers=workers)
    here = trainer()
    assert list(chain(*here.predict(Recorder(), shards))) == list(range(40))
    assert type(here.predict_dataloaders) is Own
    assert here.predict_dataloaders.seed == 5


def test_test_loops_and_several_loaders_work(tmp_path: Path) -> None:
    module = Recorder()
    trainer().test(module, DataLoader(make_shards(tmp_path), 8, shuffle=False), verbose=False)
    assert list(chain(*module.tested)) == list(range(40))


def test_fabric_takes_our_loaders_as_they_are(tmp_path: Path) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    shards = DataLoader(make_shards(tmp_path), 4, shuffle=True, seed=3)
    expected = [[numbers_of(batch) for batch in shards] for _ in range(2)]
    shards.set_epoch(1)
    assert len([*islice(shards, 4)]) == 4
    state = shards.state_dict()
    resumed = DataLoader(shards.dataset, 4)
    resumed.load_state_dict(state)
    found = [[numbers_of(batch) for batch in fabric.setup_dataloaders(resumed)]]
    assert found == [expected[1][4:]], "Fabric counts epochs from 0"
    whole = fabric.setup_dataloaders(DataLoader(Numbers(SIZE), 4))
    assert list(chain(*map(numbers_of, whole))) == list(range(SIZE))


def test_no_process_is_left_when_training_has_ended() -> None:
    import psutil

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    steps_of(DataLoader(Numbers(SIZE), 4, num_workers=2, persistent_workers=True))
    steps_of(DataLoader(Numbers(SIZE), 4, num_workers=2))
    left = [c.name() for c in psutil.Process().children(recursive=True) if c.pid not in before]
    assert not [name for name in left if "worker" in name]


# ---- two ranks ------------------------------------------------------------------------------------------


def ddp(loader: Any) -> tuple[list[Any], Any]:
    module, here = Recorder(), trainer(max_epochs=2, strategy="ddp", devices=2)
    found: list[Any] = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            found.append(trainer.train_dataloader)

    here.callbacks.append(Look())
    torch.manual_seed(0)
    here.fit(module, loader)
    return [numbers for _, numbers in module.steps], found[0]


@pytest.mark.ranks(2, backend=None, timeout_s=100, env={"TORCHELASTIC_RUN_ID": "test"})
def test_ranks_get_their_parts(tmp_path: Path) -> None:
    """One start of Lightning serves several facts: it takes seconds."""
    # With workers, torch would fork a process that has gloo's threads.
    theirs, _ = ddp(TorchDataLoader(Numbers(SIZE), 4, shuffle=True))
    for workers in (0, 2):
        ours, loader = ddp(Own(Numbers(SIZE), 4, shuffle=True, num_workers=workers, memory_limit="9MB"))
        assert ours == theirs
        assert (type(loader), type(loader.sampler)) == (Own, DistributedSampler)
        assert (loader.memory_limit, loader.num_workers) == (9_000_000, workers)

    ours, loader = ddp(Own(Numbers(SIZE), batch_sampler=Twins(RandomSampler(range(9)), 2, False)))
    theirs, _ = ddp(TorchDataLoader(Numbers(SIZE), batch_sampler=Twins(RandomSampler(range(9)), 2, False)))
    assert ours == theirs
    assert type(loader.batch_sampler) is Twins

    ours, loader = ddp(Own(Stream(SIZE), 4))
    assert sorted(set(chain(*ours))) == list(range(SIZE)), (
        "an iterable dataset is not dealt out, as with torch"
    )

    rank = torch.distributed.get_rank()
    dataset = make_shards(tmp_path / str(rank))
    ours, loader = ddp(given := DataLoader(dataset, 4, shuffle=True, seed=1))
    assert loader is given
    with DataLoader(dataset, 4, shuffle=True, seed=1) as plain:
        assert ours == [numbers_of(batch) for _ in range(2) for batch in plain]
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, ours)
    for epoch in (slice(5), slice(5, 10)):
        assert sorted(chain(*everyone[0][epoch], *everyone[1][epoch])) == list(range(40))


SCRIPT = """
import json
import sys
from test_ecosystem_lightning import Recorder, trainer
from dataflow import DataLoader, ShardedDataset

(folder,) = sys.argv[1:]


class Told(Recorder):
    def on_train_end(self):
        with open(f"{folder}/rank-{self.trainer.global_rank}.json", "w") as file:
            json.dump(self.steps, file)


if __name__ == "__main__":
    dataset = ShardedDataset(f"{folder}/train-*.tar", catalog=f"{folder}/catalog")
    loader = DataLoader(dataset, 4, shuffle=True, seed=1)  # before there is a process group
    trainer(max_epochs=2, strategy="ddp", devices=2).fit(Told(), loader)
"""


def test_a_loader_over_shards_made_before_lightning_starts_the_ranks(tmp_path: Path) -> None:
    make_shards(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests' / 'kits'}:{ROOT}:{Path(__file__).parent}"},
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for epoch in range(2):
        numbers = [n for steps in ranks for at, step in steps if at == epoch for n in step]
        assert sorted(numbers) == list(range(40))


# ---- samples as they lie, and two loaders in a cycle ----------------------------------------------------


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("workers", [None, 0, 1])
def test_overfit_batches_takes_the_first_batches_of_the_files_with_all_other_settings(
    tmp_path: Path, by_length: Callable[[str], DataLoader], workers: int | None, hook: bool
) -> None:
    """Lightning makes the loader anew, from its attributes or the arguments of the hook."""

    def loader() -> Any:
        return Own(make_shards(tmp_path / "more"), 4, shuffle=True, num_workers=workers, mark_repeats=True)

    class Hooked(Recorder):
        def train_dataloader(self) -> Any:
            return loader()

    (tmp_path / "more").mkdir()
    here = trainer(max_epochs=2, overfit_batches=2)
    here.fit(module := Hooked() if hook else Recorder(), *(() if hook else (loader(),)))
    assert module.steps == [(epoch, [*range(n, n + 4)]) for epoch in range(2) for n in (0, 4)]
    made = here.train_dataloader
    assert (type(made), made.mark_repeats, made.shuffle.kind) == (Own, True, "none")
    assert len(steps_of(by_length(""), max_epochs=1, overfit_batches=3)) == 3  # the batching is kept, too


CYCLES: dict[str, Callable[[Any], list[Any]]] = {
    "shards": lambda shards: [DataLoader(shards.take(count), 4, shuffle=True, seed=3) for count in (40, 12)],
    "map": lambda _: [DataLoader(Numbers(count), 4, shuffle=True) for count in (40, 12)],
    "both": lambda shards: [
        DataLoader(Numbers(40), 4, shuffle=True),
        DataLoader(shards.take(12), 4, shuffle=True),
    ],
}


@pytest.mark.parametrize("step", [2, 5, 9, 10, 13, 20])
@pytest.mark.parametrize("kind", CYCLES)
def test_two_loaders_of_unlike_lengths_in_a_cycle_resume_exactly(
    tmp_path: Path, kind: str, step: int
) -> None:
    """The shorter one has begun epochs by itself since Lightning named one; both draw seeds by turns."""
    if step % 10 == 0 and kind != "shards":
        pytest.skip("of other datasets, a state after an epoch's last batch is of nothing more of it")

    class Two(Recorder):
        def training_step(self, batch: Any) -> torch.Tensor:
            self.steps.append((self.current_epoch, [numbers_of(part) for part in batch]))  # type: ignore[arg-type]
            loss: torch.Tensor = self.layer(torch.ones(1, 1)).mean()
            return loss

    def run(*callbacks: Any, **resume: Any) -> list[Any]:
        module = Two()
        torch.manual_seed(0)
        here = trainer(max_epochs=3, callbacks=[*callbacks])
        here.fit(module, CombinedLoader(CYCLES[kind](shards), "max_size_cycle"), **resume)
        return module.steps

    shards, path = make_shards(tmp_path), tmp_path / "at.ckpt"
    whole = run(SaveAt(step, path))
    assert run(ckpt_path=path, weights_only=False) == whole[step:]


def test_a_state_of_other_data_is_an_error_of_the_loaders_own(tmp_path: Path) -> None:
    dataset, path = make_shards(tmp_path), tmp_path / "at.ckpt"
    steps_of(DataLoader(dataset, 4, shuffle=True), max_epochs=1, callbacks=[SaveAt(2, path)])
    with pytest.raises(ValueError, match=r"no view, and this loader has a view of samples 20 .* begin anew"):
        steps_of(DataLoader(dataset.take(20), 4, shuffle=True), resume=path)
