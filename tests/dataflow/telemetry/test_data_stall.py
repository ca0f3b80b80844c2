"""What `dataflow doctor --headspace` tells: how much faster a training would be with a perfect loader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets_kit import Make
from programs_kit import run_command
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from dataflow import DataLoader, GradSchedule
from dataflow.progress.observer import DATA_STALL
from dataflow.telemetry.timing import ROUND, VARIABLE
from dataflow.telemetry.timing.data_stall import WARM_UP, BatchStock, DataStallRecord
from dataflow.telemetry.timing.data_stall_report import data_stall_of_records, reason_without
from dataflow.telemetry.timing.loops import DataStallLoops, ReplayedBatches
from dataflow.telemetry.timing.records import LoaderTimes, StepTimes
from dataflow.tools.doctor.saved import read_data_stall

CHANGE = WARM_UP + ROUND
"""Steps with the loader's own batches, where ROUND are measured."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `dataflow doctor --headspace` wants records."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setenv(DATA_STALL, str(ROUND))
    return tmp_path


class TimedLoader:
    """A loader that takes its time, by the clock of the loop over it."""

    def __init__(self, folder: Path, *, wait_s: float, step_s: float, copy_s: float = 0.0) -> None:
        self.now, self.wait_s, self.step_s, self.copy_s = 0.0, wait_s, step_s, copy_s
        self.closed = 0
        self.folder, self.loop = folder, DataStallLoops(str(folder), self, ROUND, now=lambda: self.now)

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.now += self.wait_s
            yield CostlyBatch(self)

    def close(self) -> None:
        self.closed += 1

    def train(self, steps: int) -> DataStallRecord:
        batches = iter(ReplayedBatches(iter(self), self, self.loop))
        for _ in range(steps):
            next(batches)
            self.now += self.step_s
        del batches  # the loop is left
        [record] = read_data_stall(self.folder).records
        return record

    def __len__(self) -> int:
        return 1000


class CostlyBatch:
    """A batch that takes time to copy."""

    def __init__(self, loader: TimedLoader) -> None:
        self._loader = loader

    def __deepcopy__(self, memo: dict[int, Any]) -> CostlyBatch:
        self._loader.now += self._loader.copy_s
        return CostlyBatch(self._loader)


def test_the_gain_is_of_steps_with_the_loader_over_steps_without(tmp_path: Path) -> None:
    record = TimedLoader(tmp_path, wait_s=1.0, step_s=3.0).train(2 * CHANGE + 1)
    report = data_stall_of_records([record])
    assert report is not None
    assert (report.gain, report.live.usual, report.replayed.usual) == pytest.approx((4 / 3, 1 / 4, 1 / 3))
    assert report.verdict == "the training would be 1.33x faster with a perfect loader"
    assert (report.steps, report.waited, report.ranks) == (ROUND, 0.25, 1)


def test_copies_of_batches_cost_the_steps_nothing(tmp_path: Path) -> None:
    record = TimedLoader(tmp_path, wait_s=1.0, step_s=3.0, copy_s=100.0).train(2 * CHANGE + 1)
    assert {one.total_s for one in (*record.live, *record.replayed)} == {4.0, 3.0}
    assert record.batches == ROUND


def test_the_loader_is_closed_before_its_batches_are_replayed(tmp_path: Path) -> None:
    loader = TimedLoader(tmp_path, wait_s=1.0, step_s=3.0)
    loader.train(CHANGE)
    assert loader.closed == 0
    loader.train(CHANGE)
    assert loader.closed == 1


def test_a_loader_that_keeps_up_leaves_nothing_to_gain(tmp_path: Path) -> None:
    report = data_stall_of_records([TimedLoader(tmp_path, wait_s=0.01, step_s=3.0).train(2 * CHANGE + 1)])
    assert report is not None
    assert report.verdict == "nothing is to be gained by a faster loader: 1.00x with a perfect one"
    assert not [line for line in report.lines if "without --headspace" in line]


def step(total_s: float, wait_s: float) -> StepTimes:
    times = {"data_s": wait_s, "compute_s": total_s - wait_s, "peers_s": 0.0, "optimizer_s": 0.0}
    return StepTimes(window=0, microbatches=1, exposed_s=None, **times)


def measured(
    live: list[tuple[float, float]], replayed: float | list[float], **fields: Any
) -> DataStallRecord:
    """A record of steps (total, wait), and of replayed ones: their seconds, or those of each."""
    fast = replayed if isinstance(replayed, list) else [replayed] * len(live)
    before = [step(100.0, 50.0)] * WARM_UP
    windows = (*before, *(step(*each) for each in live), *before, *(step(each, 0.0) for each in fast))
    words = dict.fromkeys(("host", "model", "strategy", "device", "shared"), "")
    numbers = {"rank": 0, "world_size": 1, "optimizer_steps": 1, "batches": 1, "steps": len(live)}
    about: dict[str, Any] = {**words, **numbers, "windows": windows, **fields}
    return DataStallRecord(**about, loader=LoaderTimes("other"))


