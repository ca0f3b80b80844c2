"""How the package is installed: with a compiler, and without one.

Copies of this tree are built and installed without a network. zig itself (100 MB) is not fetched: a program
in its place shows how it is called.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from sharding.core import compile as core_compile
from sharding.core.compile import (
    HEADER,
    LIBRARY,
    PLAIN,
    SOURCES,
    NoCompilerError,
    compile_core,
    compilers_on_path,
    contract_version,
)

ROOT = Path(__file__).parent.parent.parent
WAIT_S = 100
NEEDED = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "sharding", "prefetch", "dataflow")
CORE = "sharding/core/libcore.so"

needs_compiler = pytest.mark.skipif(not compilers_on_path(), reason="needs a C compiler")
needs_setuptools = pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None, reason="needs setuptools, as pip does without isolation"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what is installed, with a library of an earlier time that nobody may take for this one's."""
    for name in NEEDED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "libcore.so*")
            shutil.copytree(ROOT / name, tmp_path / "tree" / name, ignore=ignored)
        else:
            (tmp_path / "tree").mkdir(exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "tree" / name)
    (tmp_path / "tree" / CORE).write_bytes(b"stale")
    return tmp_path / "tree"


@pytest.fixture
def no_compilers(tmp_path: Path) -> dict[str, str]:
    """Variables of a process without a compiler on PATH, and with a zig that fails, whatever is installed."""
    return {
        "PATH": str(folder_in(tmp_path, "empty")),
        "CC": "",
        **with_zig(tmp_path, "raise SystemExit('no zig')"),
    }


def with_zig(tmp_path: Path, program: str) -> dict[str, str]:
    package = folder_in(tmp_path, "fake/ziglang")
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(program)
    return {"PYTHONPATH": str(package.parent)}


