"""Changes one operator or constant of the product at a time, and tells which test notices.

    python tests/fuzz/mutants.py --seed 1 --list                          # the same 200 for the same seed
    python tests/fuzz/mutants.py --seed 1                                 # tries them, in about two hours
    python tests/fuzz/mutants.py --seed 1 --only survived                 # tries again what no test noticed
    python tests/fuzz/mutants.py --seed 1 --only dataflow/loader.py:12    # or this one, or a whole file's
    python tests/fuzz/mutants.py --seed 1 --shared-with OTHER             # 200 that the tree OTHER has, too
    python tests/fuzz/mutants.py --seed 1 --shared-with OTHER --there     # tries the same ones in that tree

A mutant is a comparison with its bound moved or negated, `+` for `-`, `and` for `or`, a `not` less, an
integer one larger, or `True` for `False`; at most one a function. Each is written into a copy of the tree.
There the tests that name its module, the others of the folder that mirrors the module's, and the contracts
run, each in a process that was forked from one that has imported torch, until one fails. Outcomes:

    killed      a test fails, and does not fail without the mutant
    timeout     likewise, but it does not end
    survived    no test fails; `unfinished` if the time ended first
    not judged  what fails fails without it, too

In the end all tests that failed run without a mutant. So do the contracts before the first mutant that the
other tests let pass, and tell which functions they run: those of no other can fail them. Results are kept
after each mutant: `--resume` goes on with those that have none. A survivor's `note` in the results, which
people write, is kept, as is `before`, the outcome in an earlier tree with that tree's own tests. A mutant
may end or remove what is not its own: try them where that harms nobody, as below
`unshare --pid --mount --fork --mount-proc`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import ctypes
import functools
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("sharding", "prefetch", "dataflow")
CONTRACTS = ("tests/contracts/test_contracts.py", "tests/contracts/test_provenance.py")
TESTED_IN = {
    "dataflow": "dataflow/datasets",
    "dataflow/planning": "dataflow/lengths",
    "sharding/hub": "dataflow/hub",
}
"""Folders whose tests lie in another than the one that mirrors them, or above it."""
NOT_TRIED = {"add_note", "debug", "info", "warn", "warning", "print", "cast", "kill", "killpg"}
"""Calls that only say something; and those that would end others' processes."""
_PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.Add, ast.Sub), (ast.And, ast.Or)),
)
_JOINED = (ast.JoinedStr, ast.List, ast.Tuple)
"""What `-` is an error of, which would tell nothing of the tests."""
SWAPS: dict[type, Any] = {old: new for a, b in _PAIRS for old, new in ((a, b), (b, a))}
_TEST_S = 30.0
"""A test that takes longer hangs: the slowest takes 3 s."""
_REWRITTEN = "ignore:Module already imported so cannot be rewritten"
_UNCHANGED_S = 1200.0
_DATA_BYTES = 12 << 30
_FILE_BYTES = 64 << 30
_SET_CHILD_SUBREAPER = 36
"""Of prctl(2): orphans become children of this process."""


# ---- which ----------------------------------------------------------------------------------------------