def test_workers_that_deliver_in_bursts_are_not_hidden_by_the_median() -> None:
    live = [(1.0, 0.0)] * 4 + [(6.0, 5.0)]
    report = data_stall_of_records([measured(live * 4, 1.0)])
    assert report is not None
    assert report.gain == pytest.approx(2.0)


def test_a_long_wait_counts_however_rare_it_is() -> None:
    report = data_stall_of_records([measured([(1.0, 0.0)] * 39 + [(41.0, 40.0)], 1.0)])
    assert report is not None
    assert report.gain == pytest.approx(2.0)
    assert [line for line in report.lines if "3 steps did most of the waiting" in line]


def test_a_rare_pause_of_the_training_is_not_the_loaders() -> None:
    report = data_stall_of_records([measured([(1.0, 0.0)] * 49 + [(60.0, 0.0)], 1.0)])
    assert report is not None
    assert report.gain == pytest.approx(1.0)


def test_a_step_takes_as_long_as_on_the_slowest_rank() -> None:
    ranks = [
        measured([(2.0, wait)] * 20, compute, rank=rank, world_size=2)
        for rank, (wait, compute) in enumerate(((0.0, 1.5), (0.5, 1.6)))
    ]
    report = data_stall_of_records(ranks)
    assert report is not None
    assert (report.gain, report.waited, report.ranks) == pytest.approx((2 / 1.6, 0.25, 2))


def test_what_is_gained_beyond_the_waiting_is_named() -> None:
    lines = [
        line
        for waits in (0.0, 1.0)
        for line in getattr(data_stall_of_records([measured([(2.0, waits)] * 20, 1.0)]), "lines", ())
        if "cores or memory bandwidth" in line
    ]
    assert len(lines) == 1


def test_waiting_that_grows_and_rounds_that_differ_are_told() -> None:
    growing = data_stall_of_records([measured([(1.0, 0.0)] * 10 + [(2.0, 1.0)] * 10, 1.0)])
    assert growing is not None
    assert [line for line in growing.lines if "waiting grew" in line]
    for replayed in ([1.0] * 20 + [3.0] * 10, [3.0] * 30):
        report = data_stall_of_records([measured([(2.0, 0.0)] * 30, replayed)])
        assert report is not None
        assert [line for line in report.lines if "rounds differ" in line]


def test_too_few_steps_are_told_with_what_cures_that() -> None:
    record = measured([(1.0, 0.0)] * 5, 1.0, steps=50, windows=(step(1.0, 0.0),) * 25)
    assert data_stall_of_records([record]) is None
    assert reason_without([record]).startswith(
        "nothing to report: 25 steps ended on rank 0, and headspace takes 140"
    )


def test_every_step_has_a_batch_of_its_own() -> None:
    stock = BatchStock()
    stock.offer({"x": torch.zeros(3), "names": ["a"]})
    stock.fill()
    stock.take()["x"].add_(1)
    stock.take()["names"].append("b")
    assert stock.take()["x"].tolist() == [0, 0, 0]
    assert stock.take()["names"] == ["a"]


def test_few_large_batches_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataflow.telemetry.timing.data_stall._STOCK_BYTES", 1000)
    stock = BatchStock()
    for _ in range(ROUND):
        stock.offer(torch.zeros(100, dtype=torch.float32))
    assert len(stock) == 2
    stock.fill()
    stock.take(), stock.take()
    assert stock.is_empty


def test_copies_of_pinned_batches_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataflow.telemetry.timing.data_stall._pinned", lambda batch: ("pinned", batch))
    plain, pinned = torch.zeros(2), torch.ones(2)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: bool(self.all()))
    for batch, copies in ([plain], False), ({"x": [pinned]}, True):
        stock = BatchStock()
        stock.offer(batch)
        stock.fill()
        assert isinstance(stock.take(), tuple) == copies


def test_batches_that_cannot_be_copied_are_shared_and_that_is_told() -> None:
    batch = (number for number in range(3))
    stock = BatchStock()
    stock.offer(batch)
    stock.fill()
    assert stock.take() is batch
    assert "generator" in stock.shared
    report = data_stall_of_records([measured([(1.0, 0.0)] * 10, 1.0, shared=stock.shared)])
    assert report is not None
    assert [line for line in report.lines if "could not be copied" in line]


def trained(loader: Any, *, epochs: int = 100) -> list[int]:
    """Batches of each epoch of a training, until it is ended."""
    counts: list[int] = []
    with pytest.raises(SystemExit, match=r"^0$"):
        train(loader, counts, epochs)
    return counts


def train(loader: Any, counts: list[int], epochs: int) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(epochs):
        counts.append(0)
        for _ in loader:
            weight.sum().backward()
            optimizer.step()
            counts[-1] += 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_training_is_ended_when_all_is_measured(folder: Path, workers: int) -> None:
    loader = DataLoader(TensorDataset(torch.arange(9.0)), batch_size=1, num_workers=workers)
    counts = trained(loader)
    assert counts == [9] * 6 + [6]
    assert sum(counts) == 2 * CHANGE
    [record] = read_data_stall(folder).records
    assert (len(record.windows), record.batches, record.ended) == (2 * CHANGE, 9 + 1, True)


