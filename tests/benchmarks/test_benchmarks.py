import dataclasses
import json
import os
import re
import tarfile
import urllib.request
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("psutil")

from click.testing import CliRunner

from benchmarks import REPOSITORY
from benchmarks.__main__ import main
from benchmarks.data import Data, Sizes, once
from benchmarks.harness import in_own_process, interleaved, medians, run_child
from benchmarks.peers.bars import verdicts
from benchmarks.peers.measured import leaves, touch
from benchmarks.peers.runs import POINT, Run
from benchmarks.peers.workloads import LIMIT, ONE_THREAD, OURS, WORKLOADS
from benchmarks.remote.slow_server import serving
from benchmarks.report import ReportSummary, command, command_line, machine, origin, save_figures
from benchmarks.runner import Tell
from benchmarks.tars import TarIndex

SMALL = Sizes(
    images=6,
    image_shards=2,
    tokens=3 * 2048 + 1,
    rows=2_000,
    row_shards=2,
    rows_per_group=500,
    records=10,
    record_shards=2,
    record_bytes=64,
)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.*")) if p.suffix != ".json"
    }


@pytest.mark.parametrize("workload", ["W2", "W3", "W4"])
def test_the_same_seed_makes_the_same_bytes_and_another_seed_others(tmp_path: Path, workload: str) -> None:
    made = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        data = Data(tmp_path / name, dataclasses.replace(SMALL, seed=seed))
        data.make(workload)
        made.append(contents(data.root))
    assert made[0] == made[1]
    assert made[0] != made[2]


def test_synthesised_images_are_the_same_from_the_same_seed_and_differ_from_each_other() -> None:
    pytest.importorskip("simplejpeg")
    from benchmarks.jpegs import _noise_image, _perturbed

    def image() -> bytes:
        rng = np.random.default_rng(3)
        return _perturbed(_noise_image(rng, 40, 50), rng).tobytes()

    rng = np.random.default_rng(3)
    pixels = _noise_image(rng, 40, 50)
    assert image() == image()
    assert _perturbed(pixels, rng).tobytes() != _perturbed(pixels, rng).tobytes()


def test_the_index_finds_in_a_tar_what_tarfile_finds(tmp_path: Path) -> None:
    data = Data(tmp_path, SMALL)
    data.make("W4")
    index = data.index("W4")
    read = []
    for path in data.files("W4"):
        with tarfile.open(path) as tar:
            read += [(tar.extractfile(m).read(), m.name) for m in tar.getmembers()]  # type: ignore[union-attr]
    records = [value for value, name in read if name.endswith(".bin")]
    labels = [int(value) for value, name in read if name.endswith(".cls")]
    found = []
    for shard, (at, size) in zip(index.shard, index.fields["bin"], strict=True):
        found.append(Path(index.paths[shard]).read_bytes()[at : at + size])
    assert found == records
    assert index.labels.tolist() == labels
    assert len(records) == SMALL.records


def test_data_is_made_anew_when_its_arguments_change(tmp_path: Path) -> None:
    calls = []

    def make(folder: Path) -> None:
        folder.mkdir()
        calls.append(folder)

    for arguments in ({"n": 1}, {"n": 1}, {"n": 2}):
        once(tmp_path / "x", make, arguments)
    assert len(calls) == 2


def test_an_interrupted_preparation_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        once(tmp_path / "x", broken, {})
    assert not (tmp_path / "x").exists()


def test_an_index_survives_moving_the_folder(tmp_path: Path) -> None:
    Data(tmp_path / "a", SMALL).make("W4")
    (tmp_path / "a").rename(tmp_path / "b")
    index = TarIndex.load(tmp_path / "b" / "W4" / "index.npz")
    assert all(Path(path).exists() for path in index.paths)


def run(name: str, rate: float, consumer: str = "plain", **figures: float | str) -> Run:
    return dataclasses.replace(Run("W2", name, 0, 1, consumer, samples_per_s=rate), **figures)


def test_runs_are_interleaved_and_a_failed_contestant_is_not_run_again() -> None:
    order: list[str] = []

    def measure(name: str) -> Run:
        order.append(name)
        return run(name, 1.0, reason="broken" if name == "b" else "")

    list(interleaved(["a", "b", "c"], 3, measure))
    assert order == ["a", "b", "c", "a", "c", "a", "c"]


def test_the_median_is_taken_figure_by_figure_within_contestant_and_consumer() -> None:
    rows = medians(
        [
            run("a", 1.0, held_mb=9.0),
            run("a", 5.0, held_mb=1.0),
            run("a", 2.0, held_mb=2.0),
            run("a", 7.0, "burn"),
            run("b", 1.0),
            run("b", 0.0, reason="broken"),
        ],
        *POINT,
    )
    assert [(r.samples_per_s, r.held_mb, r.consumer) for r in rows] == [
        (2.0, 2.0, "plain"),
        (7.0, 0.0, "burn"),
        (0.0, 0.0, "plain"),
    ]
    assert [r.reason for r in rows] == ["", "", "broken"]


def test_a_verdict_says_reached_or_by_how_much_it_is_short() -> None:
    assert ReportSummary("W1", "", 0.95, 0.95).says == "reached"
    assert ReportSummary("W1", "", 0.76, 0.95).says == "short by 20.0 %"
    assert ReportSummary("W1", "", 0.06, 0.05, at_most=True).says == "short by 20.0 %"
    assert ReportSummary("W1", "", None, 1.0).says == "not measured"


