"""Builders that are Ray actors give what threads give, on a real cluster whose actors and nodes die."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from datasets_kit import Made, Make, make_parquet, make_tar
from forked_kit import fast_ranks
from http_kit import slowstore
from loader_kit import session_of
from parameters_kit import in_full
from threads_kit import our_threads, threads_left

from dataflow import DataLoader, Mixture, SampleError, ShardedDataset, ShardWriter, Shuffle
from dataflow.actors import builders
from dataflow.actors.builders import RayBuilders
from dataflow.actors.cluster import BuilderActorError, RayClusterError
from dataflow.executors.versions import Versions
from prefetch.errors import StallError
from sharding.errors import ShardChangedError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'dataflow-loader[ray]'")
cluster_utils = pytest.importorskip("ray.cluster_utils")

# What Ray warns of is its own: settings to come, and sockets that its processes leave.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]

TIMEOUT_S = 60.0
STORE_BYTES = 80 << 20
SECRET = "a-key-that-nobody-may-see"
ROOT = Path(__file__).parents[2]
PATHS = [str(ROOT), str(ROOT / "tests" / "kits"), str(Path(__file__).parent)]
ZONE = "ray.io/availability-zone"
NEAR = {ZONE: "near"}


def connect(address: str) -> None:
    """Connect this process to a cluster whose actors can import this module."""
    variables = {"PYTHONPATH": os.pathsep.join(PATHS)}
    ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": variables})


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A node without CPUs, as a training node that has none to spare, and one with two, in another zone."""
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES, "labels": NEAR}
    made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    made.add_node(num_cpus=2, object_store_memory=STORE_BYTES, labels={**NEAR, ZONE: "far"})
    connect(made.address)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> ShardedDataset:
    """Many more samples than are built ahead."""
    folder = tmp_path_factory.mktemp("large")
    for shard in range(2):
        with ShardWriter(f"{folder}/{shard}.tar") as writer:
            for i in range(1000 * shard, 1000 * shard + 1000):
                writer.write({"__key__": f"{i:05d}", "cls": i, "txt": f"text {i}"})
    return ShardedDataset(str(folder / "*.tar"), decode={"cls": "int", "txt": "text"}, columns=["cls"])


def with_transform(dataset: ShardedDataset, transform: Any) -> ShardedDataset:
    """A view of it, with another transform."""
    view = dataset.take(len(dataset))
    view.transform = transform
    return view


def in_actors(
    dataset: Any, batch_size: int, shuffle: Any = None, *, count: int | None = 1, **options: Any
) -> Any:
    options.setdefault("timeout", TIMEOUT_S)
    return DataLoader(dataset, batch_size, shuffle, num_workers=count, builders="ray", **options)


def builders_of(loader: DataLoader[Any, Any]) -> RayBuilders:
    builders = session_of(loader).resources.engine._builders
    assert isinstance(builders, RayBuilders)
    return builders


def drawn(sample: dict[str, Any], *, rng: np.random.Generator) -> dict[str, Any]:
    """From its own generator and the three global ones; and who did it, where."""
    mine = [random.random(), float(np.random.random()), float(torch.rand(()))]
    return {
        "cls": sample["cls"],
        "draw": rng.random(),
        "mine": mine,
        "by": os.getpid(),
        "node": node_number(),
    }


def node_number() -> int:
    return int(ray.get_runtime_context().get_node_id()[:8], 16) if ray.is_initialized() else 0


def draws(batches: Any) -> list[Any]:
    return [(batch["cls"].tolist(), batch["draw"].tolist()) for batch in batches]


def by_threads(dataset: Any, batch_size: int, shuffle: Any = None, **options: Any) -> list[Any]:
    with DataLoader(dataset, batch_size, shuffle, **options) as loader:
        return draws(loader)


# ---- batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["parquet", *in_full("tar", "tar.gz", "tokens.bin")])
def test_batches_of_shards_that_actors_read_are_those_that_threads_build(
    cluster: Any, made: Make, name: str
) -> None:
    dataset = made(name).open(transform=lambda sample: {"n": len(repr(sorted(sample.items())))})
    with DataLoader(dataset, 3, shuffle=Shuffle("window"), seed=5) as loader:
        whole = [batch["n"].tolist() for _ in range(2) for batch in loader]
    with in_actors(dataset, 3, Shuffle("window"), seed=5) as loader:
        assert [batch["n"].tolist() for _ in range(2) for batch in loader] == whole
        assert loader.stats().read_bytes


