"""Progress bars: how often they are drawn, where nobody sees them, and that they end."""

from __future__ import annotations

import os
import pty
import sys
import threading
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets_kit import Made

from dataflow import DataLoader, Mixture, ShardedDataset, Shuffle, Topology
from dataflow.progress.bar import ProgressBar
from dataflow.stats import WorkerStats
from dataflow.telemetry.loop_bar import LoaderBar, rates_text


@dataclass
class Clock:
    """A clock that a test moves; it counts who looks at it."""

    now_s: float = 0.0
    num_readings: int = 0

    def __call__(self) -> float:
        self.num_readings += 1
        return self.now_s


@dataclass
class Drawings:
    """Bars that were begun, in tqdm's words; what was drawn of them, and which were closed."""

    starts: list[dict[str, Any]] = field(default_factory=list)
    drawn: list[list[tuple[int, int | None, str]]] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)

    def begin(self, **start: Any) -> OneDrawing:
        self.starts.append(start)
        self.drawn.append([])
        return OneDrawing(self, len(self.starts) - 1, start["initial"], start["total"])


@dataclass
class OneDrawing:
    """What is used of a bar of tqdm."""

    drawings: Drawings
    number: int
    n: int
    total: int | None
    text: str = ""

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.text = text

    def update(self, more: int) -> bool:
        self.n += more
        self.drawings.drawn[self.number].append((self.n, self.total, self.text))
        return True

    def close(self) -> None:
        self.drawings.closed.append(self.number)


class Broken(OneDrawing):
    def __init__(self, **start: Any) -> None:
        super().__init__(Drawings(), 0, 0, None)

    def update(self, more: int) -> bool:
        raise BrokenPipeError

    def close(self) -> None:
        raise BrokenPipeError


