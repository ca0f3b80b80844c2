"""The controller in schedules of several ranks: the same decisions everywhere, and what numbers become."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_kit import RankSet
from grad_kit import Case, Result, as_large_batches, go_on_in_mode, in_windows
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dataflow import GradSchedule
from dataflow.grad.adapt.options import Adapt
from dataflow.grad.agreement import DisagreementError
from dataflow.grad.strategies import Half, Int8, LocalSGD
from dataflow.telemetry.timing.phases import Phase, PhaseLedger

two, four = RankSet(2), RankSet(4)
SETS = {2: two, 4: four}
SECONDS = ({"all-reduce": 0.9, "fp16": 0.5, "int8": 0.2}, {"all-reduce": 0.3, "fp16": 0.35, "int8": 0.4})
"""Of a window on even ranks, and on odd ones, which by themselves would stay as they are."""


def compression() -> Adapt:
    return {"compression": [Half("fp16"), Int8()]}


SAVED = 30


@dataclass
class Story:
    """What a rank saw of a run."""

    modes: list[tuple[str, ...]] = field(default_factory=list)
    """Of each window."""
    seconds: list[float] = field(default_factory=list)
    """Of each window, on this rank's clock."""
    reason: str = ""
    report: str = ""
    control: Any = None
    """The controller's state at the end."""
    parameters: list[Tensor] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    """After window `SAVED`."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SlowLink(DistributedDataParallel):
    """Its log tells of gradients that travel for a while after all is computed."""

    exposed_s, iterations = 0.0, 0

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        self.iterations += 1
        return {"iteration": self.iterations, "backward_comm_time": self.exposed_s * 1e9}


def model_and_data(windows: int) -> tuple[SlowLink, list[Tensor]]:
    torch.manual_seed(dist.get_rank())
    data = [torch.randn(4, 6) for _ in range(windows)]
    torch.manual_seed(99)
    net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    return SlowLink(net), data


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def story(
    windows: int,
    adapt: Adapt | None,
    exposed_s: float,
    *,
    resumed: dict[str, Any] | None = None,
    from_window: int = 0,
) -> Story:
    """A run on a clock of this rank's own: ranks see other windows, other communication."""
    rank, clock = dist.get_rank(), Clock()
    model, data = model_and_data(windows)
    model.exposed_s = exposed_s * (1 + 0.25 * rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    if resumed is not None:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), resumed["parameters"], strict=True):
                parameter.copy_(value)
        optimizer.load_state_dict(resumed["optimizer"])
    told, ledger = Story(), PhaseLedger(clock)

    def travel(phase: Phase, _: float) -> None:
        if phase is Phase.SYNC:
            clock.now_s += model.exposed_s

    ledger.listen(travel)
    with GradSchedule(data[from_window:], model, optimizer, 1, adapt=adapt, ledger=ledger) as sched:
        if resumed is not None:
            sched.load_state_dict(resumed["sched"])
        for number, batch in enumerate(sched, from_window):
            name = sched.mode.settings.get("compression", "") if sched.mode else ""
            took_s = SECONDS[rank % 2].get(name, 0.5) * (1 + 0.01 * rank) * (1 + 0.01 * (number * 7 % 5))
            # In parts of 1024, so that differences are exact, whenever a run began.
            clock.now_s += round(1024 * took_s) / 1024 - model.exposed_s
            sched.backward(model(batch).square().mean() * sched.scale())
            info = sched.step()
            assert info is not None
            told.modes.append(tuple(sched.mode.settings.values()) if sched.mode else ())
            told.seconds.append(info.seconds.total)
            if number == SAVED:
                control = json.loads(json.dumps(sched.state_dict()["control"]))
                told.state = {
                    "sched": {**sched.state_dict(), "control": control},
                    "optimizer": copy.deepcopy(optimizer.state_dict()),
                    "parameters": values(model),
                }
        told.reason = sched.mode.reason if sched.mode else ""
        told.report = str(sched.report())
        told.control = sched.state_dict()["control"]
        told.parameters = values(model)
    return told


# ---- decisions --------------------------------------------------------------------------------------------