def test_bars_are_ratios_to_the_peers_of_the_same_run() -> None:
    workload = next(w for w in WORKLOADS if w.name == "W2")
    rows = [run(OURS, 700.0), run(LIMIT, 900.0), run("torch", 500.0), run(ONE_THREAD, 0.0, reason="broken")]
    measured = {v.bar: v.measured for v in verdicts(workload, rows)}
    assert measured["x torch, hand-written and mapped"] == pytest.approx(1.4)
    assert measured["of one thread's gather"] is None


def test_the_stall_bar_applies_only_where_the_pipeline_alone_is_faster_than_the_consumer() -> None:
    workload = next(w for w in WORKLOADS if w.name == "W2")
    burning = run(OURS, 1.0, "burn", burn_s=0.003, stall_share=0.02)

    def stall(batch_s: float) -> float | None:
        rows = [run(OURS, 1.0, batch_s=batch_s), burning]
        return next(v.measured for v in verdicts(workload, rows) if v.bar.startswith("stall"))

    assert stall(0.002) == 0.02
    assert stall(0.003) is None


def test_every_workload_has_bars_a_limit_and_ours() -> None:
    for workload in WORKLOADS:
        assert {LIMIT, OURS} <= {c.name for c in workload.contestants}
        assert verdicts(workload, [])


def test_samples_are_counted_by_the_labels_whatever_the_order_of_columns() -> None:
    import torch

    ragged = [b"ab", b"c"], torch.tensor([1, 2])
    assert touch(ragged) == 2
    assert touch({"x": torch.zeros(3, 4), "y": torch.zeros(3)}) == 3
    values_and_offsets = torch.zeros(9, dtype=torch.uint8), torch.tensor([0, 4, 9])
    assert touch({"cls": torch.tensor([1, 2]), "jpg": values_and_offsets}) == 2
    assert touch(5) == 5
    assert [type(leaf) for leaf in leaves(ragged)] == [bytes, bytes, torch.Tensor]


def test_the_command_explains_itself() -> None:
    assert "--quick" in CliRunner().invoke(main, ["--help"]).output


RESULTS = sorted((REPOSITORY / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_result_tells_the_command_that_made_it(path: Path) -> None:
    command = json.loads(path.read_text())["command"]
    assert re.match(r"python -m benchmarks(\.\w+)*( |$)", command)
    assert not re.search(r"(^| |=)[\"']?/", command)  # no paths of a machine


def test_a_command_is_told_without_the_paths_of_this_machine(tmp_path: Path) -> None:
    path, inside = tmp_path / "x.json", REPOSITORY / "benchmarks" / "results" / "y.json"
    given = ["--json", str(path), f"--other={inside}", "--in", "exec {}", "a/b"]
    assert command_line("benchmarks.remote.cache", given) == (
        "python -m benchmarks.remote.cache --json x.json --other=benchmarks/results/y.json --in 'exec {}' a/b"
    )


def test_saved_figures_come_with_their_command_and_read_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    figures = {"rows": [{"text": "[a, {b\n]", "numbers": [1, 2.5, None]}], "none": [], "empty": {}}
    save_figures(path, **figures)
    kept = json.loads(path.read_text())
    assert {name: kept[name] for name in figures} == figures
    assert kept["command"] == command()
    assert kept.keys() > {"date", "commit", "machine", "versions"}
    assert '"numbers": [ 1, 2.5, null ]' in path.read_text()


def test_a_function_runs_in_a_process_of_its_own() -> None:
    told = in_own_process(origin)
    assert told["machine"] == machine()
    assert "benchmarks.report:origin" in told["command"]


KIT = {"PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parent, REPOSITORY)))}


def telling_itself(name: str, tell: Tell) -> None:
    """Called by the runner."""
    print("not an event")
    tell("first", name=name, count=1)
    tell("done", count=2)
    raise RuntimeError("a loader that does not end well")


def test_events_are_merged_and_what_comes_after_the_last_one_is_nobody_s_concern() -> None:
    events, peak = run_child(telling_itself, "ours", environment=KIT)
    assert events == {"event": "done", "name": "ours", "count": 2}
    assert peak.rss_mb >= 0


def test_an_error_is_a_reason_and_ends_a_script_that_does_not_expect_one() -> None:
    with pytest.raises(RuntimeError, match=r"machine.*: TypeError"):
        in_own_process(machine, "an argument too many")


def test_the_slow_server_counts_what_comes_after_its_warm_up(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(1000))
    with serving(tmp_path, {"latency-ms": 1.0}) as server:
        server.warm_up()
        with urllib.request.urlopen(f"{server.url}/x.bin", timeout=20) as answer:
            answer.read()
        counted = server.stats()
    assert (counted["requests"], counted["bytes"]) == (1, 1000)


def test_the_search_tries_a_peer_with_and_without_torch_threads_and_ours_only_as_it_is() -> None:
    contestants = {c.name: c for c in next(w for w in WORKLOADS if w.name == "W2").contestants}
    assert [(c.workers, c.omp_threads) for c in contestants["torch"].settings][-2:] == [(3, 1), (0, None)]
    assert contestants[OURS].settings == [contestants[OURS]]
    assert contestants[OURS].environment == {}


@pytest.mark.parametrize("contestant", ["ours", "ours-uneven", "ours-exchange", "ours-full"])
def test_the_scale_benchmark_measures_a_small_dataset(contestant: str) -> None:
    from benchmarks.order.scale import measure, table

    case = {"contestant": contestant, "samples": 10**6} | measure(contestant, 10**6, num_positions=2_000)
    assert case["state_bytes"] < 1024
    assert case["plan_s"] < 1
    assert contestant in table([case])
    assert "8 GB" in table([{"contestant": "mosaic", "samples": 10**9, "reason": "more than 8 GB"}])
