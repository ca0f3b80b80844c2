"""The examples with other people's packages print what their page shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs_kit import ROOT, printed_on

PAGE = "docs/guide/frameworks.md"
NEEDS = {"lightning_resume": "lightning", "trainer_resume": "transformers", "accelerate_resume": "accelerate"}


@pytest.mark.parametrize("script", NEEDS)
def test_a_framework_resumes_inside_an_epoch_as_its_page_shows(script: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS[script])
    environment = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{script}.py")],
        cwd=tmp_path,
        env={**os.environ, **environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines(keepends=True)[-1] == printed_on(PAGE, "lightning_resume")
