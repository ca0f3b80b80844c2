"""What engines index and convert has the bytes of what one process does, though a worker was killed in each.

Spark and MPI are in an environment of their own (`.ci/run --full`); of others, what is not installed skips.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from parameters_kit import in_full
from programs_kit import ROOT

from dataflow import ShardWriter

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(180)]

PATHS = [str(ROOT), str(ROOT / "tests" / "dataflow" / "executors")]
RUNNER = ["mpiexec", "-n", "3", sys.executable, "-m", "mpi4py.futures"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Workers find this tree and the tests' module; one thread each; no catalog of the user."""
    monkeypatch.syspath_prepend(PATHS[1])  # Dask's scheduler is in this process, and unpickles tasks
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, and what one process makes of them."""
    folder = tmp_path_factory.mktemp("engines")
    for shard in range(4):
        with ShardWriter(f"{folder}/{shard}.tar") as writer:
            for i in range(4):
                writer.write({"__key__": f"{shard}-{i}", "txt": f"text {i}", "cls": i})
    return folder


def work(folder: Path, name: str, engine: str, *options: str, runner: tuple[str, ...] = ()) -> str:
    """What the program prints; its processes have ended."""
    command = [*(runner or (sys.executable,)), "-m", "work_with_deaths", str(folder), name, engine, *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150, check=False)
    if runner and done.returncode:
        return ""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def made(folder: Path, name: str) -> dict[str, bytes]:
    """Catalog and shards that were written under a name."""
    files = [folder / name / "x.catalog", *(folder / name / "rows").glob("*.tar")]
    return {path.name: path.read_bytes() for path in files}


def same_as_here(folder: Path, name: str, *parts: str) -> None:
    if not (folder / "here").exists():
        work(folder, "here", "here")
    found, here = made(folder, name), made(folder, "here")
    assert len(here) == 5
    assert found == (here if not parts else {"x.catalog": here["x.catalog"]})
    for part in parts or ("index", "convert"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((folder / name / f"{part}.died").read_text()), 0)


def needs(*modules: str) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")


@pytest.mark.full
def test_processes(folder: Path) -> None:
    work(folder, "processes", "processes", "workers=2")
    same_as_here(folder, "processes")


def test_a_ray_cluster_of_two_nodes(folder: Path) -> None:
    needs("ray")
    with ray_cluster() as address:
        printed = work(folder, "ray", "ray", f"address={address}")
    assert f"ray: joined {address}" in printed
    same_as_here(folder, "ray")


@contextmanager
def ray_cluster() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.mark.full  # a cluster of Ray represents it
def test_a_dask_scheduler_with_two_workers(folder: Path) -> None:
    needs("distributed")
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        printed = work(folder, "dask", "dask", f"address={cluster.scheduler_address}")
    assert f"dask: joined {cluster.scheduler_address}" in printed
    same_as_here(folder, "dask")


@pytest.mark.parametrize("parts", [("index",), *in_full(())])
def test_jobs_of_submitit(parts: tuple[str, ...], folder: Path) -> None:
    needs("submitit")
    only = [f"only={part}" for part in parts]
    name = f"slurm{len(parts)}"
    printed = work(folder, name, "slurm", "workers=2", "cluster=local", *only)
    assert "local: 2 jobs at a time" in printed
    assert not list(folder.glob(".dataflow-jobs-*"))
    same_as_here(folder, name, *parts)


def test_spark_with_two_executors(folder: Path) -> None:
    needs("pyspark")
    if shutil.which("java") is None:
        pytest.skip("there is no Java")
    work(folder, "spark", "spark", "address=local-cluster[2,1,1024]")
    same_as_here(folder, "spark")


def test_ranks_of_mpi_end_with_one_of_them_and_the_next_run_goes_on(folder: Path) -> None:
    needs("mpi4py")
    if shutil.which("mpiexec") is None:
        pytest.skip("there is no mpiexec")
    runs = [work(folder, "mpi", "mpi", runner=tuple(RUNNER)) for _ in range(3)]
    assert runs[:2] == ["", ""]
    assert "mpi: joined 2 ranks" in runs[2]
    same_as_here(folder, "mpi")


@pytest.mark.parametrize(
    ("engine", "options", "text"),
    [
        ("ray", ["address=127.0.0.1:9"], "no ray was found at 127.0.0.1:9"),
        ("dask", ["address=tcp://127.0.0.1:9"], "no dask was found at tcp://127.0.0.1:9"),
        ("spark", ["address=spark://127.0.0.1:9"], "no spark was found at spark://127.0.0.1:9"),
        ("slurm", [], "sbatch was not found: run this where jobs are submitted"),
        ("mpi", [], "mpiexec -n 9 python -m mpi4py.futures"),
    ],
)
def test_an_engine_that_is_not_there_is_an_error_that_says_so(
    engine: str, options: list[str], text: str, folder: Path
) -> None:
    needs(
        {"dask": "distributed", "spark": "pyspark", "slurm": "submitit", "mpi": "mpi4py"}.get(engine, engine)
    )
    given = [word for option in options for word in ("--engine-option", option)]
    command = ["-m", "dataflow.tools.cli", "index", "*.tar", "--on", engine, *given]
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert text in done.stderr


def test_ctrl_c_ends_the_tasks_and_the_processes_that_do_them(folder: Path) -> None:
    """As a terminal sends it: to all processes."""
    for name in ("begun", "never"):
        os.mkfifo(folder / name)
    program = "import sys, work_with_deaths; work_with_deaths.wait_for_ever(sys.argv[1])"
    running = subprocess.Popen([sys.executable, "-c", program, str(folder)], start_new_session=True)
    pid = int((folder / "begun").read_text())
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(60) in (-signal.SIGINT, 130, 1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
