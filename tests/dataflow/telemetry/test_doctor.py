"""Reports of running schedules, and `dataflow doctor` over a small training."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs_kit import run_command
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dataflow import DataLoader, GradSchedule
from dataflow.telemetry.timing import VARIABLE
from dataflow.telemetry.timing.phases import PhaseLedger
from dataflow.telemetry.timing.report import Report
from dataflow.testing import run_ranks
from dataflow.tools.doctor.saved import read_records

FAST: Any = {"start_method": "forkserver"}


class Clock:
    """Time is what the test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedLoader:
    """Each batch takes some time of the clock."""

    def __init__(self, clock: Clock, seconds: float, batches: int) -> None:
        self.clock, self.seconds, self.batches = clock, seconds, batches

    def __iter__(self) -> Any:
        for _ in range(self.batches):
            self.clock.now += self.seconds
            yield torch.ones(2, 4)


def train(*, data_s: float, compute_s: float, trace: str | None = None) -> Report:
    """Windows of two microbatches on a clock of our own, on all ranks there are."""
    clock = Clock()
    ledger = PhaseLedger(clock)
    model: nn.Module = nn.Linear(4, 1)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradSchedule(
        TimedLoader(clock, data_s, 8), model, optimizer, 2, ledger=ledger, timeout_s=20
    ) as sched:
        for batch in sched:
            loss = model(batch).sum() * sched.scale()
            clock.now += compute_s
            sched.backward(loss)
            sched.step()
        return sched.report(all_ranks=dist.is_initialized(), trace=trace)