@pytest.mark.parametrize("name", ["tar", *in_full("parquet")])
def test_batches_of_values_that_are_shipped_are_those_that_threads_build(
    cluster: Any, made: Make, name: str
) -> None:
    dataset = made(name).open(transform=lambda sample: {"n": len(repr(sorted(sample.items())))})
    with DataLoader(dataset, 3, shuffle=True, seed=5) as loader:
        whole = [batch["n"].tolist() for _ in range(2) for batch in loader]
    with in_actors(dataset, 3, True, seed=5, ship_blocks=True) as loader:
        assert [batch["n"].tolist() for _ in range(2) for batch in loader] == whole


@pytest.mark.full
def test_remote_shards_are_read_value_by_value_and_secrets_are_in_no_log(cluster: Any, made: Make) -> None:
    folder = made("tar").folder
    with slowstore(folder) as url:
        urls = [f"{url}/{shard.name}" for shard in made("tar").shards]
        options = {"headers": {"X-Key": SECRET}}
        dataset = ShardedDataset(
            urls, decode={"cls": "int"}, columns=["cls"], transform=drawn, storage_options=options
        )
        whole = by_threads(dataset, 3, Shuffle("full"))
        with in_actors(dataset, 3, Shuffle("full")) as loader:
            assert draws(loader) == whole
    logs = [*Path(cluster.head_node.get_logs_dir_path()).iterdir()]
    assert logs
    assert not [log for log in logs if log.is_file() and SECRET.encode() in log.read_bytes()]


@pytest.mark.full
def test_columns_of_every_kind_cross_and_are_writable(cluster: Any, tmp_path: Path) -> None:
    dataset = make_parquet(tmp_path).open(batch_transform=dict)
    with DataLoader(dataset, 4, shuffle=True) as loader:
        whole = [repr(batch) for batch in loader]
    with in_actors(dataset, 4, True) as loader:
        batches = [*loader]
    assert [repr(batch) for batch in batches] == whole
    batches[0]["x"][0] = 5
    assert batches[0]["x"][0] == 5


@pytest.mark.full
def test_mixtures_and_draws_are_those_of_threads_and_actors_do_the_work(cluster: Any, tmp_path: Path) -> None:
    dataset = make_tar(tmp_path).open(transform=drawn)
    mixture = Mixture({dataset: 2, dataset.subset(range(4)): 1})
    with in_actors(mixture, 3, True, count=2) as loader:
        batches = [*loader]
    assert draws(batches) == by_threads(mixture, 3, True)
    assert os.getpid() not in {int(pid) for batch in batches for pid in batch["by"]}


@pytest.mark.full
def test_global_generators_draw_the_same_for_any_number_of_actors(cluster: Any, tmp_path: Path) -> None:
    dataset = make_tar(tmp_path).open(transform=drawn)
    seen = []
    for options in ({"builders": "ray", "num_workers": 1}, {"workers": "process", "num_workers": 2}):
        with DataLoader(dataset, 3, True, timeout=TIMEOUT_S, **options) as loader:
            seen.append([[x.tolist() for x in batch["mine"]] for batch in loader])
    assert seen[0] == seen[1]


def test_a_run_resumes_in_the_middle_with_other_builders(cluster: Any, tmp_path: Path) -> None:
    dataset = make_tar(tmp_path).open(transform=drawn)
    whole = by_threads(dataset, 3, True)
    with in_actors(dataset, 3, True) as loader:
        head = draws(islice(iter(loader), 5))
        state = loader.state_dict()
    with DataLoader(dataset, 3, True) as loader:
        loader.load_state_dict(state)
        rest = draws(loader)
    assert head + rest == whole
    with in_actors(dataset, 3, True) as loader:
        loader.load_state_dict(state)
        assert draws(loader) == rest


# ---- errors -----------------------------------------------------------------------------------------------


def odd(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] % 5 == 3:
        raise ZeroDivisionError(f"no {sample['cls']}")
    return sample


