"""Ray Train: workers get their parts, and a lost node leaves the others with the samples that come next."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from datasets_kit import rank

from dataflow import DataLoader, ShardedDataset

pytest.importorskip("ray.train.torch")
import ray
import ray.train
from ray import cluster_utils

ROOT = Path(__file__).parents[2]
PATHS = [str(ROOT), str(ROOT / "tests" / "kits"), str(Path(__file__).parent), str(ROOT / "examples")]
STORE_BYTES = 80 << 20

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """What workers import, here too; what dies is noticed at once.

    By the environment, not by a `runtime_env`: so workers are processes that Ray has started ahead.
    """
    for name in PATHS:
        monkeypatch.syspath_prepend(name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(PATHS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "30")


@pytest.fixture
def two_cpus(paths: None) -> Iterator[None]:
    settings = {"worker_niceness": 0}
    quiet = {"include_dashboard": False, "log_to_driver": False}
    ray.init(num_cpus=2, object_store_memory=STORE_BYTES, _system_config=settings, **quiet)
    yield
    ray.shutdown()


@pytest.fixture
def two_nodes(paths: None) -> Iterator[None]:
    """Two nodes of one CPU; this process is on the first."""
    node = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    settings = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "worker_niceness": 0}
    head = {**node, "include_dashboard": False, "_system_config": settings}
    made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    made.add_node(**node)
    ray.init(address=made.address, log_to_driver=False)
    yield
    ray.shutdown()
    made.shutdown()


def train_and_be_lost(config: dict[str, Any]) -> None:
    """The example's training; what each step had is noted, and after some of them a process dies, once."""
    import ray_train

    context, report = ray.train.get_context(), ray.train.report
    number, size, notes = context.get_world_rank(), context.get_world_size(), Path(config["notes"])
    is_on_head = ray.get_runtime_context().get_node_id() == config["head"]

    def noted(metrics: dict[str, Any], checkpoint: Any = None) -> None:
        step = metrics["step"]
        with (notes / f"{number}.rows").open("a") as file:
            print(json.dumps([step, size, metrics["samples"]]), file=file)
        report(metrics, checkpoint=checkpoint)
        is_whose = not is_on_head if config["loses"] == "node" else number == size - 1
        if is_whose and step in config["lost_after"] and not (died := notes / f"{step}.died").exists():
            died.touch()
            if config["loses"] == "node":
                os.kill(os.getppid(), signal.SIGKILL)  # its raylet
            os.kill(os.getpid(), signal.SIGKILL)

    ray.train.report = noted
    ray_train.train(config)


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The example's `fit`, whose workers die after some steps."""

    def fit(workers: Any, **how: Any) -> Any:
        import ray_train

        def trainer(_: Any, *, train_loop_config: Any, run_config: Any, **settings: Any) -> Any:
            head = ray.get_runtime_context().get_node_id()
            config = {**train_loop_config, "head": head, "notes": str(tmp_path), **how}
            run_config.failure_config = ray.train.FailureConfig(max_failures=how["failures"])
            return made(train_and_be_lost, train_loop_config=config, run_config=run_config, **settings)

        made = ray_train.TorchTrainer
        with monkeypatch.context() as patch:
            patch.setattr(ray_train, "TorchTrainer", trainer)
            return ray_train.fit(str(tmp_path), workers)

    return fit


def samples_of_steps(folder: Path) -> dict[tuple[int, int], list[list[int]]]:
    """By step and number of workers: the samples of each; a step that was lost may be there again."""
    found: dict[tuple[int, int], dict[str, list[int]]] = {}
    for file in sorted(folder.glob("*.rows")):
        for line in file.read_text().splitlines():
            step, size, samples = json.loads(line)
            before = found.setdefault((step, size), {}).setdefault(file.name, samples)
            assert before == samples, "again the same"
    return {key: [*parts.values()] for key, parts in found.items()}


def check_exact(folder: Path, with_two: int) -> None:
    """Check that up to a step two workers, and one from then on, had what the plain loop has."""
    found = samples_of_steps(folder)
    with DataLoader(
        ShardedDataset(f"{folder}/points.tar"), 20, shuffle=True, seed=1, topology=rank(0, 1)
    ) as loader:
        plain = [sorted(batch["index"].tolist()) for batch in loader]
    of_two = {step: parts for (step, size), parts in found.items() if size == 2}
    of_one = {step: parts for (step, size), parts in found.items() if size == 1}
    assert list(of_two) == [*range(1, with_two + 1)]
    first = min(of_one)
    assert 1 < first <= with_two + 1, "it goes on behind a checkpoint"
    assert sorted(of_one) == [*range(first, 11)]
    for steps in (of_two, of_one):
        for step, parts in steps.items():
            assert sorted(chain(*parts)) == plain[step - 1], f"step {step}"


@pytest.mark.full
def test_lost_workers_start_again_and_another_number_of_them_goes_on(
    two_cpus: None, fit: Callable[..., Any], tmp_path: Path
) -> None:
    """Two workers of which one dies, then one, which dies and starts again by Ray's `FailureConfig`."""
    with pytest.raises(ray.train.TrainingFailedError):
        fit(2, loses="worker", lost_after=(4,), failures=0)
    result = fit(1, loses="worker", lost_after=(7,), failures=1)
    assert result.metrics["step"] == 10
    assert {file.name for file in tmp_path.glob("*.died")} == {"4.died", "7.died"}
    check_exact(tmp_path, with_two=4)


@pytest.mark.full
def test_an_elastic_training_that_loses_a_node_goes_on_with_one_worker(
    two_nodes: None, fit: Callable[..., Any], tmp_path: Path
) -> None:
    """Ray looks for lost nodes each 20 s."""
    assert fit((1, 2), loses="node", lost_after=(4,), failures=2).metrics["step"] == 10
    check_exact(tmp_path, with_two=4)
