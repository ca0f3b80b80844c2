"""A schedule, and the loader over shards that it runs, on the page of figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets_kit import make_ints_tar

import dataflow.telemetry.status.page as page_module
from dataflow import DataLoader, GradSchedule, ShardedDataset
from dataflow.telemetry.serving.instruments import points_of
from dataflow.telemetry.status.page import StatusFile
from dataflow.telemetry.status.reading import read_pages


def test_a_page_tells_of_a_schedule_and_of_the_shards_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "_EVENTS_S", 60.0)
    monkeypatch.setattr(page_module, "_page", page := StatusFile(lambda: [tmp_path / "run"]))
    page.due = 0.0
    data = tmp_path / "cifar" / "train"
    data.mkdir(parents=True)
    make_ints_tar(data)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    with (
        DataLoader(ShardedDataset(str(data / "*.tar")), 2) as loader,
        GradSchedule(loader, model, optimizer, accumulate=2) as schedule,
    ):
        for batch in schedule:
            schedule.backward(model(batch["cls"].float()[:, None]).mean() * schedule.scale())
            schedule.step()
    [record] = read_pages([tmp_path / "run"])
    [one], [steps] = record.loaders, record.schedules
    assert (one.name, one.kind, one.state) == ("cifar/train", "LoaderStats", "closed")
    assert {decision.what for decision in one.decisions} >= {"workers", "depth"}
    assert (steps.loader, steps.state, steps.windows) == ("cifar/train", "closed", steps.steps)
    assert steps.microbatches == one.loop_length == steps.totals["microbatches"]
    assert steps.seconds["compute"] > 0
    values = {
        (point.instrument.name, point.attributes.get("part")): point.value for point in points_of([record])
    }
    assert values["dataflow.schedule.part", "compute"] == steps.seconds["compute"]
    assert values["dataflow.schedule.step", None] == steps.steps
