"""The benchmark of strategies: what it concludes from runs, its learning rate, and one short run in ranks."""

import json
import math

import pytest
import torch

from benchmarks.training import strategies
from benchmarks.training.strategies import ARMS, REFERENCE, Setup, lr_at, summary, table, train, windows
from dataflow.testing import run_ranks

pytest.importorskip("scipy")


def runs(losses, sent=100):
    return [
        {"arm": arm, "seed": seed, "loss": loss, "bytes_a_step": sent, "ms_a_step": 1.0}
        for arm, found in losses.items()
        for seed, loss in enumerate(found)
    ]


def test_parity_is_an_interval_of_paired_differences_that_reaches_zero():
    reference = [2.0, 2.1, 2.2, 2.3]
    noise = [0.01, -0.01, 0.012, -0.008]
    found = {
        row["arm"]: row
        for row in summary(
            runs(
                {
                    REFERENCE: reference,
                    "int8": [a + b for a, b in zip(reference, noise, strict=True)],
                    "diloco 16": [a + 0.1 + b for a, b in zip(reference, noise, strict=True)],
                    "local-sgd 8": [a - 0.1 + b for a, b in zip(reference, noise, strict=True)],
                    "delayed": [None, *reference[1:]],
                }
            )
        )
    }
    assert found["int8"]["parity"]
    assert found["local-sgd 8"]["parity"]
    assert not found["diloco 16"]["parity"]
    assert found["diloco 16"]["difference"] == pytest.approx(0.101)
    # t(0.975, 3 degrees of freedom) = 3.182
    deviation = torch.tensor(noise).std().item()
    assert found["int8"]["half_interval"] == pytest.approx(3.182 * deviation / 2, rel=1e-3)
    assert found["delayed"]["loss"] is None
    assert not found["delayed"]["parity"]
    assert "diverged" in table(list(found.values()))


def test_an_arm_without_pairs_is_left_out():
    assert [row["arm"] for row in summary(runs({REFERENCE: [1.0, 2.0], "int8": [1.0]}))] == [REFERENCE]


def test_the_learning_rate_rises_and_falls_and_never_is_zero():
    setup = Setup(steps=100, lr=1.0)
    rates = [lr_at(setup, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(0.919)
    assert 0.1 < rates[-1] < 0.12


def test_windows_are_the_same_for_the_same_key_and_lie_in_the_text():
    text = torch.arange(200, dtype=torch.uint8)
    found = windows(text, 5, 8, key=3)
    assert found.shape == (5, 9)
    assert torch.equal(found, windows(text, 5, 8, key=3))
    assert not torch.equal(found, windows(text, 5, 8, key=4))
    assert torch.equal(found[:, 1:] - found[:, :-1], torch.ones(5, 8, dtype=torch.int64))


def test_every_arm_trains_for_some_steps(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"to be or not to be, that is the question. " * 100)
    setup = Setup(steps=20, batch=2, length=8, width=8, held_out=4)
    todo = [(arm, 0) for arm in ARMS]
    found = run_ranks(train, 2, args=(str(text), setup, todo), start_method="forkserver")[0]
    assert [run["arm"] for run in found] == list(ARMS)
    assert all(math.isfinite(run["loss"]) for run in found)
    assert json.loads(json.dumps(found)) == found
    by_arm = {run["arm"]: run for run in found}
    assert by_arm["local-sgd 8"]["bytes_a_step"] < by_arm[REFERENCE]["bytes_a_step"] / 4


def test_what_ran_already_does_not_run_again(tmp_path, capsys):
    text, results = tmp_path / "text", tmp_path / "found.json"
    text.write_bytes(b"abc" * 100)
    started = []

    def pretend(_, world, *, args, **settings):
        started.append(args[2])
        return [
            [run for arm, seed in args[2] for run in runs({arm: [2.0 + seed] * 3}) if run["seed"] == seed]
        ]

    told = ["--text", str(text), "--results", str(results), "--seeds", "2", "--arms", f"{REFERENCE};int8"]
    strategies.main(told, pretend)
    strategies.main(told, pretend)
    assert started == [[(REFERENCE, seed), ("int8", seed)] for seed in range(2)]
    assert len(json.loads(results.read_text())["runs"]) == 4
    assert str(tmp_path) not in results.read_text()
    assert "| int8 |" in capsys.readouterr().out
