"""What measured windows say: pure functions, from seconds that the test gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dataflow.telemetry.timing.diagnosis import Diagnosis, diagnose
from dataflow.telemetry.timing.records import LoaderTimes, StepRecord, StepTimes, TraceEvent
from dataflow.telemetry.timing.report import report_of, trace_of
from dataflow.telemetry.timing.shares import PARTS, rank_parts, same_steps, shares_of

LOADER = LoaderTimes("shards", 0.5, read_busy=0.9, build_busy=0.2)


def window(number: int = 0, **seconds: Any) -> StepTimes:
    zero = {"data_s": 0.0, "peers_s": 0.0, "compute_s": 6.0, "exposed_s": 0.0, "optimizer_s": 0.0}
    return StepTimes(window=number, microbatches=4, **{**zero, **seconds})


def record(rank: int, windows: list[StepTimes], world_size: int = 2, **about: Any) -> StepRecord:
    kept: dict[str, Any] = {
        "host": f"node{rank}",
        "model": "DDP",
        "strategy": "all-reduce",
        "device": "cpu",
        "loader": LOADER,
    }
    return StepRecord(rank=rank, world_size=world_size, windows=tuple(windows), **{**kept, **about})


def diagnosis(records: list[StepRecord], rows: list[list[StepTimes]]) -> Diagnosis:
    return diagnose(shares_of(rows), records)


@pytest.mark.parametrize(
    ("seconds", "bound", "gain"),
    [
        ({"compute_s": 6.0, "exposed_s": 4.0}, "network", 10 / 6),
        ({"compute_s": 7.5, "data_s": 2.5}, "data", 10 / 7.5),
        ({"compute_s": 8.0, "optimizer_s": 2.0}, "optimizer", 10 / 8),
        ({"compute_s": 9.8, "data_s": 0.1, "exposed_s": 0.1}, "compute", None),
    ],
)
def test_the_part_whose_cure_gains_most_is_the_bound(seconds: Any, bound: str, gain: float | None) -> None:
    found = shares_of([(window(**seconds),)])
    assert found.bound == bound
    if gain is not None:
        assert found.gains[found.bound] == pytest.approx(gain)
    assert sum(found.share(part) for part in PARTS) == pytest.approx(1)


def test_half_the_bytes_gain_half_of_what_is_exposed() -> None:
    windows = [window(compute_s=6.3, exposed_s=3.7)]
    advice = diagnosis([record(0, windows), record(1, windows)], [windows, windows])
    assert advice.verdict == "network-bound: 37% exposed"
    assert "16 bits" in advice.action
    assert advice.gain == pytest.approx(10 / (10 - 3.7 / 2))


def test_a_slow_rank_is_named_and_others_wait_for_it() -> None:
    rows = [(window(exposed_s=4.5), window(compute_s=10.0, exposed_s=0.5)) for _ in range(3)]
    found = shares_of(rows)
    assert (found.bound, found.critical, found.critical_share) == ("straggler", 1, 1.0)
    assert found.gains["straggler"] == pytest.approx(10.5 / 6.5)
    assert rank_parts(rows, 0)["straggler"] == pytest.approx(3 * 4.0)
    assert rank_parts(rows, 0)["network"] == pytest.approx(3 * 0.5)
    assert rank_parts(rows, 1)["straggler"] == 0
    report = report_of(
        [record(rank, [replace(row[rank], window=n) for n, row in enumerate(rows)]) for rank in (0, 1)]
    )
    assert report.critical_rank == 1
    assert "rank 1 on node1 in 100% of the windows" in report.advice.verdict


@pytest.mark.parametrize(
    ("loader", "named", "not_named"),
    [
        (LOADER, "batching=TokenBudget(...) or Packed(...)", "already"),
        (replace(LOADER, batching="Bucketed"), "batching=TokenBudget(...) or Packed(...)", "already"),
        (replace(LOADER, batching="Packed"), "already (Packed)", "batching="),
        (replace(LOADER, batching="TokenBudget"), "already (TokenBudget)", "batching="),
        (LoaderTimes("process", 0.1), "batch_sampler=", "batching="),
    ],
)
def test_ranks_that_take_turns_are_told_to_share_the_work_evenly(
    loader: LoaderTimes, named: str, not_named: str
) -> None:
    slow, fast = {"compute_s": 10.0}, {"compute_s": 6.0, "exposed_s": 4.0}
    both = ([window(n, **(slow if n % 2 == rank else fast)) for n in range(7)] for rank in (0, 1))
    report = report_of([record(rank, windows, loader=loader) for rank, windows in enumerate(both)])
    assert report.bound == "straggler"
    assert "take turns" in report.advice.verdict
    assert named in report.advice.action
    assert not_named not in report.advice.action
    assert "longer windows" in report.advice.action


def test_a_rank_that_waits_for_its_loader_is_a_matter_of_data() -> None:
    fast = [window(n, exposed_s=4.0) for n in range(3)]
    late = [window(n, data_s=4.0) for n in range(3)]
    report = report_of([record(0, fast), record(1, late)])
    assert report.advice.verdict == "data-bound: 40% waiting for the loader, most on rank 1"
    assert report.advice.gain == pytest.approx(10 / 6)


@pytest.mark.parametrize(
    ("loader", "word"),
    [
        (LoaderTimes("main", 0.9), "num_workers"),
        (LoaderTimes("process", 0.9), "more workers"),
        (LoaderTimes("other"), "fetch ahead"),
        (replace(LoaderTimes("process", 0.9), cores=2.0, cores_busy=0.9), "cheaper items, or more cores"),
        (LOADER, "faster or nearer store"),
        (replace(LOADER, store="local"), "faster disk"),
        (replace(LOADER, store="remote"), "cache="),
        (replace(LOADER, store="cached"), "larger or faster cache"),
        (replace(LOADER, build_busy=0.95), "num_workers="),
        (replace(LOADER, build_busy=0.95, cores_busy=0.97), "cheaper decoding or transforms, or more cores:"),
        (replace(LOADER, read_busy=0.3, memory_held=0.95), "a larger memory_limit="),
        (LoaderTimes("shards", 0.9, builders="main"), "make batches beside the training"),
    ],
)
def test_the_cure_of_a_data_wait_follows_from_what_the_loader_says(loader: LoaderTimes, word: str) -> None:
    windows = [window(data_s=4.0)]
    assert word in diagnosis([record(0, windows, 1, loader=loader)], [windows]).action


ASLEEP: dict[str, Any] = {"read_busy": 0.0, "build_busy": 0.98, "num_builders": 2, "memory_held": 0.08}
"""Builders whose transform sleeps: busy, without a core, far below the memory limit."""


@pytest.mark.parametrize("builders", ["process", "thread"])
@pytest.mark.parametrize(
    ("figures", "begins", "figure"),
    [
        ({"build_cores": 0.1}, "more workers (num_workers=, there are 2)", "0.1 of 2 cores busy"),
        ({"build_cores": 1.9, "cores_busy": 0.95}, "cheaper decoding or transforms, or more cores", "98%"),
        ({"build_cores": 0.1, "build_busy": 0.2}, "`dataflow bench loader`", "at most 8% of memory_limit="),
        ({"build_busy": 0.2, "memory_held": 0.9}, "a larger memory_limit=", "at most 90% of memory_limit="),
        (
            {"build_busy": 0.25, "few_chunks": 0.8},
            "fewer workers (num_workers=), smaller batches, or longer epochs",
            "of 2 that build 0.5 were at work",
        ),
        ({"build_busy": 0.25, "few_chunks": 0.1}, "`dataflow bench loader`", "25%"),
        ({"read_busy": 0.99, "build_busy": 0.2, "store": "local"}, "a faster disk", "read were busy 99%"),
    ],
)
def test_what_is_advised_stands_on_the_figures_beside_it(
    builders: str, figures: dict[str, Any], begins: str, figure: str
) -> None:
    loader = LoaderTimes("shards", 0.9, builders=builders, cores=2.0, **(ASLEEP | figures))
    windows = [window(data_s=4.0)]
    action = diagnosis([record(0, windows, 1, loader=loader)], [windows]).action
    assert action.startswith(begins)
    assert figure in action
    assert ("the 2 processes that decode" in action) == (builders == "process")


def test_threads_that_share_one_core_are_to_be_processes_and_processes_are_to_be_more() -> None:
    windows = [window(data_s=4.0)]
    locked = LoaderTimes("shards", 0.9, builders="thread", cores=4.0, **(ASLEEP | {"build_cores": 1.02}))
    advice = diagnosis([record(0, windows, 1, loader=locked)], [windows])
    assert advice.action.startswith('processes in place of threads (without workers="thread")')
    elsewhere = replace(locked, builders="process")
    advice = diagnosis([record(0, windows, 1, loader=elsewhere)], [windows])
    assert advice.action.startswith("more workers")


@pytest.mark.parametrize(
    ("about", "verdict"),
    [
        ({"in_schedule": False, "device": ""}, "not data-bound"),
        ({"device": "cpu"}, "compute-bound"),
    ],
)
def test_a_loader_that_takes_the_cores_of_the_training_is_named_though_nobody_waits_for_it(
    about: Any, verdict: str
) -> None:
    windows = [window(compute_s=9.8, data_s=0.2)]
    busy = replace(LOADER, cores_busy=0.78, cores=2.0)
    advice = diagnosis([record(0, windows, 1, loader=busy, **about)], [windows])
    assert advice.verdict == (
        "decoding takes the cores: 78% of this rank's 2 are busy making batches, 2% waiting for the loader"
    )
    assert "cheaper decoding or transforms" in advice.action
    assert "GradSchedule" not in advice.action
    idle = replace(LOADER, cores_busy=0.3, cores=2.0)
    advice = diagnosis([record(0, windows, 1, loader=idle, **about)], [windows])
    assert advice.verdict.startswith(verdict)


def test_on_a_device_of_its_own_computing_does_not_compete_with_decoding() -> None:
    windows = [window(compute_s=9.8, data_s=0.2)]
    busy = replace(LOADER, cores_busy=0.78, cores=2.0)
    advice = diagnosis([record(0, windows, 1, loader=busy, device="cuda")], [windows])
    assert advice.verdict.startswith("compute-bound")


def test_one_rank_of_many_does_not_call_waiting_for_the_others_network() -> None:
    report = report_of([record(0, [window(exposed_s=4.0)], world_size=8)])
    assert "compare the ranks" in report.advice.action
    assert report.notes[0].startswith("of rank 0 only")


def test_the_first_window_and_windows_that_were_not_measured_are_left_out() -> None:
    windows = [window(0), window(1, exposed_s=None), window(2), window(3)]
    rows = same_steps([windows, windows[:3]])
    assert [row[0].window for row in rows] == [2]
    unmeasured = [window(n, exposed_s=None) for n in range(3)]
    assert len(same_steps([unmeasured])) == 2
    assert "not told apart" in report_of([record(0, unmeasured, 1)]).notes[0]


def test_without_windows_there_is_no_report() -> None:
    with pytest.raises(ValueError, match="no window has ended"):
        report_of([record(0, [])])


def test_seconds_of_zero_divide_nothing() -> None:
    report = report_of([record(0, [window(compute_s=0.0)], 1)])
    assert report.bound == "compute"
    assert "compute-bound" in str(report)


def test_a_record_survives_its_file_and_another_value_is_refused(tmp_path: Path) -> None:
    kept = record(1, [window(3)], events=(TraceEvent("wait", "data", 1.0, 2.0),))
    kept.save(path := tmp_path / "record.json")
    assert StepRecord.read(path) == kept
    path.write_text('{"rank": 0}')
    with pytest.raises(ValueError, match="not a record"):
        StepRecord.read(path)


OLDER = """{"rank": 1, "world_size": 2, "host": "a", "model": "", "strategy": "", "device": "",
"loader": {"kind": "process", "stall_share": 0.5, "read_busy": null, "builders": "", "cores": 2.0},
"windows": [{"window": 3, "microbatches": 1, "data_s": 0.5, "peers_s": 0.0, "compute_s": 1.5,
"exposed_s": null, "optimizer_s": 0.0}], "events": [], "in_schedule": false, "optimizer_steps": 1}"""
"""A record as releases wrote it whose loaders said less."""


def test_a_file_of_an_older_release_is_read_and_what_a_later_one_adds_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for text in (OLDER, OLDER.replace('"kind"', '"later": [1], "kind"')):
        path.write_text(text)
        found = StepRecord.read(path)
        assert (found.loader, found.rank) == (LoaderTimes("process", 0.5, cores=2.0), 1)
        assert found.windows == (StepTimes(window=3, microbatches=1, data_s=0.5, compute_s=1.5),)


def test_events_become_a_chrome_trace_with_a_process_a_rank() -> None:
    trace = trace_of(
        {0: [TraceEvent("phase", "compute", 100.0, 100.5)], 1: [TraceEvent("wait", "data", 100.25, 101.0)]}
    )
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events] == [
        (0, 1, "compute", 0.0, 5e5),
        (1, 2, "data", 2.5e5, 7.5e5),
    ]
