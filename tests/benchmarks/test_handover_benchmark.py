import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

pytest.importorskip("psutil")

from benchmarks.handover import feeds
from benchmarks.handover.bars import FIGURES, loss, medians, table, verdict_table, verdicts
from benchmarks.handover.compare import Results, parse, points, said
from benchmarks.handover.loaders import LOADERS
from benchmarks.handover.measured import MEASURES, is_shared_memory


def run(case: str, loader: str, workers: int = 2, variant: str = "", **figures: float) -> dict[str, Any]:
    place = {"case": case, "loader": loader, "workers": workers, "variant": variant}
    return place | {"figures": figures, "reason": ""}


def measured(*runs: dict[str, Any]) -> dict[str, tuple[float | None, str]]:
    return {f"{v.workload} {v.bar}": (v.measured, v.says) for v in verdicts(medians(runs))}


def test_a_bar_is_a_ratio_of_medians_to_torch_with_the_same_workers() -> None:
    theirs = [run("large", "torch", batches_per_s=rate) for rate in (100.0, 10.0, 1000.0)]
    held = measured(
        *theirs, run("large", "ours", batches_per_s=190.0), run("large", "grain", batches_per_s=9)
    )
    assert held["large x torch's batches/s"] == (pytest.approx(1.9), "short by 5.0 %")
    assert held["many x torch's batches/s"] == (None, "not measured")


def test_our_default_start_is_held_to_torch_with_spawn_and_fork_to_fork() -> None:
    held = measured(
        run("startup", "torch", 8, "fork", first_batch_ms=100),
        run("startup", "torch", 8, "spawn", first_batch_ms=1000),
        run("startup", "ours", 8, "fork", first_batch_ms=110),
        run("startup", "ours", 8, "default", first_batch_ms=400),
        run("startup", "ours", 8, "spawn", first_batch_ms=1),
    )
    assert held["startup x torch, both with fork, 8 workers"] == (pytest.approx(1.1), "reached")
    shown = held["startup x torch with spawn, ours by default, 8 workers"]
    assert shown == (pytest.approx(0.4), "short by 33.3 %")


def test_a_first_batch_with_a_model_in_between_and_later_loaders_are_held_to_torch() -> None:
    held = measured(
        run("first", "torch", 2, "model", from_making_ms=1200, later_loader_ms=30),
        run("first", "ours", 2, "model", from_making_ms=1500, later_loader_ms=39),
        run("first", "ours", 2, "threads", from_making_ms=9000, later_loader_ms=1),
    )
    shown = held["first x torch, a model built in between, 2 workers"]
    assert shown == (pytest.approx(1.25), "reached")
    assert held["first x torch, later loaders, 2 workers"] == (pytest.approx(1.3), "short by 8.3 %")
    assert held["first x torch, later loaders, 8 workers"] == (None, "not measured")


@pytest.mark.parametrize(("most", "says"), [(7, "reached"), (157, "short by 150")])
def test_descriptors_must_not_grow_with_the_number_of_tensors(most: int, says: str) -> None:
    few = run("descriptors", "ours", 2, "50", descriptors=7, shared_objects=1)
    many = run("descriptors", "ours", 2, "200", descriptors=most, shared_objects=2)
    held = measured(few, many)
    assert held["descriptors more for 200 tensors than for 50"] == (most - 7, says)
    assert held["descriptors shared-memory objects"] == (2, "short by 100.0 %")


def test_delays_cost_what_is_missing_from_the_rate_without_them() -> None:
    plain = run("delay", "ours", 4, "plain", batches_per_s=100.0)
    rows = medians([plain, run("delay", "ours", 4, "delayed", batches_per_s=94.0)])
    assert loss(rows, "ours", 4) == pytest.approx(0.06)
    assert loss(rows, "ours", 8) is None
    assert "6.0 %" in table("delay", rows)


def test_a_run_that_failed_has_no_part_in_the_medians() -> None:
    failed = run("tiny", "grain") | {"reason": "no"}
    rows = medians([failed, run("tiny", "grain", batches_per_s=5.0)])
    assert rows == {("tiny", "grain", 2, ""): {"batches_per_s": 5.0, "runs": 1, "disturbed_runs": 0}}
    assert medians([failed]) == {}


def test_a_run_is_told_in_one_line_with_what_disturbed_it_where_that_is_known() -> None:
    assert said(run("memory", "ours", 8, held_mb=1.0, pss_mb=2.0)) == "memory ours 8: held_mb 1, pss_mb 2"
    assert said(run("memory", "spdl", 8, held_mb=1.0)) == "memory spdl 8: held_mb 1"
    noisy = run("tiny", "ours", batches_per_s=5.0, cpu_ms_per_batch=1.0, others_cores=0.5)
    assert said(noisy).endswith("(disturbed: others used 0.50 cores)")
    assert said(noisy | {"reason": "no such thing"}) == "tiny ours 2: not measured: no such thing"


