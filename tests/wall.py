"""The wall: what of the product is core, what is outside, and that the core works with the outside deleted.

    python tests/wall.py [--full] [arguments of pytest]

makes a copy of the tree without the packages outside. There every module is imported, the README's program
runs, and tests of the core pass: the shortest file of each folder, or all with --full.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
PACKAGES = ("sharding", "prefetch", "dataflow")
TEST_KIT = ("dataflow.testing", "dataflow.pytest_plugin")
OUTSIDE = {
    "gradients": ("dataflow.grad", "prefetch.workers.ordered_thread"),
    "telemetry": ("dataflow.telemetry",),
    "command line": ("dataflow.tools",),
    "conversion and executors": (
        *("dataflow.conversion", "dataflow.engines", "dataflow.executors", "dataflow.sources.tasks"),
    ),
    "Ray": ("dataflow.actors",),
    "joins": ("dataflow.joins",),
    "views": (
        "dataflow.sources.views",
        "sharding.catalog.predicate",
        "sharding.plan.split",
    ),
    "writers of shards": (
        "sharding.write.arrays",
        "sharding.write.shard",
        "sharding.write.tokens",
        "sharding.write.values",
        "sharding.write.writer",
    ),
    "steps explained, found, passed over": (
        "dataflow.explain",
        "sharding.mixture.inverse",
        "sharding.plan.passing",
    ),
    "text": ("dataflow.text",),
    "pictures and text": ("dataflow.vision",),
    "frameworks": ("dataflow.integrations",),
    "costs of rows": ("sharding.lengths.costs",),
    "test kit": TEST_KIT,
    "images": (
        "dataflow.decode.crop",
        "dataflow.decode.image",
        "dataflow.decode.jpeg",
        "dataflow.outputs.images",
        "prefetch.core.images",
    ),
    "sound and video": (
        "dataflow.decode.audio",
        "dataflow.decode.media",
        "dataflow.decode.mp4",
        "dataflow.decode.padding",
        "dataflow.decode.video",
        "dataflow.outputs.media",
    ),
    "LeRobot": ("dataflow.decode.episodes", "dataflow.sources.lerobot"),
    "MDS and LitData": ("sharding.formats.streaming", "sharding.write.mds"),
    "TFRecord and ArrayRecord": ("sharding.formats.records",),
    "values gathered, and cut into blocks": ("sharding.formats.gathering",),
    "Megatron": ("sharding.formats.megatron", "sharding.write.megatron"),
    "Energon": ("dataflow.sources.energon",),
    "Hub, splits": (
        "dataflow.sources.hub",
        "prefetch.http.hub",
        "sharding.hub.access",
        "sharding.hub.answers",
        "sharding.hub.card",
        "sharding.hub.filesystem",
        "sharding.hub.layout",
        "sharding.hub.snapshot",
    ),
    "Delta, Iceberg, Hive, CSV and text": ("sharding.formats.tables", "dataflow.sources.tables"),
    "loose files and manifests": (
        "dataflow.sources.file_catalogs",
        "dataflow.sources.loose",
        "dataflow.sources.manifests",
        "sharding.formats.files",
    ),
}
"""What is not the core: by what it is for, its packages and modules."""
_MODULES_OUTSIDE = tuple(module for modules in OUTSIDE.values() for module in modules)
VALUES = {f"dataflow.{name}" for name in ("limits", "ragged", "stats", "tables", "topology_exchange")}
"""Modules at the front door that everybody may use, as those in `sharding/*.py` and `prefetch/*.py`."""
OPENED_BY = {
    "dataflow": _MODULES_OUTSIDE,  # public names, imported when they are used
    "dataflow.loader": ("dataflow.telemetry.status", "dataflow.telemetry.timing.health"),
    "dataflow.dataset": (  # the type of `manifest=`; methods that give views
        "dataflow.joins.join",
        "dataflow.sources.manifests",
        "dataflow.sources.views",
        "sharding.plan.split",
    ),
    "dataflow.mixture": ("dataflow.sources.energon",),  # `Mixture.from_energon`
}
"""Modules of the core that name what is outside, since their public names do."""

TESTS_OUTSIDE = {"test_balanced_loader.py", "test_energon.py", "test_loose_http.py"}
"""Files of tests that say by names of formats alone what they are of."""
SLOW = {"test_batched_weights.py", "test_core_driver.py", "test_mixture_weights.py"}
"""Files of tests that run with --full only: one takes half a minute, one compiles C."""


def is_in(module: str, modules: Iterable[str]) -> bool:
    """Return whether a module is one of some, or within one of these packages."""
    return any(module == name or module.startswith(f"{name}.") for name in modules)


def is_outside(module: str) -> bool:
    """Return whether a module is not of the core."""
    return is_in(module, _MODULES_OUTSIDE)


def seams() -> dict[str, set[str]]:
    """What packages outside use of the core beside public names and values, as the docs list it: by seam."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8").partition("<!-- seams -->")[2]
    lines = text.partition("```text\n")[2].partition("```")[0].replace("/", ".").splitlines()
    rows = (line.partition(":") for line in lines)
    return {name: {module for part in parts.split() for module in _braced(part)} for name, _, parts in rows}


def _braced(text: str) -> list[str]:
    """Return "a.b" and "a.c" of "a.{b,c}"."""
    folder, _, names = text.rstrip("}").partition("{")
    return [folder + name for name in names.split(",")]