@pytest.mark.parametrize("ship_blocks", [False, *in_full(True)])
def test_an_error_names_shard_and_key_as_by_threads(
    cluster: Any, tmp_path: Path, *, ship_blocks: bool
) -> None:
    dataset = make_tar(tmp_path).open(transform=odd, columns=["cls"])
    errors = []
    actors = {"builders": "ray", "num_workers": 1, "timeout": TIMEOUT_S, "ship_blocks": ship_blocks}
    for options in ({}, actors):
        with DataLoader(dataset, 3, **options) as loader, pytest.raises(SampleError) as caught:
            list(loader)
        errors.append(caught.value)
    assert str(errors[0]) == str(errors[1])
    assert ".tar" in str(errors[1])
    assert type(errors[1].__cause__) is ZeroDivisionError
    assert any("in Ray actor" in note for note in errors[1].__cause__.__notes__)


@pytest.mark.full
def test_samples_that_are_skipped_are_those_of_threads_and_listed(cluster: Any, tmp_path: Path) -> None:
    dataset = make_tar(tmp_path).open(transform=odd, on_error="skip", columns=["cls"])
    seen = []
    for options in ({}, {"builders": "ray", "num_workers": 1, "timeout": TIMEOUT_S}):
        with DataLoader(dataset, 4, shuffle=True, **options) as loader:
            batches = [batch["cls"].tolist() for batch in loader]
            stats = loader.stats()
        seen.append((batches, stats.skipped_samples, sorted(stats.skipped)))
    assert seen[0] == seen[1]
    assert seen[0][1]