class Mutant(NamedTuple):
    """A change of some bytes of a module."""

    module: str
    function: str
    line: int
    what: str
    begin: int
    end: int
    text: str

    def of(self, source: bytes) -> bytes:
        """The module with the change."""
        return source[: self.begin] + self.text.encode() + source[self.end :]


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in a node's place."""
    new: Any = copy.copy(node)
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                new.ops = [*ops[:i], SWAPS[type(op)](), *ops[i + 1 :]]
                yield new
        case ast.BinOp(op=ast.Add() | ast.Sub(), left=left, right=right):
            if not any(isinstance(each, _JOINED) or _is_text(each) for each in (left, right)):
                new.op = SWAPS[type(node.op)]()
                yield new
        case ast.BoolOp() | ast.AugAssign(op=ast.Add() | ast.Sub()):
            new.op = SWAPS[type(node.op)]()
            yield new
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool() | int() as value):
            new.value = not value if isinstance(value, bool) else value + 1
            yield new


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """Children of a node that say what is done: no annotation, decorator, message or check of our own."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.arg():
            return
        case ast.FunctionDef(args=args, body=body) | ast.AsyncFunctionDef(args=args, body=body):
            named = [*args.posonlyargs, *args.args]
            pairs = [*zip(named[len(named) - len(args.defaults) :], args.defaults, strict=True)]
            pairs += [pair for pair in zip(args.kwonlyargs, args.kw_defaults, strict=True) if pair[1]]
            yield from (default for arg, default in pairs if arg.arg != "stacklevel")
            yield from body
        case ast.ClassDef(body=body):
            yield from body
        case ast.AnnAssign(value=value):
            yield from filter(None, [value])
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse):
            yield from orelse
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            if name not in NOT_TRIED and not name.endswith(("Error", "Warning")):
                children = ast.iter_child_nodes(node)
                yield from (each for each in children if getattr(each, "arg", "") != "stacklevel")
        case _:
            yield from ast.iter_child_nodes(node)


def candidates(module: str, source: bytes) -> Iterator[Mutant]:
    """All mutants of a module."""
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]

    def inside(node: Any, function: str) -> Iterator[Mutant]:
        for new in changes(node):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            text = ast.unparse(new)
            what = f"{ast.unparse(node)} -> {text}"
            text = text if isinstance(node, ast.AugAssign) else f"({text})"
            yield Mutant(module, function or "<module>", node.lineno, what, begin, end, text)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        for part in parts(node):
            yield from inside(part, function)

    yield from inside(ast.parse(source), "")


def ranked(root: Path, seed: int) -> dict[bytes, Mutant]:
    """All mutants of a tree by their rank, which is the same in every tree that has them."""
    ranks = {}
    for path in sorted(path for name in PACKAGES for path in (root / name).rglob("*.py")):
        module, seen = str(path.relative_to(root)), Counter[str]()
        for mutant in candidates(module, path.read_bytes()):
            key = f"{module}/{mutant.function}/{mutant.what}"
            ranks[blake2b(f"{seed}/{key}/{seen[key]}".encode(), digest_size=8).digest()] = mutant
            seen[key] += 1
    return ranks


def chosen(root: Path, seed: int, count: int, other: Path | None = None) -> dict[bytes, Mutant]:
    """The mutants of a seed. A change of a function changes which of its own is tried, and the last ones."""
    first: dict[tuple[str, str], tuple[bytes, Mutant]] = {}
    shared = ranked(other, seed) if other else None
    for rank, mutant in ranked(root, seed).items():
        where = mutant.module, mutant.function
        first[where] = min(first.get(where, (rank, mutant)), (rank, mutant))
    kept = sorted(each for each in first.values() if shared is None or each[0] in shared)
    return dict(kept[:count])


def tests_of(root: Path, module: str) -> list[list[str]]:
    """Files of tests that name a module or are called by it, and the others of its folder."""
    path, folder = Path(module), Path(module).parent
    folder = Path(TESTED_IN.get(str(folder), folder))
    while not [*(root / "tests" / folder).glob("test_*.py")]:
        folder = folder.parent
    dotted = rf"\b{re.escape('.'.join(path.with_suffix('').parts))}\b"
    named = re.compile(rf"{dotted}|from {'.'.join(path.parent.parts)} import .*\b{path.stem}\b")
    files = sorted(each for name in PACKAGES for each in (root / "tests" / name).rglob("test_*.py"))
    own = [each for each in files if each.stem == f"test_{path.stem}" or _names(each, path.stem, named)]
    rest = [each for each in files if each.parent == root / "tests" / folder and each not in own]
    return [[str(each.relative_to(root)) for each in part] for part in (own, rest)]


_text = functools.cache(Path.read_text)


def _names(tests: Path, stem: str, named: re.Pattern[str]) -> bool:
    return stem in _text(tests) and named.search(_text(tests)) is not None


# ---- trying ---------------------------------------------------------------------------------------------


class Watcher:
    """A plugin of pytest: writes which test begins, and which fails, as lines of a file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def _write(self, **event: Any) -> None:
        os.write(self._fd, json.dumps(event).encode() + b"\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(test=nodeid, at=time.monotonic())

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._write(failed=report.nodeid, hung="Timeout (" in str(report.longrepr))

    pytest_collectreport = pytest_runtest_logreport

    def profile(self, frame: Any, event: str, _: object, *, seen: set[Any] = set()) -> None:  # noqa: B006
        """Write each function of the product that runs, once a process."""
        if event == "call" and frame.f_code not in seen:
            seen.add(frame.f_code)
            self._write(ran=[frame.f_code.co_filename, frame.f_code.co_qualname.replace(".<locals>", "")])


class Ran(NamedTuple):
    """How a run of pytest ended."""

    code: int | None
    """Of its process; None if it was ended."""
    failed: list[str]
    """Tests that failed, or never ended."""
    hung: bool
    functions: set[tuple[str, str]]


class Tree:
    """A copy of the product and its tests, in which one module at a time is changed."""

    def __init__(self, folder: Path, product: Path) -> None:
        self.root, self.log, self._folder, self._changes = folder / "tree", folder / "log", folder, 0
        names = (".git", ".venv*", ".*_cache", ".hypothesis", ".bench-data", ".site", "__pycache__", "build")
        ignored = shutil.ignore_patterns(*names)
        shutil.copytree(product, self.root, ignore=ignored, symlinks=True)

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """The copy has a mutant inside; times differ in seconds, which tells whose the kept bytecode is."""
        path = self.root / mutant.module
        source, before = path.read_bytes(), path.stat()
        self._changes += 1
        path.write_bytes(mutant.of(source))
        os.utime(path, (before.st_atime, before.st_mtime + self._changes))
        try:
            yield
        finally:
            path.write_bytes(source)
            os.utime(path, (before.st_atime, before.st_mtime))

    def run(self, tests: list[str], limit_s: float, *, to_end: bool = False, profile: bool = False) -> Ran:
        """Run tests until one fails, or to their end."""
        events, scratch = self._folder / "events", self._folder / "t"
        scratch.mkdir()
        fd = os.open(events, os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_WRONLY, 0o600)
        ends = time.monotonic() + limit_s
        pid = os.fork()
        if not pid:
            self._child([*tests, *(() if to_end else ("-x",))], Watcher(fd), scratch, profile=profile)
        os.close(fd)
        done = 0
        while not done and time.monotonic() < ends:
            time.sleep(0.01)
            done, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
        _end_descendants()
        shutil.rmtree(scratch, ignore_errors=True)
        told = [json.loads(line) for line in events.read_bytes().splitlines()]
        last = next((each for each in reversed(told) if "test" in each), {"test": "", "at": 0.0})
        failed = [each["failed"] or "conftest.py" for each in told if "failed" in each]
        hung = any(each.get("hung") for each in told)
        if not failed and code is None and (hung := time.monotonic() - last["at"] > _TEST_S):
            failed = [last["test"]]
        elif not failed and code not in (None, 0, 5):
            failed = [last["test"] or "conftest.py"]
        within = f"{self.root}/"
        ran = [each["ran"] for each in told if "ran" in each]
        functions = {(path.removeprefix(within), name) for path, name in ran if path.startswith(within)}
        return Ran(code, failed, hung, functions)

    def _child(self, tests: list[str], watcher: Watcher, scratch: Path, *, profile: bool) -> None:
        import pytest

        code = 3
        try:
            os.setsid()
            log = os.open(self.log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
            for stream in (1, 2):
                os.dup2(log, stream)
            os.chdir(self.root)
            for kind, most in (("DATA", _DATA_BYTES), ("FSIZE", _FILE_BYTES), ("CORE", 0)):
                limit = getattr(resource, f"RLIMIT_{kind}")
                resource.setrlimit(limit, (most, resource.getrlimit(limit)[1]))
            os.environ.update(PYTHONPATH=str(self.root), TMPDIR=str(scratch), HOME=str(scratch))
            tempfile.tempdir = None
            sys.path[0] = str(self.root)
            options = f"-q -p no:cacheprovider -n 0 --hypothesis-seed 0 --timeout {_TEST_S:.0f}"
            if profile:
                threading.setprofile(watcher.profile)
                sys.setprofile(watcher.profile)
            code = int(pytest.main([*options.split(), "-W", _REWRITTEN, *tests], plugins=[watcher]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


def _end_descendants() -> None:
    """End what a run left: orphans have become children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := [int(pid) for pid in children.read_text().split()]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


class Judge:
    """Tries mutants in a tree."""

    def __init__(self, tree: Tree, limit_s: float) -> None:
        self._tree, self._limit_s = tree, limit_s
        self._contracts = [tests for tests in CONTRACTS if (tree.root / tests).exists()]

    @functools.cached_property
    def _in_contracts(self) -> set[tuple[str, str]]:
        ran = self._tree.run(self._contracts, _UNCHANGED_S, profile=True)
        if ran.code != 0:
            sys.exit(
                f"{self._tree.log.read_text()[-5000:]}\nthe contracts fail without a mutant: {ran.failed}"
            )
        return ran.functions

    def tried(self, mutant: Mutant) -> dict[str, Any]:
        """Outcome of a mutant, and by which test."""
        began, (own, rest) = time.monotonic(), tests_of(self._tree.root, mutant.module)
        ran = self._run(mutant, own, began)
        ran = ran if ran.failed else self._run(mutant, rest, began)
        if not ran.failed:
            began -= time.monotonic()
            runs_there = mutant.function == "<module>" or mutant[:2] in self._in_contracts
            began += time.monotonic()
            ran = (
                self._run(mutant, self._contracts if runs_there else [], began)
                if ran.code is not None
                else ran
            )
        outcome = "survived" if not ran.failed else "timeout" if ran.hung else "killed"
        by, took_s = "".join(ran.failed[:1]), round(time.monotonic() - began, 1)
        unfinished = {"unfinished": True} if ran.code is None and not ran.failed else {}
        return {"outcome": outcome, "by": by, "seconds": took_s, **unfinished}

    def _run(self, mutant: Mutant, tests: list[str], began: float) -> Ran:
        left_s = self._limit_s - (time.monotonic() - began)
        if not tests or left_s <= 0:
            return Ran(None if tests else 0, [], False, set())
        with self._tree.changed(mutant):
            return self._tree.run(tests, left_s)

    def confirm(self, results: list[dict[str, Any]]) -> None:
        """Take back what tests say that fail without a mutant, too."""
        tests = sorted({each["by"] for each in results if each["by"].startswith("tests/")})
        failed = self._tree.run(tests, _UNCHANGED_S, to_end=True).failed if tests else []
        for each in results:
            if each["by"] in failed:
                each["outcome"] = "not judged"


# ---- what is kept ---------------------------------------------------------------------------------------


SHOWN = "{module}:{line} {function}: {what}"


def place(mutant: Mutant) -> dict[str, Any]:
    """What the results call a mutant by."""
    what = mutant.what if len(mutant.what) <= 160 else f"{mutant.what[:160]}..."
    return {"module": mutant.module, "function": mutant.function, "line": mutant.line, "what": what}


def _key(result: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(result[name] for name in ("module", "function", "what"))


def summary(results: list[dict[str, Any]]) -> str:
    """Outcomes of each package, and of all."""
    lines = []
    for name in (*PACKAGES, ""):
        outcomes = Counter(each["outcome"] for each in results if each["module"].startswith(name))
        killed, judged = outcomes["killed"] + outcomes["timeout"], outcomes.total() - outcomes["not judged"]
        lines.append(f"{name or 'all':9} {killed} of {judged} killed: {dict(outcomes.most_common())}")
    return "\n".join(lines)


def main() -> int:
    """Try mutants, and keep what became of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutants", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="of the choice (default: 1)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each (default: 120)")
    parser.add_argument("--list", action="store_true", help="print the choice, and try none")
    parser.add_argument("--resume", action="store_true", help="pass over those that have a result")
    parser.add_argument("--only", nargs="+", default=[], help="FILEs, FILE:LINEs or outcomes, to try again")
    parser.add_argument("--shared-with", type=Path, metavar="TREE", help="only mutants that TREE has, too")
    parser.add_argument("--there", action="store_true", help="try them in that tree, not in this")
    kept_in = Path(__file__).with_suffix(".json")
    parser.add_argument("--json", type=Path, default=kept_in, help="results (default: beside this script)")
    given = parser.parse_args()
    if given.there and not given.shared_with:
        parser.error("--there is of --shared-with TREE")
    tree = given.shared_with.resolve() if given.there else ROOT
    here = chosen(ROOT, given.seed, given.mutants, given.shared_with)
    there = ranked(tree, given.seed) if given.there else here
    mutants = [there[rank] for rank in here]
    if given.list:
        print(*(SHOWN.format(**place(mutant)) for mutant in mutants), sep="\n")
        print(f"{len(mutants)} mutants in {len({mutant.module for mutant in mutants})} modules")
        return 0
    kept = json.loads(given.json.read_text())["mutants"] if given.json.exists() else []
    known, keys = {_key(result): result for result in kept}, [_key(place(mutant)) for mutant in mutants]

    def write() -> None:
        lines = ",\n".join(json.dumps(known[key], ensure_ascii=False) for key in keys if key in known)
        given.json.write_text(f'{{"seed": {given.seed}, "mutants": [\n{lines}\n]}}\n', "utf-8")

    for name in ("numpy", "pyarrow.parquet", "torch", "pytest", "hypothesis"):
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)  # a pool of threads would be forked with this process
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        judge = Judge(Tree(Path(folder), tree), given.limit)
        for number, mutant in enumerate(mutants, 1):
            where, key = place(mutant), keys[number - 1]
            old = known.get(key, {})
            names = {mutant.module, f"{mutant.module}:{mutant.line}", old.get("outcome")}
            if (given.resume and old) or (given.only and names.isdisjoint(given.only)):
                continue
            result = judge.tried(mutant)
            known[key] = {
                **where,
                **result,
                **{name: old[name] for name in ("note", "before") if name in old},
            }
            print(number, result["outcome"], SHOWN.format(**where))
            print(f"    {result['seconds']} s {result['by']}", flush=True)
            write()
        judge.confirm([known[key] for key in keys if key in known])
        write()
    print(summary([known[key] for key in keys if key in known]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