def module_of(path: Path) -> str:
    """The name of a module that lies at "package/.../name.py"."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def core_lines(root: Path = ROOT) -> int:
    """Lines of the core's modules, as `wc -l` counts them."""
    files = (path for package in PACKAGES for path in (root / package).rglob("*.py"))
    core = (path for path in files if not is_outside(module_of(path.relative_to(root))))
    return sum(path.read_bytes().count(b"\n") for path in core)


# ---- which tests are the core's ---------------------------------------------------------------------------


def core_tests() -> list[Path]:
    """Files of tests in folders of the core that import nothing outside, by themselves or by kits."""
    kits = {path.stem: path for path in HERE.rglob("*.py") if "fixtures" not in path.parts}
    files = (path for package in PACKAGES for path in sorted((HERE / package).rglob("test_*.py")))
    own = (
        path
        for path in files
        if path.name not in TESTS_OUTSIDE and not is_outside(".".join(path.relative_to(HERE).parent.parts))
    )
    return [path for path in own if not _asks_outside(path, kits, set())]


def _asks_outside(path: Path, kits: dict[str, Path], seen: set[Path]) -> bool:
    seen.add(path)
    names = set(_imported(ast.parse(path.read_text()).body))
    beside = {kits[stem] for name in names if (stem := name.rpartition(".")[2]) in kits} - seen
    outside = any(is_outside(name) and not is_in(name, TEST_KIT) for name in names)
    return outside or any(_asks_outside(kit, kits, seen) for kit in beside)


def _imported(nodes: Iterable[ast.stmt]) -> Iterator[str]:
    """Full names of what a file of tests imports when it is imported itself."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (_home_of(str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _imported(node.body)


def _home_of(module: str, name: str) -> str:
    """The module that has a public name of `dataflow`; else the full name."""
    if module != "dataflow":
        return f"{module}.{name}"
    from dataflow import _MODULES

    return _MODULES.get(name, f"{module}.{name}")


# ---- the copy ---------------------------------------------------------------------------------------------


def copy_tree(to: Path) -> None:
    """Copy what git knows, what it does not ignore, and the compiled library."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, timeout=60)
    library = [path.relative_to(ROOT) for path in (ROOT / "sharding" / "core").glob("libcore.so*")]
    for path in [*map(Path, done.stdout.decode().split("\0")[:-1]), *library]:
        if (ROOT / path).is_file():
            (to / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, to / path)


def remove_outside(root: Path, but: Collection[str] = ()) -> None:
    """Delete the packages outside from a copy of the tree."""
    for module in _MODULES_OUTSIDE:
        path = root.joinpath(*module.split("."))
        if module not in but:
            shutil.rmtree(path, ignore_errors=True)
            path.with_suffix(".py").unlink(missing_ok=True)


_IMPORT_ALL = """
import importlib, pathlib, sys
for package in sys.argv[1:]:
    for path in sorted(pathlib.Path(package).rglob("*.py")):
        parts = path.with_suffix("").parts
        if parts[-1] != "server_shield":  # it ends a process that is no fork server
            importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
"""
_NO_OTHER_TREE = """
import sys
# An editable install would find in its tree what is deleted here.
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in getattr(each, "__module__", "")]
"""
_SKIPS = '''
"""Tests that ask for a package outside, which their imports do not show, are none of the core's."""
import pytest

OUTSIDE = {!r}

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    error = call.excinfo and call.excinfo.value
    name = isinstance(error, ModuleNotFoundError) and error.name or ""
    if any(name == module or name.startswith(module + ".") for module in OUTSIDE):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, "it asks for " + name)
    return report
'''


def main(arguments: list[str]) -> int:
    """Try the core alone; the exit status is that of the first step that fails."""
    full = "--full" in arguments
    others = [argument for argument in arguments if argument != "--full"]
    tests = core_tests()
    if not full:
        shortest: dict[Path, Path] = {}
        for path in sorted(tests, key=lambda path: path.stat().st_size, reverse=True):
            if path.name not in SLOW:
                shortest[path.parent] = path
        tests = sorted(shortest.values())
    with tempfile.TemporaryDirectory(prefix="dataflow-core-") as folder:
        root = Path(folder)
        copy_tree(root)
        held = {module: root.joinpath(*module.split(".")) for module in TEST_KIT}
        remove_outside(root)
        (root / "sitecustomize.py").write_text(_NO_OTHER_TREE)
        environment = {**os.environ, "PYTHONPATH": str(root)}

        def run(*command: str) -> int:
            return subprocess.run([sys.executable, *command], cwd=root, env=environment).returncode

        if status := run("-c", _IMPORT_ALL, *PACKAGES) or run("examples/quickstart.py"):
            return status
        for module, path in held.items():  # the tests' own tool
            own = ROOT.joinpath(*module.split("."))
            if own.is_dir():
                shutil.copytree(own, path)
            else:
                shutil.copyfile(own.with_suffix(".py"), path.with_suffix(".py"))
        (root / "outside_skips.py").write_text(_SKIPS.format(_MODULES_OUTSIDE))
        print(f"the core has {core_lines():,} lines, {len(tests)} files of tests run", flush=True)
        names = [str(path.relative_to(ROOT)) for path in tests]
        return run("-m", "pytest", "-q", "-p", "outside_skips", *others, *names)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # in place of `tests`, which has folders of the packages' names
    sys.exit(main(sys.argv[1:]))