def test_waiting_for_the_loader_is_told_from_computing(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    report = train(data_s=1.0, compute_s=4.0, trace=str(trace))
    assert report.bound == "data"
    assert report.windows == 3
    # Batches of the window after the last are not waited for: 2 of 3 windows wait.
    assert report.shares["data"] == pytest.approx(4 / (4 + 24))
    assert report.advice.gain == pytest.approx(28 / 24)
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"}
    assert {"window 3", "compute", "step", "data"} <= names


def two_speeds() -> tuple[str, int, str, float]:
    report = train(data_s=0.0, compute_s=[1.0, 3.0][dist.get_rank()])
    text = str(report)
    return report.bound, report.critical_rank, text, report.shares["straggler"]


def test_the_slow_rank_is_named_on_all_ranks() -> None:
    for bound, critical, text, share in run_ranks(two_speeds, 2, timeout_s=40, **FAST):
        assert (bound, critical) == ("straggler", 1)
        assert "straggler-bound: 67% waiting for the slowest rank, rank 1" in text
        assert share == pytest.approx(2 / 3, rel=1e-3)


def exposed_of_big_gradients() -> float:
    model = DistributedDataParallel(nn.Linear(1000, 1000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradSchedule([torch.ones(1, 1000)] * 6, model, optimizer, 1, timeout_s=20) as sched:
        for batch in sched:
            sched.backward(model(batch).sum() * sched.scale())
            sched.step()
        report = sched.report()
    [own] = report.ranks
    assert own.rank == dist.get_rank()
    return own.seconds["exposed_s"].p50


def test_communication_that_nothing_hides_is_measured_by_ddp() -> None:
    """One layer, one bucket: 4 MB leave when the backward pass has nothing left to compute."""
    assert all(seconds > 0 for seconds in run_ranks(exposed_of_big_gradients, 2, timeout_s=40, **FAST))


def test_a_long_loop_saves_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    model = nn.Linear(4, 1)
    sched = GradSchedule([torch.ones(2, 4)] * 60, model, torch.optim.SGD(model.parameters()), 1)
    for number, batch in enumerate(sched):
        assert bool(list(tmp_path.iterdir())) == (number >= 50)
        sched.backward(model(batch).sum())
        sched.step()
    assert len(read_records(tmp_path).records[0].windows) == 60


def test_a_record_that_cannot_be_saved_only_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "not there"))
    with pytest.warns(UserWarning, match="could not be saved"):
        assert train(data_s=0.0, compute_s=1.0).windows == 3


# ---- the command --------------------------------------------------------------------------------


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from dataflow import DataLoader, GradSchedule

def main():  # so that no global keeps the model beyond its group: "The end of a program" in the guide
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(4, 1))
    sched = GradSchedule([torch.ones(2, 4)] * 6, model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    for batch in sched:
        sched.backward(model(batch).sum() * sched.scale())
        sched.step()
    dist.destroy_process_group()

main()
"""


def test_doctor_runs_a_training_under_torchrun_and_compares_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    for name, value in (
        ("PYTHONPATH", str(Path(__file__).parents[3])),
        ("OMP_NUM_THREADS", "1"),
        ("GLOO_SOCKET_IFNAME", "lo"),
    ):
        monkeypatch.setenv(name, value)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    page, trace, figures = (tmp_path / name for name in ("report.html", "trace.json", "report.json"))
    options = ["--html", page, "--trace", trace, "--json", figures]
    code, text = run_command("doctor", *options, "--", *launch, tmp_path / "train.py")
    assert code == 0, text
    assert "-bound: " in text
    found = json.loads(figures.read_text())
    assert (found["world_size"], found["windows"], len(found["ranks"])) == (2, 2, 2)
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == {0, 1}
    assert "<svg" in page.read_text()


def test_a_program_without_a_schedule_is_told_what_to_do_and_its_exit_code_kept() -> None:
    code, text = run_command("doctor", "--", sys.executable, "-c", "raise SystemExit(7)")
    assert code == 7
    assert "nothing to report" in text
    assert "`from dataflow import DataLoader` in place of torch's" in text


def test_what_a_program_prints_does_not_mix_with_the_json(capfd: pytest.CaptureFixture[str]) -> None:
    program = [sys.executable, "-c", "print('step 1')"]
    assert run_command("doctor", "--json", "-", "--", *program)[0] == 0
    assert capfd.readouterr() == ("", "step 1\n")
    assert run_command("doctor", "--", *program)[0] == 0
    assert capfd.readouterr() == ("step 1\n", "")


def test_a_schedule_without_a_window_is_told_from_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters())
    assert list(GradSchedule([], model, optimizer)) == []
    for batch in DataLoader(TensorDataset(torch.ones(4, 4))):
        del batch  # a loop without a schedule is reported where the schedule has no window
        break
    code, text = run_command("doctor", "--folder", tmp_path)
    assert code == 0
    assert "a GradSchedule was seen on rank 0, but none of its windows has ended" in text
    assert "no loop" not in text
    list(DataLoader(TensorDataset(torch.ones(4, 4))))
    assert len(read_records(tmp_path).records[0].windows) == 4


def test_a_loop_without_a_step_is_told_from_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert list(DataLoader(TensorDataset(torch.ones(0, 4)))) == []
    assert "was seen on rank 0, but no step of it has ended" in run_command("doctor", "--folder", tmp_path)[1]


def test_a_command_that_does_not_exist_is_one_line() -> None:
    code, text = run_command("doctor", "--", "no-such-command-here")
    assert code == 1
    assert text.startswith("Error: ")
    assert "no-such-command-here" in text


def test_without_a_command_and_a_folder_the_usage_is_shown() -> None:
    assert run_command("doctor")[0] == 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a run of one process left."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    train(data_s=0.0, compute_s=1.0)
    return tmp_path


def test_broken_and_missing_records_are_named_and_the_others_reported(folder: Path) -> None:
    [path] = folder.iterdir()
    kept = json.loads(path.read_text())
    path.write_text(json.dumps(kept | {"world_size": 3}))
    path.with_name(path.name.replace("000000-", "000001-")).write_text('{"rank"')
    code, text = run_command("doctor", "--folder", folder)
    assert code == 0
    assert "compute-bound" in text
    assert "could not be read" in text
    assert "2 of 3 ranks left no record (there are: 0)" in text


def test_files_of_others_in_the_folder_are_left_alone(folder: Path) -> None:
    (folder / "my-config.json").write_text("{}")
    code, text = run_command("doctor", "--folder", folder, "--", sys.executable, "-c", "pass")
    assert code == 0
    assert "my-config" not in text
    assert [path.name for path in folder.iterdir()] == ["my-config.json"], (
        "an earlier run's records are removed"
    )


def test_the_schedule_with_most_windows_is_reported(folder: Path) -> None:
    [path] = folder.iterdir()
    kept = json.loads(path.read_text())
    path.with_name("000000-999.json").write_text(json.dumps(kept | {"windows": kept["windows"][:1]}))
    saved = read_records(folder)
    assert len(saved.records[0].windows) == 4
    assert saved.notes == ("2 schedules were made; this is the one with most windows",)


def test_without_the_variable_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    train(data_s=0.0, compute_s=1.0)
    assert not list(tmp_path.iterdir())
