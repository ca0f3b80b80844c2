"""Batches that choose their layers: what no batch of a window has reached has no gradient, and stays.

Zeros in place of none move a parameter by momentum, weight decay and Adam's counters.
"""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from branches_kit import Branches, Run, Trained, as_large_batches, in_windows, wrapped
from forked_kit import OLD_TORCH, RankSet
from parameters_kit import in_full
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dataflow import GradSchedule
from dataflow.grad import strategies, wrapper
from dataflow.grad.agreement import DisagreementError, differing_layers

two, two_in_full, three = RankSet(2), RankSet(2), RankSet(3)
OPTIMIZERS = ("momentum", "adamw")
EXACT: dict[str, Any] = {"all-reduce": strategies.AllReduce, "hierarchical": strategies.Hierarchical}
REDUCED: dict[str, Any] = {
    "bf16": lambda: strategies.Half("bf16"),
    "power-sgd": lambda: strategies.PowerSGD(1, start_step=2),
    "top-k": lambda: strategies.TopK(0.3),
    "int8": strategies.Int8,
}
LOCAL: dict[str, Any] = {
    "local-sgd": lambda: strategies.LocalSGD(2),
    "diloco": lambda: strategies.DiLoCo(2),
    "post-local-sgd": lambda: strategies.PostLocalSGD(2),
}
MAKERS = {**EXACT, **REDUCED, **LOCAL, "delayed": strategies.Delayed}


def runs_of(world: int) -> dict[tuple[str, Run], Run]:
    """Of exact strategies several, of each other one; every strategy meets a scaler or clipping somewhere."""
    exact = [
        (
            name,
            Run(
                seed, world, OPTIMIZERS[seed % 2 ^ at], scaler=seed == 1, max_norm=0.5 if seed == 2 else None
            ),
        )
        for at, name in enumerate(EXACT)
        for seed in range(4)
    ]
    others = [
        (name, Run(4 + at, world, OPTIMIZERS[(at + world) % 2], scaler=at % 3 == world % 3))
        for at, name in enumerate([*REDUCED, *LOCAL, "delayed"])
    ]
    sharded = [
        ("fsdp", Run(seed, world, OPTIMIZERS[seed % 2], "fsdp", max_norm=0.5 if seed == 2 else None))
        for seed in ((2, 3) if world == 3 else (1, 5))
    ]
    return {(name, run): run for name, run in [*exact, *others, *sharded]}


def every_run(world: int) -> dict[tuple[str, Run], Trained]:
    return {
        (name, run): in_windows(run, MAKERS[name]() if name in MAKERS else None)
        for name, run in runs_of(world)
    }


@two_in_full.add
def runs_of_two() -> dict[tuple[str, Run], Trained]:
    return every_run(2)


@three.add
def runs_of_three() -> dict[tuple[str, Run], Trained]:
    return every_run(3)


def found(world: int) -> list[dict[tuple[str, Run], Trained]]:
    return two_in_full.results(runs_of_two) if world == 2 else three.results(runs_of_three)


def cases(world: int, names: Any) -> list[tuple[str, Run, Trained, list[Trained]]]:
    """With what large batches give, and each rank's result."""
    chosen = [(name, run) for name, run in runs_of(world) if name in names]
    return [
        (name, run, as_large_batches(run), [rank[name, run] for rank in found(world)]) for name, run in chosen
    ]


@pytest.mark.parametrize("world", [*in_full(2), 3])
@pytest.mark.parametrize("name", [*EXACT, "fsdp"])
def test_windows_equal_one_large_batch_whatever_layers_are_replayed(world: int, name: str) -> None:
    ran = cases(world, [name])
    for _, run, expected, ranks in ran:
        for result in ranks:
            assert result.with_gradient == expected.with_gradient, run
            far = [float((a - b).abs().max()) for a, b in zip(result.values, expected.values, strict=True)]
            assert max(far) < 1e-12, (run, far)
            assert result.stepped == expected.stepped
    assert sum(result.replays for *_, ranks in ran for result in ranks) > 3


