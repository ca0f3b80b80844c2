"""Settings of the training process that workers from a server, or of a new interpreter, have too."""

from __future__ import annotations

import logging
import os
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from datasets_kit import make_ints_tar
from parameters_kit import in_full
from programs_kit import run_script
from worker_kit import Does

from dataflow import DataLoader

pytestmark = pytest.mark.timeout(120)
LIMIT = resource.RLIMIT_CORE


def settings(_: Any = None) -> dict[str, Any]:
    return {
        "path": sys.path[-1],
        "folder": os.getcwd(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "limit": resource.getrlimit(LIMIT)[0],
        "level": logging.getLogger("ours").level,
        "warns": warnings.filters[0][0],
    }


def of_builder(sample: dict[str, Any]) -> dict[str, Any]:
    return {"settings": repr(settings())}


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Settings that a server which runs already does not have."""
    before = resource.getrlimit(LIMIT), os.sched_getaffinity(0), logging.getLogger("ours").level
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        resource.setrlimit(LIMIT, (4096, before[0][1]))
        os.sched_setaffinity(0, {min(before[1])})
        logging.getLogger("ours").setLevel(17)
        yield settings()
    resource.setrlimit(LIMIT, before[0])
    os.sched_setaffinity(0, before[1])
    logging.getLogger("ours").setLevel(before[2])


@pytest.mark.parametrize("method", ["fork", "forkserver", *in_full("spawn")])
def test_workers_have_them(method: str, changed: dict[str, Any]) -> None:
    loader = DataLoader(Does(settings, 2), None, num_workers=1, multiprocessing_context=method)
    assert list(loader) == [changed] * 2


@pytest.mark.here
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_builders_have_them(method: str, changed: dict[str, Any], tmp_path: Path) -> None:
    dataset = make_ints_tar(tmp_path).open(transform=of_builder)
    with DataLoader(dataset, 2, num_workers=1, multiprocessing_context=method) as loader:
        assert {text for batch in loader for text in batch["settings"]} == {repr(changed)}


HASHES = """
import sys
from dataflow import DataLoader

class Hashes:
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return hash("a path")

if __name__ == "__main__":
    [there] = DataLoader(Hashes(), None, num_workers=1, multiprocessing_context=sys.argv[1])
    print(there == hash("a path"))
"""


@pytest.mark.full  # a forked one has it in any case: `test_worker_forks`
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_hash_seed_that_was_set_is_theirs(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert run_script(HASHES, method, how="file", folder=tmp_path) == (0, "True\n", "")