@four.add
@two.add
def saturated() -> Story:
    return story(75, compression(), 0.125)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_measure_different_things_decide_the_same(ranks: int) -> None:
    told = SETS[ranks].results(saturated)
    assert [each.modes for each in told] == [told[0].modes] * ranks
    assert len({each.seconds[20] for each in told}) == ranks
    assert told[0].modes[0] == ("all-reduce",)
    assert told[0].modes[-1] == ("int8",)
    assert told[0].reason.startswith("int8 saves 4")
    assert "controller: compression int8 since window " in " ".join(told[0].report.split())
    for each in told[1:]:  # replicas are equal to the bit after all that
        assert all(map(torch.equal, each.parameters, told[0].parameters))


@two.add
def in_two_parts() -> tuple[Story, Story]:
    whole = story(75, compression(), 0.125)
    return whole, story(75, compression(), 0.125, resumed=whole.state, from_window=SAVED + 1)


def test_a_run_resumed_within_a_trial_decides_and_computes_as_the_whole_one() -> None:
    for whole, second in two.results(in_two_parts):
        assert second.modes[0] != whole.modes[-1]  # a trial was under way
        assert second.modes == whole.modes[SAVED + 1 :]
        assert second.control == whole.control
        assert all(map(torch.equal, second.parameters, whole.parameters))


@two.add
def different_allowances() -> str:
    adapt: Adapt = {"compression": [Half("fp16")]} if dist.get_rank() else compression()
    with pytest.raises(DisagreementError) as error:
        story(1, adapt, 0.0)
    return str(error.value)


def test_ranks_that_were_allowed_different_things_are_told() -> None:
    assert "ranks disagree on what may change (adapt=, io=)" in two.results(different_allowances)[0]


# ---- numbers ----------------------------------------------------------------------------------------------


@four.add
@two.add
def four_runs() -> list[Story]:
    hidden, seen = (story(30, compression(), exposed_s) for exposed_s in (0.0, 0.125))
    return [story(30, None, 0.125), story(30, {}, 0.125), hidden, seen]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_nothing_changes_the_numbers_unless_it_was_allowed_and_needed(ranks: int) -> None:
    for plain, nothing, hidden, seen in SETS[ranks].results(four_runs):
        assert plain.modes == nothing.modes == [()] * 30
        assert set(hidden.modes) == {("all-reduce",)}
        for same in (nothing, hidden):
            assert all(map(torch.equal, same.parameters, plain.parameters))
        assert not any(map(torch.equal, seen.parameters, plain.parameters))


@two.add
def periods() -> list[list[Tensor]]:
    """Parameters before and after the switch from period 4 to 8 (at window 6, where neither averages)."""
    model, data = model_and_data(6)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with GradSchedule(data, model, optimizer, 1, adapt={"sync_period": [8]}, strategy=LocalSGD(4)) as sched:
        for batch in sched:
            sched.backward(model(batch).square().mean())
            sched.step()
        before = values(model)
        go_on_in_mode(sched, 1)
        next(iter(sched))  # a window is decided on, and not trained
        return [before, values(model)]


def test_ranks_that_drifted_apart_meet_before_another_sync_period_begins() -> None:
    (apart, together), (apart_too, together_too) = two.results(periods)
    assert not any(map(torch.equal, apart, apart_too))
    assert all(map(torch.equal, together, together_too))


MERGED = {
    "ddp": Case((7, 4), accumulate=4, momentum=0.9, max_norm=0.5),
    "samples and tokens": Case((8, 8), accumulate=4, normalisers=("tokens", "samples")),
    "static": Case((4, 6), wrap="static", accumulate=4),
    "fsdp": Case((7, 4), wrap="fsdp", accumulate=4),
    "scaler": Case((5, 6), accumulate=4, scaler=True),
}


@two.add
def merged_runs() -> dict[str, Result]:
    return {name: in_windows(case, adapt={"accumulate": [2, 1]}, mode=(1,)) for name, case in MERGED.items()}


@pytest.mark.parametrize("name", MERGED)
def test_merged_microbatches_give_the_gradient_of_one_large_batch(name: str) -> None:
    expected = as_large_batches(MERGED[name])
    for rank in two.results(merged_runs):
        assert rank[name].norms == pytest.approx(expected.norms, rel=1e-12)
        for ours, theirs in zip(rank[name].parameters, expected.parameters, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    counts = [min(4, max(0, n - 4 * w)) for w in range(2) for n in MERGED[name].counts]
    passes = [-(-count // 2) for count in counts]
    assert [t["microbatches"] for t in two.results(merged_runs)[0][name].totals] == [
        sum(passes[:2]),
        sum(passes[2:]),
    ]