def test_a_transform_that_cannot_be_sent_is_an_error_that_says_so(cluster: Any, tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(sample: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return sample

    with (
        in_actors(make_tar(tmp_path).open(transform=locked), 2) as loader,
        pytest.raises(ValueError, match="cannot be sent to Ray actors"),
    ):
        next(iter(loader))


def test_a_local_shard_that_actors_cannot_reach_is_refused_by_name(cluster: Any, tmp_path: Path) -> None:
    made = make_tar(tmp_path)
    dataset = made.open(transform=drawn)
    made.shards[0].unlink()  # what another machine sees of a path that only this one has
    with in_actors(dataset, 2) as loader, pytest.raises(RayClusterError) as caught:
        next(iter(loader))
    assert str(made.shards[0].parent) in str(caught.value)
    assert "ship_blocks=True" in str(caught.value)


@pytest.mark.full
def test_a_shard_that_has_changed_since_it_was_indexed_is_refused(cluster: Any, tmp_path: Path) -> None:
    made = make_tar(tmp_path)
    dataset = made.open(transform=drawn)
    os.utime(made.shards[0], (1, 1))
    with in_actors(dataset, 2) as loader, pytest.raises(ShardChangedError, match="modification time"):
        next(iter(loader))


def test_actors_of_another_version_are_refused_with_both(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_tar(tmp_path).open(transform=drawn)
    here = Versions.here()
    ours = Versions(python=here.python, dataflow="0.0.7", torch=here.torch)
    monkeypatch.setattr(Versions, "here", lambda: ours)
    with in_actors(dataset, 2) as loader, pytest.raises(RayClusterError) as caught:
        next(iter(loader))
    assert "dataflow 0.0.7" in str(caught.value)
    assert f"dataflow {here.dataflow}" in str(caught.value)


def test_a_cluster_that_is_not_there_is_an_error_that_says_how_to_start_one() -> None:
    script = "from dataflow.actors.cluster import connected_ray\nconnected_ray()"
    environment = {**os.environ, "RAY_ADDRESS": "local"}  # Ray itself would start one
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert "RayClusterError: no Ray cluster was found" in ended.stderr
    assert "ray start --head" in ended.stderr


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        in_actors(make_tar(tmp_path).open(transform=odd), 2) as loader,
        pytest.raises(ImportError, match=r"dataflow-loader\[ray\]"),
    ):
        next(iter(loader))


@pytest.mark.full
def test_a_wait_for_actors_that_the_cluster_has_no_room_for_says_so(cluster: Any, tmp_path: Path) -> None:
    dataset, before = make_tar(tmp_path).open(transform=drawn), our_threads()
    with in_actors(dataset, 3, count=2) as loader:
        assert draws(loader)
        with in_actors(dataset, 3, count=1, timeout=4) as other, pytest.raises(StallError) as caught:
            next(iter(other))
    assert "none of the 1 Ray actors" in str(caught.value)
    assert threads_left(but=before) == []


@pytest.mark.parametrize(
    "options",
    [
        {"builders": "ray", "num_workers": 0},
        {"builders": "ray", "num_workers": 1, "workers": "thread"},
        {"builders": "dask", "num_workers": 1},
        {"ship_blocks": True},
    ],
)
def test_arguments_that_contradict_are_refused(tmp_path: Path, options: Any) -> None:
    with pytest.raises(ValueError, match="builders"):
        DataLoader(make_tar(tmp_path).open(), 2, **options)


# ---- where, and beside whom -------------------------------------------------------------------------------


@pytest.mark.full
def test_actors_are_near_the_trainer_where_there_is_room(cluster: Any, large: ShardedDataset) -> None:
    dataset = with_transform(large, drawn)
    node = cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, labels=NEAR)
    number = int(node.node_id[:8], 16)
    with in_actors(dataset, 8, True) as loader:
        assert {where for batch in loader for where in batch["node"].tolist()} == {number}
    cluster.remove_node(node, allow_graceful=True)


def batches_of_rank(address: str, urls: Any, count: int | None) -> tuple[list[int], int]:
    """In a rank: its samples, which have come as threads build them, and how many actors it had."""
    for rank in range(dist.get_world_size()):  # of drivers that start at once, Ray's store can abort one
        if rank == dist.get_rank():
            connect(address)
        dist.barrier()
    dataset = ShardedDataset(urls, decode={"cls": "int"}, columns=["cls"], transform=drawn)
    with in_actors(dataset, 8, True, count=count) as loader:
        batches = draws(loader)
        assert batches == by_threads(dataset, 8, True)
        return [cls for batch, _ in batches for cls in batch], loader.num_workers


@pytest.mark.parametrize("ranks_and_actors", [(2, None), *in_full((2, 4), (3, None), (3, 2))])
def test_ranks_share_a_cluster_that_has_fewer_cpus_than_they_would_like(
    cluster: Any, large: ShardedDataset, ranks_and_actors: tuple[int, int | None]
) -> None:
    world_size, count = ranks_and_actors
    arguments = cluster.address, large.catalog.urls, count
    ranks = fast_ranks(batches_of_rank, world_size, args=arguments, timeout_s=100)
    samples = [sample for own, _ in ranks for sample in own]
    assert set(samples) == set(range(2000))
    assert len(samples) - 2000 < world_size  # the last step is filled up
    assert {number for _, number in ranks} == {count or 1}


def late_rank(address: str, urls: Any) -> None:
    """In a rank: the first has all CPUs before the second begins, and keeps them until that one has ended."""
    connect(address)
    dataset = ShardedDataset(urls, decode={"cls": "int"}, columns=["cls"], transform=drawn)
    with in_actors(
        dataset, 8, True, count=4
    ) as loader:  # made together: ranks tell each other where they are
        if dist.get_rank():
            builders._PATIENCE_S = 1.0
            dist.barrier()
        epochs = [draws(loader)]
        actors = builders_of(loader)
        if dist.get_rank():
            assert [actor.reserves for actor in actors._actors if actor.is_ready] == [False]
        else:
            while actors.num_begun < 2 and len(epochs) < 1000:
                epochs.append(draws(loader))
            dist.barrier()
        dist.barrier()
    with DataLoader(dataset, 8, True) as loader:
        assert epochs == [draws(loader) for _ in epochs]


@pytest.mark.full
def test_a_rank_that_comes_when_all_cpus_are_taken_goes_on_all_the_same(
    cluster: Any, large: ShardedDataset
) -> None:
    fast_ranks(late_rank, 2, args=(cluster.address, large.catalog.urls), timeout_s=100)


# ---- deaths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ship_blocks", [False, *in_full(True)])
def test_a_node_that_is_killed_costs_no_batch(
    cluster: Any, large: ShardedDataset, *, ship_blocks: bool
) -> None:
    dataset = with_transform(large, drawn)
    node = cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    with in_actors(dataset, 8, True, count=4, ship_blocks=ship_blocks) as loader:
        number, epoch = int(node.node_id[:8], 16), 1
        while not any(number in batch["node"].tolist() for batch in [*loader]):
            epoch += 1  # its actors have not begun
        loop = iter(loader)
        batches = [next(loop)]
        while number not in batches[-1]["node"].tolist():
            batches.append(next(loop))
        assert len(batches) < len(loader) // 2
        cluster.remove_node(node, allow_graceful=False)
        batches.extend(loop)
    with DataLoader(dataset, 8, True) as loader:
        loader.set_epoch(epoch)
        assert draws(batches) == draws(loader)


def killed_once(flag: Path, at: int) -> Any:
    """A transform that fails for some samples, and whose first process is killed at one of them."""

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == at and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return odd(sample)

    return transform


@pytest.mark.full
def test_a_chunk_is_built_again_and_its_bad_samples_are_decided_about_once(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flag = tmp_path / "killed"
    made = make_tar(tmp_path)
    dataset = made.open(transform=killed_once(flag, 20), on_error="skip", columns=["cls"])
    with in_actors(dataset, 4) as loader:
        batches = [batch["cls"].tolist() for batch in loader]
        skipped = loader.stats().skipped_samples
    assert flag.exists()
    assert "has died" in caplog.text
    with DataLoader(dataset, 4) as loader:
        assert batches == [batch["cls"].tolist() for batch in loader]
        assert skipped == loader.stats().skipped_samples


def killed(sample: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_chunk_that_kills_two_actors_is_an_error_that_names_them(cluster: Any, tmp_path: Path) -> None:
    dataset = make_tar(tmp_path).open(transform=killed)
    with in_actors(dataset, 4) as loader, pytest.raises(BuilderActorError) as caught:
        list(loader)
    assert str(caught.value).count("(pid ") == 2


@pytest.mark.full
def test_actors_that_the_cluster_has_no_room_for_are_used_once_it_has(
    cluster: Any, large: ShardedDataset
) -> None:
    dataset = with_transform(large, drawn)
    with in_actors(dataset, 8, True, count=3) as loader:
        assert draws(loader) == by_threads(dataset, 8, True)
        node = cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        number = int(node.node_id[:8], 16)
        assert any(number in batch["node"].tolist() for _ in range(1000) for batch in loader)
    cluster.remove_node(node, allow_graceful=True)


TRAINER = """
import sys
import ray
sys.path[:0] = {paths!r}
from dataflow import DataLoader, ShardedDataset
from test_ecosystem_ray import drawn
variables = {{"PYTHONPATH": ":".join(sys.path[:3])}}
ray.init(address={address!r}, log_to_driver=False, runtime_env={{"env_vars": variables}})
dataset = ShardedDataset({source!r}, decode={{"cls": "int"}}, columns=["cls"], transform=drawn)
with DataLoader(dataset, 8, builders="ray", num_workers=1) as loader:
    loop = iter(loader)
    next(loop)
    print("began", flush=True)
    sys.stdin.read()
"""


def test_a_trainer_goes_on_when_another_one_is_killed(cluster: Any, large: ShardedDataset) -> None:
    dataset = with_transform(large, drawn)
    script = TRAINER.format(
        paths=PATHS,
        address=cluster.address,
        source=large.catalog.urls,
    )
    with in_actors(dataset, 8, True, count=1) as loader:
        loop = iter(loader)
        batches = [next(loop)]
        with subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as other:
            try:
                assert other.stdout is not None
                while (line := other.stdout.readline()) not in ("began\n", ""):
                    pass
                assert line == "began\n"
            finally:
                other.kill()
        batches.extend(loop)
    assert draws(batches) == by_threads(dataset, 8, True)


# ---- memory and life --------------------------------------------------------------------------------------


@pytest.mark.full
def test_batches_that_are_kept_stay_and_credits_come_back(cluster: Any, made: Make) -> None:
    tar: Made = made("tar")
    dataset = tar.open(transform=drawn)
    with in_actors(dataset, 2) as loader:
        kept = draws_kept = [*loader]
        assert session_of(loader).resources.ledger.snapshot().in_use_bytes > 0
        whole = draws(kept)
        rest = draws(loader)
        assert [cls for cls, _ in whole] == [cls for cls, _ in rest]
        assert draws(kept) == whole
        del kept, draws_kept
        gc.collect()
        assert session_of(loader).resources.ledger.snapshot().in_use_bytes <= 1 << 16


def test_closing_leaves_no_actor_and_no_thread(cluster: Any, made: Make) -> None:
    dataset, before = made("tar").open(transform=drawn), our_threads()
    with in_actors(dataset, 3, count=2) as loader:
        loop = iter(loader)
        pids = {int(pid) for pid in next(loop)["by"]}
        assert all(psutil.pid_exists(pid) for pid in pids)
        processes = [psutil.Process(pid) for pid in pids]
    psutil.wait_procs(processes, TIMEOUT_S)
    assert not any(process.is_running() for process in processes)
    assert threads_left(but=before) == []