class Numbers(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


def with_fakes(loader: DataLoader, clock: Clock, drawings: Drawings) -> Any:
    """The batches of a loop, with a bar that is drawn into a list."""
    owner = loader._drop_in if loader._stream is None else loader._stream
    make = partial(ProgressBar, make=drawings.begin)
    owner.observer = owner.observer or LoaderBar(True, loader.batch_size, clock, make)
    return iter(loader._engine)


# ---- drawing -----------------------------------------------------------------------------------------------


def test_a_bar_is_drawn_ten_times_a_second_however_often_it_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ProgressBar("indexing", total=20_000, visible=True, stays=True) as shown:
        for step in range(1, 20_001):
            shown.show(step)
    text = capsys.readouterr().err
    assert "20000/20000" in text
    assert text.count("indexing") < 20  # of a loop that takes far less than a second


def test_what_is_over_soon_shows_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("checking", visible=True, after_s=60.0) as shown:
        assert list(shown.each("abc")) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""


def test_a_hidden_bar_passes_items_on_and_begins_nothing() -> None:
    drawings = Drawings()
    with ProgressBar("indexing", visible=False, make=drawings.begin) as shown:
        assert list(shown.each(range(3))) == [0, 1, 2]
        shown.draw(3)
    assert drawings.starts == []


def test_work_goes_on_where_the_bar_can_no_longer_be_written() -> None:
    with ProgressBar("indexing", visible=True, make=Broken) as shown:
        assert sum(shown.each(range(5))) == 10


def test_escape_sequences_in_a_title_are_written_out() -> None:
    drawings = Drawings()
    ProgressBar("a\x1b[2J", visible=True, make=drawings.begin).close()
    assert drawings.starts[0]["desc"] == r"a\x1b[2J"


# ---- epochs ------------------------------------------------------------------------------------------------


def test_an_epoch_shows_samples_a_second_and_waiting_of_the_last_seconds() -> None:
    clock, drawings = Clock(), Drawings()
    with DataLoader(range(64), batch_size=4) as loader:
        for number, _ in enumerate(with_fakes(loader, clock, drawings), 1):
            clock.now_s = number * 0.5
    [start] = drawings.starts
    assert (start["desc"], start["initial"], start["total"], start["unit"]) == ("epoch 0", 0, 16, "batch")
    done, total, text = drawings.drawn[0][-1]
    assert (done, total) == (16, 16)
    assert "samples/s, waiting " in text
    assert drawings.closed == [0]


def test_rates_are_those_between_two_snapshots() -> None:
    with DataLoader(range(4)) as loader:
        before, _ = loader.stats(), list(loader)
        now = loader.stats()
    assert isinstance(before, WorkerStats)
    assert isinstance(now, WorkerStats)
    before = replace(before, batches=10, elapsed_s=1.0, starved_s=0.5)
    now = replace(now, batches=14, elapsed_s=3.0, starved_s=1.0)
    assert rates_text(now, before, 4) == "8 samples/s, waiting 25%"
    assert rates_text(now, before, None) == "waiting 25%"
    assert rates_text(now, now, 4) == ""


def test_a_batch_costs_one_look_at_the_clock() -> None:
    clock, drawings = Clock(), Drawings()
    with DataLoader(range(1000), batch_size=1) as loader:
        batches = with_fakes(loader, clock, drawings)
        next(batches)  # begins the bar, and draws it
        before = clock.num_readings
        for _ in range(900):
            next(batches)
        assert clock.num_readings - before == 900


def test_a_loop_that_is_left_closes_its_bar_where_it_stands() -> None:
    clock, drawings = Clock(), Drawings()
    with DataLoader(range(64), batch_size=4) as loader:
        for number, _ in enumerate(with_fakes(loader, clock, drawings), 1):
            if number == 5:
                break
    assert drawings.drawn[0][-1][:2] == (5, 16)
    assert drawings.closed == [0]


def test_an_error_in_the_loader_closes_the_bar() -> None:
    clock, drawings = Clock(), Drawings()
    items = [*range(8), "not a number"]
    with DataLoader(items, batch_size=3) as loader:
        batches = with_fakes(loader, clock, drawings)
        with pytest.raises(TypeError):
            list(batches)
        assert drawings.closed == [0]


def test_the_next_loop_takes_the_bar_from_one_that_a_traceback_keeps() -> None:
    clock, drawings = Clock(), Drawings()
    with DataLoader(range(8), batch_size=4) as loader:
        kept = with_fakes(loader, clock, drawings)
        next(kept)
        again = with_fakes(loader, clock, drawings)
        next(again)
        assert drawings.closed == [0]
        assert len(list(kept)) == 1


def test_inner_loops_have_bars_of_their_own() -> None:
    clock, drawings = Clock(), Drawings()
    train, validate = DataLoader(range(4), batch_size=2), DataLoader(range(9), batch_size=3)
    for _ in with_fakes(train, clock, drawings):
        for _ in with_fakes(validate, clock, drawings):
            pass
    assert [start["total"] for start in drawings.starts] == [2, 3, 3]
    assert drawings.closed == [1, 2, 0]


def test_the_length_is_left_open_where_nobody_knows_it() -> None:
    clock, drawings = Clock(), Drawings()
    assert len(list(with_fakes(DataLoader(Numbers(), batch_size=5), clock, drawings))) == 2
    assert drawings.starts[0]["total"] is None
    assert drawings.drawn[0][-1][:2] == (2, 2)  # known now


def test_resumed_epochs_begin_at_their_place(ints: Made) -> None:
    for dataset in (ints.open(), range(64)):
        clock, drawings = Clock(), Drawings()
        with DataLoader(dataset, batch_size=4) as loader:
            whole = len(loader)
            batches = iter(loader)
            for _ in range(3):
                next(batches)
            state = loader.state_dict()
        with DataLoader(dataset, batch_size=4) as loader:
            loader.load_state_dict(state)
            assert len(list(with_fakes(loader, clock, drawings))) == whole - 3
        assert (drawings.starts[0]["initial"], drawings.starts[0]["total"]) == (3, whole)
        assert drawings.drawn[0][-1][:2] == (whole, whole)


def test_epochs_of_mixtures_have_their_length_and_endless_ones_none(ints: Made) -> None:
    for stop, total in ((None, 2), ("never", None)):
        clock, drawings = Clock(), Drawings()
        mixture = Mixture({ints.open(): 1}, stop=stop) if stop else Mixture({ints.open(): 1})
        with DataLoader(mixture, len(ints.open()) // 2, Shuffle("window", 2)) as loader:
            next(with_fakes(loader, clock, drawings))
        assert drawings.starts[0]["total"] == (total and len(loader))


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_has_a_bar(ints: Made, rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    topology = Topology(rank, 2)
    with DataLoader(ints.open(), 4, topology=topology, progress="train") as loader:
        list(loader)
    assert ("train: 100%" in capsys.readouterr().err) == (rank == 0)


def test_the_launchers_rank_counts_where_the_dataset_knows_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    list(DataLoader(range(8), progress=True))
    assert capsys.readouterr().err == ""


def test_a_bar_goes_to_stderr_without_a_thread(capsys: pytest.CaptureFixture[str]) -> None:
    batches = iter(DataLoader(range(8), batch_size=4, progress=True))
    next(batches)
    assert not [one for one in threading.enumerate() if "Monitor" in type(one).__name__]  # tqdm's
    list(batches)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "2/2" in shown.err
    assert "samples/s, waiting" in shown.err


def test_no_bar_is_shown_unless_one_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    list(DataLoader(range(8), batch_size=4))
    assert capsys.readouterr() == ("", "")


def test_progress_is_a_truth_value_or_a_title() -> None:
    with pytest.raises(ValueError, match="progress must be True, False or a title, got 3"):
        DataLoader(range(8), progress=3)  # type: ignore[arg-type]


def test_iterators_with_a_bar_are_all_that_the_loaders_own_are() -> None:
    loader = DataLoader(range(8), batch_size=4, progress=True)
    assert len(iter(loader)) == 2
    assert iter(loader)._num_yielded == 0


# ---- on a terminal -----------------------------------------------------------------------------------------


def test_an_outer_bar_stays_and_an_inner_one_goes(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("outer", total=2, visible=True, stays=True) as outer:
        outer.draw(1, text="1 file")
        with ProgressBar("inner", total=3, visible=True, stays=True) as inner:
            inner.draw(3)
        outer.draw(2)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "inner" in shown.err
    assert shown.err.splitlines()[-1].startswith("outer: 100%")
    assert "2/2" in shown.err


def test_indexing_shows_a_bar_on_a_terminal(
    ints: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, terminal = pty.openpty()  # of 0 columns
    os.set_blocking(main, False)
    monkeypatch.setattr(sys, "stderr", os.fdopen(terminal, "w"))
    ShardedDataset(list(map(str, ints.shards)), catalog=tmp_path / "x.catalog")
    said = os.read(main, 65536).decode()
    sys.stderr.close()
    os.close(main)
    assert "indexing" in said
    assert "0/3" in said


def test_indexing_shows_nothing_elsewhere(
    ints: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ShardedDataset(list(map(str, ints.shards)), catalog=tmp_path / "x.catalog")
    assert capsys.readouterr() == ("", "")


def test_indexing_is_shown_where_it_is_asked_for(
    ints: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ShardedDataset(list(map(str, ints.shards)), catalog=tmp_path / "x.catalog", progress=True)
    assert "indexing" in capsys.readouterr().err
    ShardedDataset(list(map(str, ints.shards)), catalog=tmp_path / "y.catalog", progress=False)
    assert capsys.readouterr().err == ""
