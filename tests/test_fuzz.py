"""The short form of the runs in tests/fuzz: damaged inputs, Ctrl-C and kills at random moments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent / "fuzz"


@pytest.mark.full  # tests/sharding/formats/test_conformance.py damages each format
@pytest.mark.parametrize(
    "script",
    [
        "damage.py --mutants 12 --seed 15",
        "ctrl_c.py --rounds 12 --seed 15",
        "kills.py --rounds 12 --seed 15",
        "manifests.py --mutants 500 --seed 15",
        "workers.py --minutes 0.5 --seed 15 --start fork",
        "forks.py ours --only ours --forks 20",
    ],
)
def test_a_short_run_finds_no_defect(script: str) -> None:
    name, *options = script.split()
    command = [sys.executable, str(_FOLDER / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