def folder_in(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir(parents=True)
    return tmp_path / name


def run(command: Iterable[object], folder: Path, variables: Mapping[str, str], *, fails: bool = False) -> str:
    """What a program prints that ends well, or not."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
    )
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


def built(tree: Path, hook: str, variables: Mapping[str, str]) -> tuple[Path, str]:
    """The wheel that a hook of the backend makes, as pip would call it, and what was printed."""
    wheels = folder_in(tree.parent, "wheels")
    printed = run(call_of(hook, wheels), tree, variables)
    [wheel] = wheels.iterdir()
    return wheel, printed


def call_of(hook: str, wheels: Path) -> list[object]:
    call = f"import sys; sys.path.insert(0, '.'); import setup; setup.{hook}(sys.argv[1])"
    return [sys.executable, "-c", call, wheels]


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as files:
        return files.namelist()


def version_of(library: Path) -> int:
    """In another process: this one may not load two libraries of one name, nor a broken one."""
    load = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).core_version())"
    return int(run([sys.executable, "-c", load, library], library.parent, {}))


def declared() -> set[str]:
    return set(re.findall(r"^CORE_API [\w ]+?\W(core_\w+)\(", HEADER.read_text("utf-8"), re.MULTILINE))


def exported(library: Path) -> set[str]:
    if not shutil.which("nm"):
        pytest.skip("needs nm")
    lines = run(["nm", "-D", "--defined-only", library], library.parent, {}).splitlines()
    return {line.split()[-1] for line in lines}


@pytest.mark.full  # `.ci/package` installs the wheel
@needs_compiler
@needs_setuptools
@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
def test_pip_installs_a_library_that_loads(tree: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-index", "--no-deps"]
    run([*pip, "--no-build-isolation", "--no-compile", "--target", tmp_path / "site", "."], tree, {})
    assert version_of(tmp_path / "site" / CORE) == contract_version()
    assert exported(tmp_path / "site" / CORE) == declared()
    there = {path.name for path in (tmp_path / "site" / CORE).parent.iterdir()}
    assert {path.name for path in (*SOURCES, HEADER)} <= there  # to compile it again, there


@pytest.mark.full
@needs_compiler
@needs_setuptools
def test_a_wheel_with_a_library_is_for_every_python_of_one_platform(tree: Path) -> None:
    wheel, printed = built(tree, "build_wheel", {})
    assert re.search(r"-py3-none-linux_\w+\.whl$", wheel.name)
    assert CORE in names_in(wheel)
    assert "dataflow: libcore.so is compiled by " in printed


@needs_compiler
@needs_setuptools
@pytest.mark.full
def test_an_editable_install_replaces_the_library_of_the_checkout_which_is_never_missing(tree: Path) -> None:
    compiler = tree.parent / "compiler"
    compiler.write_text(
        f'#!/bin/sh\ntest -s "{tree / CORE}" && exec {shlex.join(compilers_on_path()[0])} "$@"\n'
    )
    compiler.chmod(0o755)
    _, printed = built(tree, "build_editable", {"CC": str(compiler)})
    assert version_of(tree / CORE) == contract_version()
    assert f"dataflow: libcore.so is compiled by {compiler}" in printed


@needs_setuptools
@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_where_no_compiler_works_installing_fails_with_what_to_install(
    tree: Path, no_compilers: dict[str, str], hook: str
) -> None:
    wheels = folder_in(tree.parent, "wheels")
    printed = run(call_of(hook, wheels), tree, no_compilers, fails=True)
    said = "error: dataflow: no C compiler works here, so libcore.so is not compiled, which all loaders need"
    assert printed.count(said) == 1
    assert "Install gcc or clang" in printed
    assert "-m ziglang cc" in printed
    assert "no zig" in printed  # what it said
    assert [*wheels.iterdir()] == []
    assert (tree / CORE).exists() == (hook == "build_wheel")  # of a checkout that is used, nothing old stays


@pytest.mark.full
@needs_compiler
@needs_setuptools
def test_zig_compiles_where_it_is_the_only_compiler_and_not_for_this_very_processor(
    tree: Path, tmp_path: Path
) -> None:
    # The compiler on PATH, without the flags that it does not know.
    [command, *flags] = compilers_on_path()[0]
    program = f"""
import os, sys
assert "-mcpu=baseline" in sys.argv
at = sys.argv.index("-target")
given = [word for word in sys.argv[2:at] + sys.argv[at + 2:] if word not in ("-mcpu=baseline", "-nostdlib")]
os.environ["PATH"] = {os.environ["PATH"]!r}
os.execvp({command!r}, [{command!r}, *{flags!r}, *given])
"""
    variables = {"PATH": str(folder_in(tmp_path, "empty")), "CC": "", **with_zig(tmp_path, program)}
    wheel, printed = built(tree, "build_wheel", variables)
    assert CORE in names_in(wheel)
    assert "-m ziglang cc" in printed


@pytest.mark.full  # `.ci/package` builds and uses one
@needs_setuptools
def test_a_source_distribution_has_all_that_an_install_from_it_needs(tree: Path) -> None:
    archive, _ = built(tree, "build_sdist", {})
    shutil.unpack_archive(archive, tree.parent / "unpacked", filter="data")
    [unpacked] = (tree.parent / "unpacked").iterdir()
    sources = {f"sharding/core/{name}" for name in ("core.c", "queue.c", "core.h", "compile.py")}
    assert {"setup.py", *sources} <= {str(path.relative_to(unpacked)) for path in unpacked.rglob("*")}
    assert not (unpacked / CORE).exists()


@needs_setuptools
@pytest.mark.parametrize(
    ("on_path", "variables", "asked"),
    [
        ([], {}, {"ziglang"}),
        (["clang"], {}, set()),
        ([], {"CC": "gone"}, {"ziglang"}),
    ],
)
def test_zig_is_asked_for_only_where_there_is_no_compiler(
    on_path: list[str], variables: dict[str, str], asked: set[str], tmp_path: Path
) -> None:
    for name in on_path:
        (tmp_path / name).touch(0o755)
    hooks = "[setup.get_requires_for_build_wheel(), setup.get_requires_for_build_editable()]"
    program = [sys.executable, "-c", f"import json, setup; print(json.dumps({hooks}))"]
    printed = run(program, ROOT, {"CC": "", "PATH": str(tmp_path), **variables})
    for requirements in json.loads(printed):
        assert {requirement.partition(">")[0] for requirement in requirements} == asked


def test_the_compiler_that_is_named_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gcc", "mine"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "mine -m32")
    assert compilers_on_path() == [("mine", "-m32"), ("gcc",)]
    monkeypatch.setenv("CC", "not-there")
    assert compilers_on_path() == [("gcc",)]


@pytest.mark.full
@pytest.mark.one_in(2)
@needs_compiler
@pytest.mark.parametrize("flags", ["", *PLAIN])
def test_only_what_the_header_declares_is_exported_and_nothing_is_warned_of(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", f"{' '.join(compilers_on_path()[0])} -Werror {flags}")
    monkeypatch.setattr(core_compile, "compilers_on_path", lambda: compilers_on_path()[:1])
    compile_core(tmp_path / "libcore.so")
    assert exported(tmp_path / "libcore.so") == declared() >= {"core_run", "core_version"}
    assert [path.name for path in tmp_path.iterdir()] == ["libcore.so"]


@needs_compiler
@pytest.mark.full
def test_a_library_of_another_contract_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_compile, "contract_version", lambda: contract_version() + 1)
    (tmp_path / "libcore.so").write_bytes(b"stale")
    with pytest.raises(NoCompilerError, match="core_version gives"):
        compile_core(tmp_path / "libcore.so")
    assert list(tmp_path.iterdir()) == []


def test_the_library_of_this_checkout_is_not_older_than_its_source() -> None:
    newest = max(source.stat().st_mtime for source in (*SOURCES, HEADER))
    assert LIBRARY.stat().st_mtime >= newest, "run `python -m sharding.core.compile`"
