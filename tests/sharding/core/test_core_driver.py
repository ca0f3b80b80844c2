"""The compiled core, by `driver.c`: random plans against plain loops, in threads, over pages that are gone.

Without a sanitizer it is compiled as it is installed; with one, accesses beyond the ends, undefined behaviour
and races between threads end the program.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from parameters_kit import in_full, others_in_full

from sharding.core.compile import FLAGS, FOLDER, SOURCES, compilers_on_path

DRIVER = Path(__file__).with_name("driver.c")
INSTALLED = [flag for flag in FLAGS if flag != "-shared"]
SANITIZED = [
    "-O1",
    "-g",
    "-std=gnu11",
    "-DCORE_PLAIN",
    "-fno-omit-frame-pointer",
    "-fno-sanitize-recover=all",
]
"""Loops without variants: which one runs is chosen before a sanitizer is ready."""
BUILDS = {
    "as installed": (200, INSTALLED),
    "address and undefined": (60, [*SANITIZED, "-fsanitize=address,undefined"]),
    "thread": (20, [*SANITIZED, "-fsanitize=thread"]),
}
"""How many plans take a second or two, and how they are compiled."""
WAIT_S = 60


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "",
        "TSAN_OPTIONS": "",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=WAIT_S, errors="replace"
    )


def compiled(flags: list[str], sources: list[Path], program: Path) -> subprocess.CompletedProcess[str]:
    if not (compilers := compilers_on_path()):
        pytest.skip("needs a C compiler")
    return run([*compilers[0], *flags, "-pthread", *map(str, sources), "-o", str(program)], program.parent)


@pytest.fixture(scope="module", params=others_in_full(BUILDS, "address and undefined"))
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The program, and how many plans it is to try."""
    num_plans, flags = BUILDS[request.param]
    folder = tmp_path_factory.mktemp("driver")
    # A sanitizer may not be installed, or not run on this kernel: nothing that core.c could be blamed for.
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    for done in (
        compiled(flags, [folder / "empty.c"], folder / "empty"),
        run([str(folder / "empty")], folder),
    ):
        if done.returncode:
            pytest.skip(f"an empty program fails with {' '.join(flags)}: {done.stderr.strip()[-300:]}")
    more = ["-Werror", "-Dprocess_vm_readv=driver_vm_readv", f"-I{FOLDER}"]
    done = compiled([*flags, *more, "-Wall", "-Wextra"], [*SOURCES, DRIVER], folder / "driver")
    assert done.returncode == 0, done.stderr
    return folder / "driver", num_plans


@pytest.mark.parametrize("mode", [*in_full("honest", "short"), "broken"])
def test_plans_are_run_as_by_plain_loops(driver: tuple[Path, int], mode: str) -> None:
    program, num_plans = driver
    done = run([str(program), "1", str(num_plans), mode], program.parent)
    assert (done.returncode, done.stderr) == (0, "")
    tried = json.loads(done.stdout)
    assert tried["rows"] > 1000
    assert tried["lost"] > 100
    assert tried["widened"] > 1000
    assert min(tried["resized"], tried["patched"]) > 1000
    assert tried["ordered"] > 1000
    assert min(tried["names"], tried["numbers"], tried["sums"]) > 50
    assert (tried["short"] > 0) == (mode != "honest")