def test_a_training_over_shards_has_epochs_as_long_with_replayed_batches(folder: Path, made: Make) -> None:
    with DataLoader(made("tar").open(columns=["cls"]), batch_size=3, shuffle=True) as loader:
        length = len(loader)
        counts = trained(loader)
        assert set(counts[:-1]) == {length}
        assert json.loads(json.dumps(loader.state_dict()))
        assert len(loader) == length
    assert data_stall_of_records(read_data_stall(folder).records)


@pytest.mark.full
def test_states_can_be_taken_while_batches_are_replayed(folder: Path) -> None:
    loader = DataLoader(TensorDataset(torch.arange(100.0)), batch_size=1)
    batches = iter(loader)
    for _ in range(CHANGE):
        next(batches)
    state = loader.state_dict()
    next(batches)
    assert loader.state_dict() == state


@pytest.mark.full
def test_an_epoch_of_unknown_length_goes_on_until_all_is_measured(folder: Path) -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(10**9)

    assert trained(DataLoader(Endless(), batch_size=1)) == [2 * CHANGE]
    assert sum(1 for _ in DataLoader(Endless(), batch_size=1)) == 2 * CHANGE  # that does not train, and ends


@pytest.mark.full
def test_what_only_evaluates_is_not_ended(folder: Path) -> None:
    loader = DataLoader(TensorDataset(torch.arange(100.0)), batch_size=1)
    assert [sum(1 for _ in loader) for _ in range(2)] == [100, 100]
    [record] = read_data_stall(folder).records
    assert (len(record.windows), record.ended) == (2 * CHANGE, False)


@pytest.mark.full
def test_the_loader_that_trains_is_reported(folder: Path) -> None:
    list(DataLoader(TensorDataset(torch.arange(100.0)), batch_size=1))
    trained(DataLoader(TensorDataset(torch.arange(50.0)), batch_size=1))
    saved = read_data_stall(folder)
    assert saved.records[0].ended
    assert saved.notes == ("2 loaders were looped over; this is the one whose loop steps an optimizer",)


def train_in(schedule: GradSchedule, model: nn.Module) -> None:
    with schedule:
        for _ in range(100):
            for batch in schedule:
                outputs = model(batch["cls"].float().unsqueeze(1))
                schedule.backward(outputs.sum() * schedule.scale())
                schedule.step()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_schedule_gets_replayed_batches_too(folder: Path, made: Make, accumulate: int) -> None:
    model = nn.Linear(1, 1)
    with DataLoader(made("tar").open(columns=["cls"]), batch_size=3, shuffle=True) as loader:
        schedule = GradSchedule(loader, model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate)
        with pytest.raises(SystemExit):
            train_in(schedule, model)
    [record] = read_data_stall(folder).records
    assert (len(record.windows), record.ended) == (2 * CHANGE, True)


def test_errors_of_the_loader_come_through(folder: Path) -> None:
    class Broken:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, item: int) -> int:
            raise KeyError(item)

    with pytest.raises(KeyError):
        next(iter(DataLoader(Broken(), batch_size=None)))
    code, text = run_command("doctor", "--headspace", "--folder", folder)
    assert code == 0
    assert "nothing to report: 0 steps ended on rank 0" in text


def test_a_program_that_makes_no_loader_is_told_so_and_its_exit_code_kept() -> None:
    code, text = run_command("doctor", "--headspace", "--", sys.executable, "-c", "raise SystemExit(7)")
    assert code == 7
    assert "no loop over a dataflow.DataLoader was seen" in text
    assert text.startswith("the command failed: exit code 7")


def test_options_that_do_not_go_together_are_refused() -> None:
    assert "--steps is for --headspace" in run_command("doctor", "--steps", 20, "--", "true")[1]
    code, text = run_command("doctor", "--headspace", "--trace", "t.json", "--", "true")
    assert code == 2
    assert "--headspace writes --json only" in text


SCRIPT = """\
import os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset
from dataflow import DataLoader
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(64, 1))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
for epoch in range(1000):
    for [batch] in loader:
        batch.zero_()
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
raise AssertionError("it was not ended")
"""


@pytest.mark.full
def test_headspace_of_a_training_under_torchrun_is_told_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    root, figures = str(Path(__file__).parents[3]), tmp_path / "headspace.json"
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--headspace", "--steps", "20", "--json", figures]
    command = [sys.executable, "-m", "dataflow.tools.cli", "doctor", *options, "--", *launch]
    done = subprocess.run(
        [*command, tmp_path / "train.py"], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 steps each, 20 before them left out" in done.stdout
    assert "on 2 of 2 ranks" in done.stdout
    report = json.loads(figures.read_text())
    assert (report["ranks"], report["steps"]) == (2, 20)
    assert report["verdict"] in done.stdout