def test_disturbed_runs_count_only_where_a_point_has_no_others() -> None:
    noisy = run("turn", "torch", 8, "anew", second_epoch_ms=900.0, others_cores=0.5)
    quiet = run("turn", "torch", 8, "anew", second_epoch_ms=400.0, others_cores=0.05)
    key = ("turn", "torch", 8, "anew")
    assert medians([noisy, quiet, noisy])[key]["second_epoch_ms"] == 400.0
    assert medians([noisy, quiet, noisy])[key]["disturbed_runs"] == 0
    assert medians([noisy])[key]["disturbed_runs"] == 1


def test_tables_show_each_loader_beside_torch() -> None:
    both = [
        run("many", name, batches_per_s=r, cpu_ms_per_batch=1.0) for name, r in (("torch", 20), ("ours", 50))
    ]
    assert "| ours | 2 | 50 | 2.5 | 1 |" in table("many", medians(both)).splitlines()
    assert table("tiny", medians(both)) == ""
    lines = verdict_table(verdicts({})).splitlines()
    assert len(lines) == 2 + len(verdicts({}))


@pytest.mark.parametrize("case", MEASURES)
def test_each_case_is_measured_for_torch_and_every_point_can_be_compared(case: str) -> None:
    assert case in FIGURES
    theirs = {(p.workers, p.variant) for p in points(case, "torch")}
    assert theirs
    ours = {(p.workers, p.variant) for p in points(case, "ours")}
    assert theirs - {(n, "forkserver") for n in (2, 8)} <= ours


def test_arguments_choose_cases_and_loaders_and_wrong_ones_are_named(capsys: Any) -> None:
    chosen = parse(["--cases", "many", "tiny", "--loaders", "grain", "--repeats", "1", "--seconds", "0.5"])
    assert (chosen.cases, chosen.loaders) == (["many", "tiny"], ["grain"])
    assert (chosen.repeats, chosen.seconds, chosen.json) == (1, 0.5, None)
    assert parse([]).cases == list(MEASURES)
    assert parse([]).loaders == list(LOADERS)
    for wrong in (["--cases", "fast"], ["--repeats", "-1"], ["--seconds", "0"], ["--repeats", "0"]):
        with pytest.raises(SystemExit):
            parse(wrong)
        assert wrong[1] in capsys.readouterr().err


def test_a_file_gathers_the_runs_of_sessions_with_the_same_settings_only(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    for rate in (1.0, 3.0):
        results = Results(path, {"timed_s": 1.5})
        results.runs.append(run("large", "torch", batches_per_s=rate))
        results.save("now")
    kept = json.loads(path.read_text())
    assert [m["batches_per_s"] for m in kept["medians"]] == [2.0]
    assert len(kept["sessions"]) == 2
    with pytest.raises(SystemExit, match="name another file"):
        Results(path, {"timed_s": 5.0})


@pytest.mark.parametrize(
    "feed", [feeds.images(1), feeds.fields(3), feeds.scalars(), feeds.tokens(), feeds.waits(delayed=True)]
)
def test_a_feed_delivers_what_it_says(feed: feeds.Feed) -> None:
    batch = feeds.Fetch(feed)(range(feed.batch_size))
    assert feeds.described(batch) == feed.delivers
    tensors = list(batch.values()) if isinstance(batch, dict) else [batch]
    assert sum(t.numel() * t.element_size() for t in tensors) == feed.batch_bytes


def test_one_sample_in_a_hundred_is_delayed_evenly() -> None:
    late = [i for i in range(100_000) if feeds.is_delayed(i)]
    gaps = {b - a for a, b in itertools.pairwise(late)}
    assert abs(len(late) - 1_000) <= 1
    assert len(gaps) > 1
    assert max(gaps) < 300


def test_token_windows_are_those_of_the_array() -> None:
    dataset = feeds.tokens().dataset
    window = dataset[3]
    start = 3 * 7919 % (feeds.TOKENS // feeds.STEP - 1) * feeds.STEP
    assert window.tolist() == [n % 65536 for n in range(start, start + feeds.WINDOW)]
    assert torch.equal(dataset.__getitems__([1, 3])[1], window)
    assert torch.equal(default_collate([window])[0], window)


def test_shared_memory_is_told_from_semaphores_and_files() -> None:
    assert is_shared_memory("/dev/shm/torch_1_2_3 (deleted)")
    assert is_shared_memory("/memfd:arena (deleted)")
    assert not is_shared_memory("/dev/shm/sem.mp-x (deleted)")
    assert not is_shared_memory("/usr/lib/libc.so")


@pytest.mark.full
def test_the_command_explains_itself() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "benchmarks.handover.compare", "--help"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=True,
    ).stdout
    assert all(word in shown for word in (*MEASURES, *LOADERS))
