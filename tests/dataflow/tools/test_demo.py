"""`dataflow demo`: a tiny run in full, and its parts against independent oracles."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from dataflow import ShardedDataset
from dataflow.tools.cli import main
from dataflow.tools.demo import (
    ByteTransformer,
    losses_text,
    next_byte_loss,
    read_tars,
    waiting_text,
    write_corpus,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), max_modules=25)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a tiny demo on two ranks, as its JSON file tells it."""
    path = tmp_path_factory.mktemp("report") / "report.json"
    sizes = ["--steps", "6", "--batch-size", "4", "--modules", "25"]
    result = CliRunner().invoke(main, ["demo", *sizes, "--json", str(path)], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(path.read_text()) | {"output": " ".join(result.output.split())}


def test_the_resumed_losses_are_those_of_the_uninterrupted_run(report):
    runs = report["runs"]
    assert report["identical"] is True
    assert len(runs["whole"]["losses"]) == 6
    assert runs["interrupted"]["losses"] + runs["resumed"]["losses"] == runs["whole"]["losses"]
    assert runs["resumed"]["first_step"] == 3
    assert "identical: 6 losses" in report["output"]


def test_the_losses_begin_at_that_of_chance_and_fall(report):
    losses = report["runs"]["whole"]["losses"]
    assert losses[0] == pytest.approx(np.log(256), rel=0.1)
    assert losses[-1] < losses[0] - 0.5


def test_every_run_tells_its_figures(report):
    for run in report["runs"].values():
        assert run["samples_per_s"] > 0
        assert run["seconds"] > 0
        assert 0 <= run["waiting_share"] < 1
        assert run["first_batch_s"] > 0
        assert run["peak_bytes"] > 50e6
    assert report["runs"]["whole"]["loader_peak_bytes"] > 0
    assert report["runs"]["interrupted"]["loader_state"]["position"] == 3 * 2 * 4


def test_the_samples_of_a_step_are_named_at_the_end(report):
    explained = report["explained"]
    assert 3 <= explained["step"] < 6
    assert len(set(explained["samples"])) == 2 * 4
    assert f"step {explained['step']} had the largest loss of the second half" in report["output"]
    assert "Its 8 samples follow from the last state alone: tokens-000000.bin, byte" in report["output"]


def test_the_temporary_folder_is_gone(report):
    assert not Path(report["settings"]["folder"]).exists()


def test_a_folder_that_is_given_stays(tmp_path):
    folder = tmp_path / "kept"
    arguments = ["demo", "--ranks", "1", "--steps", "2", "--batch-size", "1", "--modules", "3"]
    result = CliRunner().invoke(main, [*arguments, "--folder", str(folder)], catch_exceptions=False)
    assert result.exit_code == 0
    names = {path.name for path in folder.iterdir()}
    assert {"tokens-000000.bin", "tokens.catalog", "modules-000000.tar", "checkpoint.pt"} <= names


def test_a_loss_that_differs_in_one_bit_fails_the_command(monkeypatch):
    monkeypatch.setattr("dataflow.tools.demo.run_demo", lambda **settings: {"identical": False})
    assert CliRunner().invoke(main, ["demo"]).exit_code == 1


@pytest.mark.parametrize("wrong", [("--steps", "1"), ("--ranks", "0"), ("--batch-size", "0")])
def test_settings_that_cannot_work_are_refused(wrong):
    result = CliRunner().invoke(main, ["demo", *wrong])
    assert result.exit_code == 2
    assert "is not in the range" in result.output


# ---- data ----------------------------------------------------------------------------------------------


def test_the_shards_hold_the_sources_of_this_python(corpus, tmp_path):
    folder = Path(corpus["folder"])
    read = read_tars(folder)
    assert (read["modules"], read["bytes"]) == (corpus["num_modules"], corpus["num_bytes"])
    assert corpus["num_modules"] == 25
    dataset = ShardedDataset(f"{folder}/modules-*.tar")
    modules = [sample["json"] for sample in (dataset[i] for i in range(25))]
    names = [module["name"] for module in modules]
    assert names == sorted(names, key=lambda name: name.replace(".", "/"))
    spec = importlib.util.find_spec(names[-1])
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_bytes()
    assert (modules[-1]["bytes"], modules[-1]["lines"]) == (len(source), source.count(b"\n"))
    files = sorted(folder.glob("tokens-*.bin"))
    assert source in b"".join(path.read_bytes() for path in files)


def test_the_shards_are_a_function_of_this_python_alone(corpus, tmp_path):
    write_corpus(tmp_path, max_modules=25)
    for path in sorted(tmp_path.glob("*-*")):
        assert path.read_bytes() == (Path(corpus["folder"]) / path.name).read_bytes()


# ---- model and words -----------------------------------------------------------------------------------


def test_the_model_sees_only_the_past():
    torch.manual_seed(0)
    model = ByteTransformer(16)
    text = torch.randint(0, 256, (2, 16))
    other = text.clone()
    other[:, 10:] = 0
    assert torch.equal(model(text)[:, :10], model(other)[:, :10])
    assert not torch.allclose(model(text)[:, 10:], model(other)[:, 10:])


def test_the_loss_of_uniform_logits_is_the_logarithm_of_the_vocabulary():
    flat = torch.nn.Module()
    flat.forward = lambda tokens: torch.zeros(*tokens.shape, 256)
    assert next_byte_loss(flat, torch.zeros(2, 9, dtype=torch.int64)).item() == pytest.approx(np.log(256))


def test_the_first_step_that_differs_is_named():
    assert losses_text([1.0, 2.0], [1.0, 2.0], 1).startswith("identical")
    assert losses_text([1.0, 2.0], [1.0, np.nextafter(2.0, 3)], 1).startswith("different: step 2")
    different = "different: step 2 has loss 2.0 uninterrupted and {} resumed"
    assert losses_text([1.0, 2.0], [1.0, 2.5], 1) == different.format(2.5)
    assert losses_text([1.0, 2.0], [1.0], 1) == different.format("none")


@pytest.mark.parametrize(
    ("waiting", "says"),
    [(0.01, "the model is the limit"), (0.2, "the loader made the training wait for 20%")],
)
def test_who_waits_is_said_from_the_figures(waiting, says):
    assert says in waiting_text(waiting)
