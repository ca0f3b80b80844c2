"""Helps and reports as whole texts, which lie in tests/fixtures/texts: a change of them is read as a diff.

    DATAFLOW_STORE_TEXTS=1 pytest tests/dataflow/tools/test_stored_texts.py

writes them anew.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from programs_kit import ROOT, run_command
from rich.console import Console
from test_cli_help import COMMANDS
from test_costs import ASKED
from test_top import record as page_after, text_of, views
from test_verdicts import case, compared, inspected, loading, planned, storage

from dataflow.telemetry.timing.records import LoaderTimes, StepRecord, StepTimes
from dataflow.telemetry.timing.report import Report, report_of

FOLDER = ROOT / "tests" / "fixtures" / "texts"
WRITTEN_ANEW = "DATAFLOW_STORE_TEXTS" in os.environ


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def check(name: str, text: str) -> None:
    """Compare with the text of this name that is stored."""
    path = FOLDER / f"{name}.txt"
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if WRITTEN_ANEW:
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8"), f"see the first lines of {Path(__file__).name}"


def said(*command: str) -> str:
    code, text = run_command(*command)
    assert code == 0, text
    return text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command(name: str) -> None:
    with click.Context(COMMANDS[name], info_name=name, terminal_width=100, max_content_width=100) as ctx:
        check("help " + name.replace("torchrun ... -m ", ""), COMMANDS[name].get_help(ctx))


def doctored(**parts: tuple[float, ...]) -> Report:
    """The report of ranks that took so many seconds of each part in each of 50 steps."""
    ranks = len(next(iter(parts.values())))
    zero = dict.fromkeys(("data_s", "peers_s", "compute_s", "exposed_s", "optimizer_s"), (0.01,) * ranks)
    times = zero | parts
    records = [
        StepRecord(
            rank=rank,
            world_size=ranks,
            host=f"node{rank}",
            model="DDP",
            strategy="all-reduce",
            device="cuda",
            loader=LoaderTimes("shards", 0.1, read_busy=0.9, build_busy=0.2, store="remote", cores=8.0),
            windows=tuple(
                StepTimes(window=n, microbatches=4, **{part: values[rank] for part, values in times.items()})
                for n in range(50)
            ),
        )
        for rank in range(ranks)
    ]
    return report_of(records)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("data", {"compute_s": (0.3, 0.3), "data_s": (0.2, 0.18)}),
        ("network", {"compute_s": (0.3, 0.3), "exposed_s": (0.2, 0.2)}),
        ("straggler", {"compute_s": (0.3, 0.5), "exposed_s": (0.21, 0.01)}),
        ("compute", {"compute_s": (0.5,)}),
    ],
)
def test_what_the_doctor_reports(name: str, parts: dict[str, tuple[float, ...]]) -> None:
    console = Console(file=io.StringIO(), width=100, highlight=False)
    doctored(**parts).show(console)
    check(f"doctor {name}", console.file.getvalue())  # type: ignore[attr-defined]


def test_what_top_shows() -> None:
    ranks = [
        [page_after(at, rank=rank, world_size=2, waited=0.4, read=0.9) for rank in (0, 1)] for at in (10, 12)
    ]
    for width in (80, 100, 140):
        lines = text_of(views(*ranks)[-1], width=width).splitlines()
        check(f"top {width}", "\n".join(lines[:-1]))  # the last one has the time of day


def test_what_a_plan_says() -> None:
    check(
        "plan", said(*ASKED, "--samples", "1M", "--node-hour", "3", "--watts", "500", "--sample-bytes", "1MB")
    )


def test_verdicts() -> None:
    found = {
        "storage, enough": storage(case(900, 1), case(2000, 4), need="16000/s"),
        "storage, too slow": storage(case(790, 4), case(800, 16), need="1.6GB/s", read="store"),
        "loader": loading(),
        "loader, enough": loading("20/s"),
        "comparison": compared([900, 1000, 1100], [480, 500, 520]),
        "order": inspected(),
        "plan": planned(),
    }
    check("verdicts", "\n\n".join(f"{name}\n{one.text}\nNext: {one.advice}" for name, one in found.items()))


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: object) -> None:
    """Four shards in a folder of the working directory, sorted by label."""
    monkeypatch.chdir(tmp_path)
    Path("shards").mkdir()
    for shard in range(4):
        rows = np.arange(80) + 80 * shard
        table = pa.table({"x": rows.astype(np.float32), "label": rows // 32, "name": [f"n{r}" for r in rows]})
        pq.write_table(table, f"shards/{shard}.parquet", row_group_size=10, compression="none")


@pytest.mark.usefixtures("shards")
def test_what_commands_say_of_shards() -> None:
    check(
        "inspect", said("inspect", "shards", "--batch-size", "16", "--window-blocks", "4", "--label", "label")
    )
