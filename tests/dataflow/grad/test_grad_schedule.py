"""The loop of one process: order of events, the look-ahead, resuming, and what is refused."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets_kit import make_ints_tar
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from dataflow import Bucketed, DataLoader, GradSchedule, Packed, ShardedDataset, TokenBudget
from dataflow.grad.strategies.local_sgd import DiLoCo, LocalSGD
from dataflow.grad.strategies.strategy import Strategy
from dataflow.telemetry.timing.phases import Phase, PhaseLedger


def made(loader: Any, accumulate: int | None = 2, **arguments: Any) -> tuple[nn.Module, GradSchedule]:
    torch.manual_seed(0)
    model = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, GradSchedule(loader, model, optimizer, accumulate, **arguments)


def batches(count: int) -> list[Tensor]:
    return [torch.full((2, 1), 0.1 * (i + 1), dtype=torch.float64) for i in range(count)]


def train(model: nn.Module, sched: GradSchedule) -> list[Any]:
    infos = []
    for batch in sched:
        sched.backward(model(batch).square().sum() * sched.scale())
        if info := sched.step():
            infos.append(info)
    return infos


def weights_of(model: nn.Module) -> list[float]:
    return [value for p in model.parameters() for value in p.flatten().tolist()]


class Watched:
    """Counts what is taken."""

    def __init__(self, count: int) -> None:
        self.count, self.taken = count, 0

    def __iter__(self) -> Iterator[Tensor]:
        for batch in batches(self.count):
            self.taken += 1
            yield batch


def test_one_window_is_looked_ahead_batch_by_batch() -> None:
    loader, seen = Watched(6), []
    model, sched = made(loader, weights={"n": len})
    for batch in sched:
        seen.append(loader.taken)
        sched.backward(model(batch).sum() * sched.scale("n"))
        sched.step()
    assert seen == [3, 4, 5, 6, 6, 6]


def test_windows_and_the_accelerate_form_take_the_same_steps() -> None:
    results = []
    for form in ("plain", "windows", "accelerate"):
        model, sched = made(batches(5))
        if form == "plain":
            train(model, sched)
        elif form == "windows":
            for window in sched.windows():
                for batch in window:
                    sched.backward(model(batch).square().sum() * sched.scale())
                assert sched.step() is not None
        else:
            for batch in sched:
                with sched.accumulate():
                    sched.backward(model(batch).square().sum())
        assert sched.position.window == 3
        results.append(weights_of(model))
    assert results[0] == results[1] == results[2]


def unscaled(count: int, accumulate: int, **arguments: Any) -> list[str]:
    """What is warned of where the loss is a mean and nobody calls `scale`, in one epoch."""
    model, sched = made(batches(count), accumulate, **arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in sched:
            sched.backward(model(batch).square().mean())
            sched.step()
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def test_losses_that_nobody_scales_are_warned_of_once() -> None:
    [message] = unscaled(6, 2)
    assert "the gradients of 2 microbatches were added up" in message
    assert "sched.scale()" in message


def test_a_window_of_one_microbatch_needs_no_scale() -> None:
    assert unscaled(3, 1) == []
    assert len(unscaled(3, 2)) == 1
    assert unscaled(1, 2) == []


def test_a_scale_called_once_in_a_window_is_enough() -> None:
    model, sched = made(batches(5), 2)
    for number, batch in enumerate(sched):
        loss = model(batch).square().mean()
        sched.backward(loss * sched.scale() if number % 2 == 0 else loss / 2)
        sched.step()
    assert sched.position.window == 3


@pytest.mark.parametrize("how", ["break", "error", "windows"])
def test_a_window_that_is_left_leaves_no_gradient_to_the_next_loop(how: str) -> None:
    untouched, expected = made(batches(4))
    train(untouched, expected)
    model, sched = made(batches(4))
    with suppress(ZeroDivisionError):
        for window in sched.windows():
            for batch in window:
                sched.backward(model(batch).sum())
                if how == "error":
                    raise ZeroDivisionError
                if how == "break":
                    break
            break
    train(model, sched)
    assert weights_of(model) == weights_of(untouched)


def test_gradients_from_before_a_window_are_none_of_its_own() -> None:
    def trained(outside: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)).double()
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.01)
        sched = GradSchedule(batches(4), model, optimizer, 2)
        for _ in range(2):
            if outside:
                model(batches(1)[0]).sum().backward()  # to warm up, or to look at the gradients
            else:
                model.zero_grad()
            train(model, sched)
            if len(optimizer.param_groups) == 1:  # its gradients of the first epoch were nobody's
                optimizer.add_param_group({"params": [*model[0].parameters()]})
        return weights_of(model)

    assert trained(True) == trained(False)


def test_sparse_gradients_are_clipped_as_dense_ones() -> None:
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Embedding(6, 2, sparse=sparse).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = [torch.tensor([1, 2]), torch.tensor([2, 3, 3])]
        sched = GradSchedule(data, model, optimizer, 2, weights={"n": len}, max_norm=0.1)
        for batch in sched:
            sched.backward(model(batch).square().sum() * sched.scale("n"))
            sched.step()
        assert sched.last is not None
        found.append([sched.last.grad_norm, *weights_of(model)])
    assert found[0] == pytest.approx(found[1], abs=1e-15)


def test_diloco_begins_from_weights_that_are_loaded_after_it_was_made() -> None:
    found = []
    for loaded_first in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trained = {"weight": torch.full((1, 1), 3.0), "bias": torch.full((1,), -2.0)}
        if loaded_first:
            model.load_state_dict(trained)
        sched = GradSchedule(batches(2), model, optimizer, 1, strategy=DiLoCo(2))
        model.load_state_dict(trained)
        train(model, sched)
        found.append(weights_of(model))
    assert found[0] == found[1]


def test_phases_follow_the_loop_and_are_told_with_each_step() -> None:
    heard: list[Phase] = []
    ledger = PhaseLedger()
    ledger.listen(lambda phase, _: heard.append(phase))
    model, sched = made(batches(3), ledger=ledger)
    infos = train(model, sched)
    assert heard == [Phase.SYNC, Phase.COMPUTE, Phase.STEP, Phase.COMPUTE] * 2
    assert all(info.seconds.compute > 0 and info.seconds.step > 0 for info in infos)


def test_a_scale_that_is_skipped_moves_neither_learning_rate_nor_average() -> None:
    data = batches(4)
    data[0][0] = torch.inf
    torch.manual_seed(0)
    model = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    lr = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    averaged: list[nn.Module] = []
    sched = GradSchedule(data, model, optimizer, 2, lr=lr, ema=averaged.append, scaler=scaler)
    first, second = train(model, sched)
    assert (first.skipped, first.step, first.lr) == (True, 0, 0.01)
    assert (second.skipped, second.step, second.lr) == (False, 1, 0.01)
    assert averaged == [model]
    assert optimizer.param_groups[0]["lr"] == 0.005
    assert scaler.get_scale() == 512.0


def test_an_averaged_model_is_updated() -> None:
    torch.manual_seed(0)
    model = nn.Linear(1, 1).double()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, GradSchedule(batches(4), model, optimizer, 2, ema=average))
    assert int(average.n_averaged) == 2


# ---- resuming -------------------------------------------------------------------------------------------


def map_loader(_: Path) -> DataLoader:
    data = TensorDataset(torch.arange(22, dtype=torch.float64).view(-1, 1) / 22)
    return DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(3))


def stream_loader(folder: Path) -> DataLoader:
    dataset = ShardedDataset(str(folder / "*.tar"), decode={"cls": "int"}, columns=["cls"])
    return DataLoader(dataset, 3, shuffle=True, seed=3)


def values_of(batch: Any) -> Tensor:
    found = batch["cls"].view(-1, 1).double() / 100 if isinstance(batch, dict) else batch[0]
    return torch.as_tensor(found)


class Run:
    """A training run that can be saved and gone on with."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        weights = {"n": lambda b: len(values_of(b))}
        self.sched = GradSchedule(loader, self.model, self.optimizer, 2, weights=weights)
        self.seen: list[list[float]] = []

    def epochs(self, until: int, stop: int | None = None) -> list[dict[str, Any]]:
        """Train until so many windows have ended; the state after each."""
        states = []
        while self.sched.position.window < until:
            window: list[float] = []
            for batch in self.sched:
                x = values_of(batch)
                window += x.flatten().tolist()
                self.sched.backward(self.model(x).square().sum() * self.sched.scale("n"))
                if self.sched.step():
                    self.seen.append(window)
                    window = []
                    states.append(copy.deepcopy(self.state()))
                    if self.sched.position.window == until:
                        break
        return states

    def state(self) -> dict[str, Any]:
        return {
            "sched": json.loads(json.dumps(self.sched.state_dict())),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        self.sched.load_state_dict(state["sched"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


@pytest.mark.parametrize("loader_of", [map_loader, stream_loader])
def test_a_run_resumed_at_any_window_equals_one_that_was_not(loader_of: Any, tmp_path: Path) -> None:
    make_ints_tar(tmp_path)
    with loader_of(tmp_path) as loader:
        whole = Run(loader)
        states = whole.epochs(until=9)
        expected, totals = weights_of(whole.model), whole.sched.position.totals
    for cut, state in enumerate(states, 1):
        with loader_of(tmp_path) as loader:
            resumed = Run(loader)
            resumed.load(state)
            resumed.epochs(until=9)
            assert resumed.seen == whole.seen[cut:], f"resumed after window {cut}"
            assert weights_of(resumed.model) == expected
            assert resumed.sched.position.totals == totals


def test_a_state_is_refused_inside_a_window() -> None:
    model, sched = made(batches(4))
    for batch in sched:
        with pytest.raises(RuntimeError, match="after step"):
            sched.state_dict()
        sched.backward(model(batch).sum() * sched.scale())
        if sched.step():
            assert sched.state_dict()["window"] == sched.position.window


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 7}, "version 1"),
        ({"accumulate": 5}, r"accumulate=5, this run has accumulate=2"),
        ({"global_batch": 64}, r"global_batch=64, this run has global_batch=None"),
        ({"strategy": {"key": "top-k", "state": {}}}, "strategy='top-k'"),
        ({"loader": {"position": 3}}, "no load_state_dict"),
        ({"strategy": 5}, "lacks key and state of the strategy"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    _, sched = made(batches(4))
    with pytest.raises(ValueError, match=message):
        sched.load_state_dict({**sched.state_dict(), **change})


@pytest.mark.parametrize("name", ["window", "order", "totals", "world_size", "lr", "loader", "strategy"])
def test_a_state_that_is_not_whole_is_refused(name: str) -> None:
    _, sched = made(batches(4))
    state = sched.state_dict()
    del state[name]
    with pytest.raises(ValueError, match=f"not whole: it lacks {name}"):
        sched.load_state_dict(state)


@pytest.mark.parametrize("lost", [None, {}, []])
def test_a_state_that_lost_its_loader_s_place_does_not_start_over(lost: Any, tmp_path: Path) -> None:
    _, sched = made(map_loader(tmp_path))
    with pytest.raises(ValueError, match=r"(has no place of the loader|not a state)"):
        sched.load_state_dict({**sched.state_dict(), "loader": lost})


class Iterated(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize("damaged", ["loader", "strategy", "common"])
def test_a_state_that_is_refused_changes_nothing(damaged: str, tmp_path: Path) -> None:
    found = []
    for refused in (False, True):
        loader = map_loader(tmp_path)
        model, sched = made(loader, strategy=DiLoCo(2))
        states = []
        for _ in range(2):
            for [batch] in sched:
                sched.backward(model(batch).square().sum() * sched.scale())
                if sched.step():
                    states.append(copy.deepcopy(sched.state_dict()))
        if refused:
            state, kept = states[0], states[0]["strategy"]["state"]
            if damaged == "loader":
                state["loader"] = DataLoader(Iterated()).state_dict()
            elif damaged == "strategy":
                state["strategy"]["state"] = {"step": 3}
            else:
                assert kept["parameters"]
                kept["common"] = {"weight": torch.zeros(7)}
            before = copy.deepcopy(sched.state_dict()), loader.state_dict(), weights_of(model)
            with pytest.raises(ValueError, match=r"(kind='iterable'|does not fit|of shape)"):
                sched.load_state_dict(state)
            after = sched.state_dict(), loader.state_dict(), weights_of(model)
            assert repr(after) == repr(before)
        seen = []
        for [batch] in sched:
            seen += batch.flatten().tolist()
            sched.backward(model(batch).square().sum() * sched.scale())
            sched.step()
        found.append((seen, weights_of(model)))
        sched.close()
    assert found[0] == found[1]


# ---- what is refused ------------------------------------------------------------------------------------


def test_a_loop_that_forgets_a_call_is_told_which() -> None:
    model, sched = made(batches(4))
    with pytest.raises(RuntimeError, match=r"call sched.backward"):
        list(sched)
    loop = iter(sched)
    for _ in range(2):
        sched.backward(model(next(loop)).sum())
    with pytest.raises(RuntimeError, match=r"call step\(\)"):
        next(loop)
    for batch in sched:
        with pytest.raises(RuntimeError, match="called before"):
            sched.step()
        sched.backward(model(batch).sum())
        with pytest.raises(RuntimeError, match="add its losses up"):
            sched.backward(model(batch).sum())
        with pytest.raises(ValueError, match="no 'tokens'; there are microbatches"):
            sched.scale("tokens")
        break
    with pytest.raises(RuntimeError, match="no microbatch is under way"):
        sched.scale()


def test_two_loops_at_a_time_are_refused() -> None:
    _, sched = made(batches(4))
    for _ in sched:
        with pytest.raises(RuntimeError, match="two loops"):
            next(iter(sched))
        break


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"accumulate": 0}, "accumulate must be an integer >= 1"),
        ({"accumulate": 2, "global_batch": 8}, "give one of them"),
        ({"accumulate": None, "global_batch": 8}, "loader with a batch_size"),
        ({"uneven": "join"}, "uneven must be one of pad, min, error"),
        ({"partial": "carry"}, "partial must be one of keep, drop"),
        ({"max_norm": 0}, "max_norm must be > 0"),
        ({"io": "never"}, 'io must be "auto"'),
        ({"timeout_s": 0}, "timeout_s must be > 0"),
        ({"weights": {"microbatches": 1}}, "choose another name"),
        ({"lr": 0.1}, "scheduler with a step"),
        ({"ema": 0.99}, "AveragedModel"),
        ({"strategy": LocalSGD}, "a strategy is an object such as"),
        ({"adapt": {"compression": ["int8"]}}, "a strategy is an object such as"),
        ({"adapt": ["compression"]}, "adapt must be names with options"),
        ({"adapt": {"accumulate": 1}}, "adapt's accumulate must be a list, got 1"),
        ({"adapt": {"merge": "cat"}}, "adapt's merge must be a function"),
        ({"scaler": True}, "scaler must be a torch.amp.GradScaler, got True"),
        ({"max_norm": "1"}, "max_norm must be > 0, got '1'"),
        ({"max_norm": float("nan")}, "max_norm must be > 0, got nan"),
        ({"timeout_s": "10"}, "timeout_s must be > 0 seconds, and finite, got '10'"),
        ({"timeout_s": float("inf")}, "finite, got inf"),
        ({"accumulate": None, "global_batch": "8"}, "global_batch must be an integer >= 1, got '8'"),
        ({"weights": ["tokens"]}, "weights must be names with weights"),
        ({"weights": {"t": "abc"}}, "weight 't' of a batch must be a number, got 'abc'"),
        ({"weights": {"t": "3"}}, "must be a number, got '3'"),
        ({"weights": {"t": -1}}, "must be finite and >= 0, got -1"),
        ({"weights": {"t": float("nan")}}, "must be finite and >= 0, got nan"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(batches(1), **arguments)


def test_a_strategy_serves_one_schedule_at_a_time() -> None:
    strategy = LocalSGD(2)
    _, first = made([], strategy=strategy)
    with pytest.raises(ValueError, match="belongs to another GradSchedule"):
        made([], strategy=strategy)
    first.close()
    made([], strategy=strategy)[1].close()


@dataclass
class Planned(Strategy):
    """Equal to others with this plan, and without a hash."""

    plan: str
    name = key = "planned"


def test_strategies_that_are_equal_serve_a_schedule_each() -> None:
    one, other = Planned("slow"), Planned("slow")
    _, first = made([], strategy=one)
    _, second = made([], strategy=other)
    with pytest.raises(ValueError, match="this planned belongs to another GradSchedule"):
        made([], strategy=other)
    first.close()
    second.close()


def test_models_and_optimizers_that_step_by_themselves_are_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        GradSchedule([], model, optimizer, lr=plateau)
    with pytest.raises(ValueError, match="DataParallel runs in one process"):
        GradSchedule([], nn.DataParallel(model), optimizer)
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})()
    with pytest.raises(ValueError, match="DeepSpeed engine accumulates"):
        GradSchedule([], engine, optimizer)
    model.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ValueError, match="'weight' has a hook"):
        GradSchedule([], model, optimizer)


def test_an_accumulation_that_follows_from_a_global_batch() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(8, 1)), 4)
    _, sched = made(loader, None, global_batch=12)
    assert sched.window_size == 3
    with pytest.raises(ValueError, match="global_batch=10 is not a multiple"):
        made(loader, None, global_batch=10)


def test_a_global_batch_counts_the_samples_of_batches_by_length(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"tokens": [1, 2]}\n' * 8)
    dataset = ShardedDataset(tmp_path / "x.jsonl")
    for batching, accumulate in ((Packed(64), 4), (Bucketed(2), 4), (Bucketed(4), 2)):
        with DataLoader(dataset, 2 if isinstance(batching, Packed) else 1, batching=batching) as loader:
            assert made(loader, None, global_batch=8)[1].window_size == accumulate
    with (
        DataLoader(dataset, batching=TokenBudget(64)) as loader,
        pytest.raises(ValueError, match="needs a loader with a batch_size"),
    ):
        made(loader, None, global_batch=8)
