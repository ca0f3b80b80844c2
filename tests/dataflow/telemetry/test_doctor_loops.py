"""What `dataflow doctor` tells of a loop over a `DataLoader` without a `GradSchedule`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets_kit import Make, make_ints_tar
from programs_kit import run_command
from torch import nn
from torch.utils.data import BatchSampler, SequentialSampler, TensorDataset

from dataflow import DataLoader, GradSchedule, Packed
from dataflow.stats import numbers_of
from dataflow.telemetry.timing import VARIABLE
from dataflow.telemetry.timing.loops import LoopRecorder
from dataflow.telemetry.timing.records import (
    LoaderTimes,
    StepRecord,
    StepTimes,
    busy_cores,
    loader_times,
    times_of,
)
from dataflow.telemetry.timing.report import Report, report_of
from dataflow.tools.doctor.saved import read_records, record_files

DATA = TensorDataset(torch.arange(12.0))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `dataflow doctor` wants records."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


class Timed:
    """A loader, its loop, and the time they take, by a clock of its own."""

    def __init__(self, folder: Path, *, wait_s: float, step_s: float) -> None:
        self.now, self.wait_s, self.step_s = 0.0, wait_s, step_s
        self.recorder = LoopRecorder(str(folder), self, now=lambda: self.now)

    def train(self, batches: int) -> None:
        loop = self.recorder.begin(self, 0, None)
        for _ in range(batches):
            asked_s, self.now = self.now, self.now + self.wait_s
            loop.batch(asked_s)
            self.now += self.step_s
        loop.end(self.now)


def reported(folder: Path) -> Report:
    return report_of(read_records(folder).records)


def test_waiting_for_batches_is_told_from_the_rest(tmp_path: Path) -> None:
    Timed(tmp_path, wait_s=3.0, step_s=1.0).train(5)
    report = reported(tmp_path)
    assert (report.windows, report.shares["data"], report.shares["compute"]) == (4, 0.75, 0.25)
    assert report.advice.verdict == "data-bound: 75% waiting for the loader"
    assert report.advice.gain == pytest.approx(4.0)
    text = str(report)
    assert "4 batches on 1 of 1 ranks, 4,000.0 ms each in the median" in text
    assert "all else" in text
    assert "optimizer  " not in text


def test_a_loop_that_does_not_wait_is_sent_on_to_a_schedule(tmp_path: Path) -> None:
    Timed(tmp_path, wait_s=0.01, step_s=1.0).train(20)
    advice = reported(tmp_path).advice
    assert advice.verdict == "not data-bound: 1% waiting for the loader"
    assert "GradSchedule(" in advice.action


def test_time_between_epochs_is_in_no_step(tmp_path: Path) -> None:
    timed = Timed(tmp_path, wait_s=1.0, step_s=1.0)
    timed.train(3)
    timed.now += 1000  # evaluation
    timed.train(3)
    [record] = read_records(tmp_path).records
    assert [(one.window, one.data_s, one.compute_s) for one in record.windows] == [
        (number, 1.0, 1.0) for number in range(6)
    ]


def test_the_rank_that_waited_longest_for_data_counts() -> None:
    """The others wait for it in their all-reduce, which a plain loop sees as computing."""
    records = [
        StepRecord(
            rank=rank,
            world_size=2,
            host="host",
            model="",
            strategy="",
            device="",
            loader=LoaderTimes("other"),
            windows=tuple(
                StepTimes(
                    window=number,
                    microbatches=1,
                    data_s=waited,
                    peers_s=0.0,
                    compute_s=10.0 - waited,
                    exposed_s=None,
                    optimizer_s=0.0,
                )
                for number in range(4)
            ),
            in_schedule=False,
        )
        for rank, waited in enumerate((0.5, 6.0))
    ]
    report = report_of(records)
    assert report.advice.verdict == "data-bound: 60% waiting for the loader, most on rank 1"
    assert report.shares["straggler"] == 0


def test_a_loader_leaves_its_record_and_what_it_knows_of_itself(folder: Path) -> None:
    loader = DataLoader(DATA, batch_size=3)
    assert [batch.tolist() for [batch] in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert len(list(loader)) == 4
    [record] = read_records(folder).records
    assert (len(record.windows), record.loader.kind, record.in_schedule) == (8, "main", False)
    assert {span.name for span in record.events} >= {"data", "batch 7"}


def test_a_loop_that_is_left_early_leaves_one_too(folder: Path) -> None:
    for number, _ in enumerate(DataLoader(DATA, batch_size=3)):
        if number == 2:
            break
    [record] = read_records(folder).records
    assert (len(record.windows), record.loader.kind) == (2, "main")


def test_a_loader_over_shards_tells_what_cures_fit_it(folder: Path, made: Make) -> None:
    shards = made("parquet").open(columns=["lst"])
    list(DataLoader(shards, batch_size=2, batching=Packed(16, column="lst")))
    [record] = read_records(folder).records
    told = record.loader
    assert (told.kind, told.store, told.batching) == ("shards", "local", "Packed")
    assert told.cores
    assert told.cores_busy is not None
    assert told.cores_busy >= 0


def test_a_page_says_of_a_loader_what_the_doctor_does(made: Make) -> None:
    with DataLoader(made("tar").open(columns=["cls"]), batch_size=1) as loader:
        list(loader)
    figures = json.loads(json.dumps(loader.stats().to_json()))
    here = loader_times(loader)
    assert here.kind == "shards"
    assert times_of("LoaderStats", figures, numbers_of(figures), cores=here.cores or 0.0) == here


def test_how_busy_a_loader_was_counts_over_all_loops_as_the_time_does(made: Make) -> None:
    with DataLoader(made("tar").open(columns=["cls"]), batch_size=1) as loader:
        list(loader)
        next(iter(loader))  # left at once: what runs ahead ends, and the next loop begins anew
        whole = loader.stats()
        next(iter(loader))
        both = loader.stats()
    assert both.elapsed_s > whole.elapsed_s
    assert both.read.tasks > whole.read.tasks
    assert both.build.tasks > whole.build.tasks
    assert both.build.busy_s > whole.build.busy_s


def test_processes_tell_how_many_cores_they_kept_busy(tmp_path: Path) -> None:
    second = os.sysconf("SC_CLK_TCK")
    (tmp_path / "uptime").write_text("200.0 1.0\n")
    for pid, busy_s in (7, 30), (8, 75):
        fields = ["S", *["0"] * 10, str(busy_s * second), str(5 * second), *["0"] * 6, str(100 * second)]
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a (strange) name) {' '.join(fields)} 0\n")
    assert busy_cores([7, 8], tmp_path) == pytest.approx((35 + 80) / 100)
    assert busy_cores([7, 9], tmp_path) is None
    assert busy_cores([], tmp_path) is None


def test_what_workers_told_is_kept_when_they_have_ended() -> None:
    loader = DataLoader(DATA, batch_size=3, num_workers=1)
    before = LoaderTimes("process", cores_busy=0.5)
    assert loader_times(loader, before).cores_busy == 0.5
    assert loader_times(loader).cores_busy is None


def test_the_loader_with_most_batches_is_reported(folder: Path) -> None:
    for batch_size in (4, 2, 6):
        list(DataLoader(DATA, batch_size=batch_size))
    saved = read_records(folder)
    assert len(saved.records[0].windows) == 6
    assert saved.notes == ("3 loaders were looped over; this is the one with most batches",)


def test_errors_and_what_the_iterator_has_besides_come_through(folder: Path) -> None:
    class Broken:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, item: int) -> int:
            if item == 1:
                raise KeyError(item)
            return item

    batches = iter(DataLoader(Broken(), batch_size=None))
    assert len(batches) == 4
    assert next(batches) == 0
    with pytest.raises(KeyError):
        next(batches)
    assert next(batches) == 2
    assert batches.num_ahead == (0, 0)


def test_where_there_is_a_schedule_it_alone_is_reported(folder: Path) -> None:
    model = nn.Linear(1, 1)
    loader = DataLoader(DATA, batch_size=3)
    with GradSchedule(loader, model, torch.optim.SGD(model.parameters()), 1) as sched:
        for [batch] in sched:
            sched.backward(model(batch[:, None]).sum())
            sched.step()
    assert len(record_files(folder)) == 1  # saving another one would be time of the schedule's windows
    list(DataLoader(DATA, batch_size=2))
    assert len(record_files(folder)) == 2
    saved = read_records(folder)
    assert saved.records[0].in_schedule
    assert saved.notes == ()


@pytest.mark.parametrize("step", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("over_shards", [True, False], ids=["shards", "map-style"])
@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in file order"])
def test_a_training_in_file_order_is_named(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, shuffle: bool, over_shards: bool, step: bool
) -> None:
    """An evaluation is in file order by right: it steps no optimizer."""
    dataset = make_ints_tar(tmp_path_factory.mktemp("ints")).open() if over_shards else DATA
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with DataLoader(dataset, 3, shuffle) as loader:
        for _ in loader:
            model(torch.ones(1, 1)).sum().backward()
            if step:
                optimizer.step()
    text = str(reported(folder))
    assert ("DataLoader(..., shuffle=True)" in text) == (step and not shuffle)


def test_a_schedule_in_file_order_is_named(folder: Path) -> None:
    model = nn.Linear(1, 1)
    for shuffle in (True, False):
        loader = DataLoader(DATA, batch_size=3, shuffle=shuffle)
        with GradSchedule(loader, model, torch.optim.SGD(model.parameters()), 1) as sched:
            for [batch] in sched:
                sched.backward(model(batch[:, None]).sum())
                sched.step()
            assert ("shuffle=True" in str(sched.report())) == (not shuffle)


def test_batches_that_a_sampler_of_the_user_s_makes_are_nobody_s_business(folder: Path) -> None:
    class Own(BatchSampler):
        pass

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    for _ in DataLoader(DATA, batch_sampler=Own(SequentialSampler(DATA), 2, False)):
        optimizer.step()
    assert "shuffle=True" not in str(reported(folder))


def test_the_loop_that_trains_is_reported_and_not_a_longer_evaluation(folder: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    for _ in DataLoader(DATA, batch_size=3, shuffle=True):
        optimizer.step()
    list(DataLoader(DATA, batch_size=1))
    saved = read_records(folder)
    assert (len(saved.records[0].windows), saved.records[0].optimizer_steps) == (4, 4)
    assert saved.notes == ("2 loaders were looped over; this is the one whose loop steps an optimizer",)


def test_nobody_is_watched_where_nobody_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("DATAFLOW_LIVE", "0")
    loader = DataLoader(DATA)
    batches: Any = iter(loader)
    assert batches.observer is None
    assert loader._drop_in.observer is None


PLAIN = """
import torch
from dataflow import DataLoader
for batch in DataLoader(torch.arange(60.0), batch_size=2):
    batch.sum()
"""


def test_the_command_reports_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    page = tmp_path / "page.html"
    code, text = run_command("doctor", "--html", page, "--", sys.executable, "-c", PLAIN)
    assert code == 0
    assert "29 batches on 1 of 1 ranks" in text
    assert "all else" in page.read_text()