def test_the_same_holds_for_one_rank_that_is_alone() -> None:
    for run in (Run(1, 1), Run(2, 1, "adamw")):
        result, expected = in_windows(run), as_large_batches(run)
        assert result.with_gradient == expected.with_gradient
        assert torch.allclose(result.values[-1], expected.values[-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("world", [*in_full(2), 3])
@pytest.mark.parametrize("name", [*REDUCED, *LOCAL, "delayed"])
def test_no_strategy_makes_zeros_of_a_gradient_that_nobody_computed(world: int, name: str) -> None:
    for _, run, expected, ranks in cases(world, [name]):
        for result in ranks:
            if name in REDUCED:
                assert result.with_gradient == expected.with_gradient, run
            elif name == "delayed":
                assert result.with_gradient == [[], *expected.with_gradient[:-1]], run
            else:  # ranks step alone, on what their own microbatches made
                assert [sorted(names) for names in result.with_gradient] == result.reached, run
            assert result.stepped <= expected.stepped
            for layer in Branches().state_dict().keys() - expected.stepped:
                still = Branches().state_dict()[layer]
                assert float((result.parameters[layer] - still).abs().max()) < 1e-15, (run, layer)
            for parameter, value in ranks[0].parameters.items():
                assert torch.equal(result.parameters[parameter], value), (run, parameter)


# ---- what strategies remember of layers that are used now and then -----------------------------------------


class Turns(nn.Module):
    """Two equal layers, each used in some windows only; its gradient is what the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.zeros(24, 24, dtype=torch.float64)) for _ in range(2))

    def forward(self, name: str, wanted: torch.Tensor) -> torch.Tensor:
        return (getattr(self, name) * wanted).sum()


def in_turn(strategy: Any, names: str, momentum: float = 0.0) -> dict[str, torch.Tensor]:
    """Parameters after one window a letter: "a" uses one, "b" two."""
    model, drawn = Turns(), {"a": 0, "b": 0}
    data = []
    for letter in names:
        drawn[letter] += 1
        generator = torch.Generator().manual_seed(100 * drawn[letter] + ord(letter) + 7 * dist.get_rank())
        wanted = torch.randn(24, 24, generator=generator, dtype=torch.float64)
        data.append(({"a": "one", "b": "two"}[letter], wanted))
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum)
    with GradSchedule(data, ddp, optimizer, 1, strategy=strategy) as sched:
        for name, wanted in sched:
            sched.backward(ddp(name, wanted) * sched.scale())
            sched.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


LOSSY = {
    "top-k": lambda: strategies.TopK(0.02),
    "int8": lambda: strategies.Int8(16),
    "power-sgd": lambda: strategies.PowerSGD(1, start_step=2),
}


@two_in_full.add
def layers_in_turn() -> dict[str, tuple[float, float, float]]:
    """How far "one" is from a run without windows of "two"; how far "two" came; how far outer steps go."""
    results = {}
    for name, make in LOSSY.items():
        between, alone = in_turn(make(), "aaabababab"), in_turn(make(), "aaaaaa")
        far = float((between["one"] - alone["one"]).abs().max())
        results[name] = far, float(between["two"].abs().max()), 0.0
    before, after = (
        in_turn(strategies.DiLoCo(2), "aabb")["one"],
        in_turn(strategies.DiLoCo(2), "aabbbb")["one"],
    )
    results["diloco"] = 0.0, 1.0, float((after - before).abs().max())
    return results


@pytest.mark.full
@pytest.mark.parametrize("name", [*LOSSY, "diloco"])
def test_what_a_layer_is_owed_waits_for_it_and_nothing_else_moves_it(name: str) -> None:
    for rank in two_in_full.results(layers_in_turn):
        far, came, drift = rank[name]
        assert far < 1e-12
        assert came > 1e-2  # a factor that was once zero would stay so
        assert drift == 0.0


# ---- windows that are left, skipped, or reach nothing ------------------------------------------------------


@two.add
def after_a_window_that_was_left() -> dict[str, list[list[str]]]:
    """Parameters with a gradient at the steps of a loop that follows one left in a window of layer "one"."""
    results = {}
    for wrap in ("ddp", "fsdp"):
        model = Branches()
        outer = wrapped(model, wrap)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen: list[list[str]] = []
        optimizer.register_step_pre_hook(
            lambda *_, model=model, seen=seen: seen.append(
                [name for name, parameter in model.named_parameters() if parameter.grad is not None]
            )
        )
        with GradSchedule([torch.ones(1, 4).double()] * 2, outer, optimizer, 2, timeout_s=20) as sched:
            for layer in ("one", "two"):
                for batch in sched:
                    sched.backward(outer(batch, [layer]).sum() * sched.scale())
                    if layer == "one":
                        break
                    sched.step()
        results[wrap] = seen
    return results


def test_a_window_that_is_left_leaves_nothing_to_the_next() -> None:
    expected = [[f"two.{part}" for part in ("0.weight", "0.bias", "2.weight", "2.bias")]]
    assert two.results(after_a_window_that_was_left) == [{"ddp": expected, "fsdp": expected}] * 2


@two.add
def skipped_beside_a_rank_without_data() -> dict[str, tuple[list[bool], float]]:
    """Rank 0's second window is infinite; rank 1 has no data for it, nor for the third."""
    results = {}
    for name in ("local-sgd", "delayed", "all-reduce"):
        model = Branches()
        data = [torch.ones(1, 4).double() for _ in range(3 if dist.get_rank() == 0 else 1)]
        if dist.get_rank() == 0:
            data[1][0, 0] = math.inf
        ddp = wrapped(model, "ddp")
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        skipped = []
        with GradSchedule(
            data, ddp, optimizer, 1, strategy=MAKERS[name](), scaler=scaler, weights={"n": len}, timeout_s=20
        ) as sched:
            for batch in sched:
                sched.backward(ddp(batch, ["one"]).square().sum() * sched.scale("n"))
                if info := sched.step():
                    skipped.append(info.skipped)
        results[name] = skipped, scaler.get_scale()
    return results


def test_a_rank_without_a_gradient_skips_and_scales_as_the_others() -> None:
    for rank in two.results(skipped_beside_a_rank_without_data):
        assert rank["all-reduce"] == ([False, True, False], 4.0)
        assert rank["local-sgd"] == ([False, True, False], 4.0)
        assert rank["delayed"] == ([False, False, True], 4.0)  # a step late


# ---- FSDP2: what cannot be mixed ---------------------------------------------------------------------------


class Sum(nn.Module):
    """Layers of one size, which collectives cannot tell apart; all units of their own, or none."""

    def __init__(self, *, units: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.always = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.large = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))
        for layer in list(self.children()) if units else ():
            fully_shard(layer)
        fully_shard(self)

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        for name in way.split():
            layer = getattr(self, name.removesuffix("*"))
            x = checkpoint(layer, x, use_reentrant=False) if name.endswith("*") else layer(x)
        return x


def said_of(ways: tuple[str, str], *, units: bool = True, timeout_s: float = 20, **settings: Any) -> str:
    """What a rank is told where rank 0 and 1 run these layers in the second window."""
    model = Sum(units=units)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = ["always", "always", "always", ways[dist.get_rank()]]
    try:
        with GradSchedule(data, model, optimizer, 2, timeout_s=timeout_s, **settings) as sched:
            for _ in range(2):
                for way in sched:
                    sched.backward(model(torch.ones(2, 4), way).sum() * sched.scale())
                    sched.step()
    except DisagreementError as error:
        return f"{error}; {''.join(getattr(error, '__notes__', []))}"
    return "nothing"


@two.add
def layers_of_any_size_that_differ() -> dict[str, str]:
    return {
        "another size": said_of(("one", "large")),
        "the larger one": said_of(("always large", "always two")),
        "one size": said_of(("one", "two"), skip_nonfinite=False),
        "more": said_of(("one", "one large")),
        "none": said_of(("large", "")),
        "recomputed": said_of(("large* one*", "large* one*")),
        "asked for": said_where_asked_for(),
    }


def said_where_asked_for() -> str:
    """As with NCCL, where TORCH_DISTRIBUTED_DEBUG=DETAIL was set."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with patch.object(wrapper, "_is_gloo", return_value=False):
            return said_of(("one", "large"))
    finally:
        dist.set_debug_level(level)


def test_with_gloo_other_layers_are_named_before_they_are_gathered_whatever_their_size() -> None:
    where = "ranks disagree on the layers that run in microbatch 2 of this window"
    for said in two.results(layers_of_any_size_that_differ):
        assert said.pop("recomputed") == "nothing"
        assert all("use DistributedDataParallel(" in each for each in said.values())
        for name in ("another size", "asked for"):
            assert said[name].startswith(f"{where}: 'one' on rank 0; 'large' on rank 1")
        assert said["the larger one"].startswith(f"{where}: 'large' on rank 0; 'two' on rank 1")
        assert said["one size"].startswith(f"{where}: 'one' on rank 0; 'two' on rank 1")
        assert said["more"].startswith(f"{where}: 'none' on rank 0; 'large' on rank 1")
        assert said["none"].startswith(f"{where}: 'large' on rank 0; 'none' on rank 1")


@pytest.mark.skipif(
    OLD_TORCH, reason="backward passes of an older torch mix gathering and reducing, and hang"
)
def test_ranks_that_run_other_layers_under_fsdp2_are_told_before_the_optimizer_steps() -> None:
    where = "ranks disagree on the layers that run in microbatch 2 of this window"
    for said in two.results(layers_that_differ):
        assert said.pop("same") == "nothing"
        assert said.pop("unseen").startswith("ranks disagree on order of collectives: ")
        assert all(
            "use DistributedDataParallel(model, find_unused_parameters=True)" in each
            for each in said.values()
        )
        assert said["layers"].startswith(f"{where}: 'always, one' on rank 0; 'always, two' on rank 1")
        assert said["order"].startswith(f"{where}: 'one, two' on rank 0; 'two, one' on rank 1")
        assert said["scaled"].startswith(f"{where}: 'one' on rank 0; 'two' on rank 1")
        assert said["clipped"].startswith(f"{where}: 'one' on rank 0; 'two' on rank 1")
        gradients = "ranks disagree on the parameters that get a gradient in this window"
        assert said["in one unit"].startswith(
            f"{gradients}: 'one.weight, one.bias' on rank 0; 'two.weight, two.bias' on rank 1"
        )
        assert said["more"].startswith(f"{where}: 'one' on rank 0; 'one, two' on rank 1")


@two.add
def replays_of_what_cannot_be_sent() -> str:
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = [(torch.ones(1, 1), lambda: 0)] * (1 - dist.get_rank())
    sched = GradSchedule(data, model, optimizer, 1, timeout_s=20)
    with pytest.raises(ValueError, match="cannot be sent") as caught:
        next(iter(sched))
    sched.close()
    return str(caught.value)


@two.add
def replays_that_differ() -> dict[str, str]:
    """Rank 1 replays the second microbatch, and takes another way than the rank whose batch it is."""
    said = {}
    for name, way in {
        "none": "",
        "size": "three",
        "more": "one two",
        "order": "two one",
        "same": "one",
    }.items():
        model = Branches()
        outer = wrapped(model, "fsdp")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = [torch.ones(1, 4).double()] * (2 - dist.get_rank())
        said[name] = "nothing"
        try:
            with GradSchedule(data, outer, optimizer, 2, timeout_s=20) as sched:
                for number, batch in enumerate(sched):
                    ways = (way if number and dist.get_rank() else "one").split()
                    out = outer(batch, ways) if ways else next(outer.parameters()).to_local()
                    sched.backward(out.sum() * sched.scale())
                    sched.step()
        except DisagreementError as error:
            said[name] = str(error)
    return said


def test_a_replay_that_takes_another_way_is_named_before_a_layer_is_gathered() -> None:
    where = "ranks disagree on the layers that run in microbatch 2 of this window"
    for said in two.results(replays_that_differ):
        assert said == {
            "none": f"{where}: 'the model itself' on rank 0; 'none' on rank 1",
            "size": f"{where}: 'one' on rank 0; 'three' on rank 1",
            "more": f"{where}: 'none' on rank 0; 'two' on rank 1",
            "order": f"{where}: 'one' on rank 0; 'two' on rank 1",
            "same": "nothing",
        }


@two.add
def layers_that_differ() -> dict[str, str]:
    """Without telling each other of each layer, as with NCCL."""
    if OLD_TORCH:
        return {}
    scaler = torch.amp.GradScaler("cpu")
    with patch.object(wrapper, "_is_gloo", return_value=False):
        return what_is_compared_in_the_end(scaler)


def what_is_compared_in_the_end(scaler: Any) -> dict[str, str]:
    return {
        "layers": said_of(("always one", "always two")),
        "order": said_of(("one two", "two one")),
        "scaled": said_of(("one", "two"), scaler=scaler),
        "clipped": said_of(("one", "two"), max_norm=1.0),
        "in one unit": said_of(("one", "two"), units=False),
        "same": said_of(("one", "one")),
        "unseen": said_of(("one", "two"), skip_nonfinite=False),
        # Last: connections are closed then.
        "more": said_of(("one", "one two"), timeout_s=2),
    }


def test_a_batch_that_cannot_be_sent_to_a_rank_without_data_is_named_on_all_ranks() -> None:
    first, second = two.results(replays_of_what_cannot_be_sent)
    assert first == second
    assert "ranks without data replay batches of rank 0, which cannot be sent: " in first


def test_a_rank_that_is_only_behind_the_others_ran_no_other_layers() -> None:
    ahead = ["one", "two", "", "one", ""]
    assert differing_layers([ahead, ahead[:1], ahead[:4], []], (0, 1, 2, 3)) is None
    error = differing_layers([ahead, ["one", "two", "", "two"]], (0, 1))
    assert "microbatch 2 of this window: 'one' on rank 0; 'two' on rank 1" in str(error)
