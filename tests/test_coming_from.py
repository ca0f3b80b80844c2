"""The pages "Coming from ...": programs that read the same files with their owner's loader and with this one.

The owners' packages are in no extra: where one is not installed, what it reads is not compared.
"""

from __future__ import annotations

import gzip
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from programs_kit import ROOT, printed_on

FIXTURES = ROOT / "tests" / "fixtures"
PAGE = "docs/guide/coming-from-formats.md"
WAIT_S = 100.0

pytestmark = pytest.mark.usefixtures("own_cache")


def copied(name: str) -> Callable[[Path], str]:
    """A copy: readers write beside their data."""
    return lambda folder: str(shutil.copytree(FIXTURES / name, folder / "data"))


def array_records(folder: Path) -> str:
    packed = (FIXTURES / "array_record" / "default.array_record.gz").read_bytes()
    (folder / "data.array_record").write_bytes(gzip.decompress(packed))
    return str(folder / "*.array_record")


SCRIPTS: dict[str, tuple[Callable[[Path], str], tuple[str, ...]]] = {
    "from_streaming": (copied("mds/numbers"), ("streaming",)),
    "from_litdata": (copied("litdata/text"), ("litdata",)),
    "from_energon": (copied("energon/images"), ("megatron.energon",)),
    "from_grain": (array_records, ("grain", "tensorflow")),
    "from_tf_data": (lambda _: str(FIXTURES / "tfrecord" / "part.tfrecord-*"), ("tensorflow",)),
}
"""What each reads, and what it needs for that before the move."""


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_program_reads_after_the_move_what_its_page_shows(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(ROOT / "examples" / f"{script}.py")
    monkeypatch.setattr(sys, "argv", [path, SCRIPTS[script][0](tmp_path)])
    runpy.run_path(path, run_name="__main__")
    assert capsys.readouterr().out == printed_on(PAGE, script)


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS)
def test_it_read_the_same_before_the_move(script: str, tmp_path: Path) -> None:
    make, packages = SCRIPTS[script]
    for package in packages:
        pytest.importorskip(package, exc_type=ImportError)
    source = make(tmp_path)
    if script == "from_energon":  # its reader needs indexes, which fixtures leave out
        source = energon_folder(tmp_path)
    assert printed(script, source, "before") == printed_on(PAGE, script).splitlines()[-1]


@pytest.mark.full
def test_torchvision_read_as_many_images_of_the_same_classes() -> None:
    if not hasattr(pytest.importorskip("torchvision.datasets", exc_type=ImportError), "ImageFolder"):
        pytest.skip("torchvision is here in part only")
    assert printed("image_folder_plain") == "10 batches"


def printed(script: str, *arguments: str) -> str:
    """The last line that a program prints in a process of its own: owners log, warn and start processes."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{script}.py"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def energon_folder(folder: Path) -> str:
    """The dataset of the fixtures, as its owner writes it."""
    program = "import sys, pathlib, make_energon; make_energon.write_energon(pathlib.Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FIXTURES), str(ROOT)])}
    subprocess.run(
        [sys.executable, "-c", program, str(folder / "written")],
        env=environment,
        capture_output=True,
        timeout=WAIT_S,
        check=True,
    )
    return str(folder / "written" / "images")
