"""The examples with other people's packages print what their page shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs_kit import ROOT, printed_on

PAGE = "docs/guide/frameworks.md"
NEEDS = {"lightning_resume": "lightning", "trainer_resume": "transformers", "accelerate_resume": "accelerate"}


def all_lines(script: str, folder: Path) -> str:
    """What an example prints, in a folder of its own."""
    search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": search_path, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{script}.py")],
        cwd=folder,
        env={**os.environ, **environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def last_line(script: str, folder: Path) -> str:
    """What an example prints at last."""
    return all_lines(script, folder).splitlines(keepends=True)[-1]


def test_a_script_that_streams_with_datasets_sees_what_the_one_without_does(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    environment = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    before, after = (
        subprocess.run(
            [sys.executable, str(ROOT / "examples" / f"{script}.py")],
            cwd=tmp_path,
            env={**os.environ, **environment, "HF_HOME": str(tmp_path / "hub")},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        ).stdout
        for script in ("from_hf_streaming_plain", "from_hf_streaming")
    )
    assert before == after


@pytest.mark.parametrize("script", NEEDS)
def test_a_framework_resumes_inside_an_epoch_as_its_page_shows(script: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS[script])
    assert last_line(script, tmp_path) == printed_on(PAGE, "lightning_resume")


def test_a_table_that_grows_goes_on_at_its_version_as_the_page_shows(tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    assert all_lines("delta_table", tmp_path) == printed_on("docs/guide/tables.md", "delta_table")


def test_a_lance_table_resumes_inside_an_epoch(tmp_path: Path) -> None:
    pytest.importorskip("lance")
    assert last_line("lance_table", tmp_path) == "version 1: 400 rows, resumed after 160: True\n"


def test_a_batch_of_a_lance_table_is_one_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lance = pytest.importorskip("lance")
    import pyarrow as pa

    from dataflow import DataLoader

    monkeypatch.syspath_prepend(ROOT / "examples")
    from lance_table import LanceTable

    uri = str(tmp_path / "rows.lance")
    lance.write_dataset(pa.table({"x": range(40)}), uri)
    taken = []
    monkeypatch.setattr(
        LanceTable,
        "__getitems__",
        lambda self, indices, own=LanceTable.__getitems__: taken.append(len(indices)) or own(self, indices),
    )
    with DataLoader(LanceTable(uri), batch_size=16, shuffle=True) as loader:
        assert sorted(x for batch in loader for x in batch["x"].tolist()) == list(range(40))
    assert taken == [16, 16, 8]


def test_figures_of_a_loader_are_scalars_of_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert last_line("log_figures", tmp_path) == "64 steps, figures of 4 intervals in runs/\n"
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    scalars = set(events.Tags()["scalars"])
    assert scalars >= {"loss", "loader/stall_share", "loader/samples_per_s", "loader/ready_batches"}
    waiting = events.Scalars("loader/stall_share")
    assert [event.step for event in waiting] == [16, 32, 48, 64]
    assert all(0 <= event.value <= 1 for event in waiting)
