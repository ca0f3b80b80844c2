"""Through how many functions does a batch come? `python -m benchmarks.lab.stations --json FILE`.

Every call in every thread of this process is traced: from `DataLoader(...)` to the first batch (`first`), and
from one batch to another of the same epoch once the loader runs (`steady`). Told are the different functions
of the packages that ran, and their files. Functions whose body is one line are left out, as are generated
ones. What builder processes do is not seen. Of three runs each part's smallest counts: the page of a process
is written once a second. `--check` fails where a part has more than `MOST` allows, or enters what nobody
asked for. `source`: how many functions take a parameter of that name, and
in how many folders. `--argument dataset` follows what the first function that takes a parameter of this name
is given: which functions have that very object, under any name, until the first batch is there.
"""

from __future__ import annotations

import argparse
import ast
import math
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg

from benchmarks import REPOSITORY
from benchmarks.report import save_figures
from benchmarks.tars import write_tar
from dataflow import DataLoader, Image, ShardedDataset
from dataflow.telemetry.status.page import page_of_process

PACKAGES = ("sharding", "prefetch", "dataflow")
SAMPLES, BATCH, WARM, STEADY = 2048, 32, 12, 8
"""Samples of a case, those of a batch, batches before the steady part, batches of that part."""
RUNS = 3
MOST = {
    "JPEGs of a local tar": {"first": (430, 89), "steady": (109, 30)},
    "Parquet rows, transform": {"first": (465, 93), "steady": (115, 32)},
}
"""Functions and files that a batch may pass: they only go down."""
UNASKED = (
    "dataflow/planning/exchange.py",
    "dataflow/planning/length_aware.py",
    "dataflow/joins/",
    "sharding/catalog/widening.py",
    "sharding/lengths/",
    "sharding/mixture/",
    "sharding/topology/hardware.py",
)
"""What these cases do not use, and so do not enter."""


class CallTrace:
    """The functions of the packages that are called while it is `on`, by threads begun inside `tracing`."""

    def __init__(self, argument: str = "") -> None:
        self.on = False
        self._seen: set[CodeType] = set()
        self._argument = argument
        self._followed: list[object] = []

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace this thread, and threads that begin inside."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if self.on and event == "call" and self._is_given(frame):
            self._seen.add(frame.f_code)

    def _is_given(self, frame: FrameType) -> bool:
        """Whether a function has the object that is followed, but for its own methods; True: none is."""
        code = frame.f_code
        if not self._argument or not file_of(code):
            return not self._argument
        values = {name: frame.f_locals.get(name) for name in taken_by(code)}
        if not self._followed and self._argument in values:
            self._followed.append(values[self._argument])
        values.pop("self", None)
        return any(value is each for value in values.values() for each in self._followed)

    def taken(self) -> set[tuple[str, str]]:
        """File and name of each function since the last call."""
        seen, self._seen = self._seen, set()
        return {(file_of(code), code.co_qualname) for code in seen if is_station(code)}


def file_of(code: CodeType) -> str:
    """The file of a function, relative to the repository; "" outside of it."""
    path = Path(code.co_filename)
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else ""


def is_station(code: CodeType) -> bool:
    """Whether it is one of ours, and its body more than a line."""
    if file_of(code).partition("/")[0] not in PACKAGES or code.co_name.startswith("<"):
        return False
    return len({line for _, _, line in code.co_lines() if line} - {code.co_firstlineno}) > 1


def taken_by(code: CodeType) -> tuple[str, ...]:
    """The names of a function's parameters."""
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def tar_of_jpegs(folder: Path) -> None:
    """Images of 64 x 48 pixels, and a number."""
    pixels = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    jpeg = simplejpeg.encode_jpeg(pixels)
    samples = ((f"{at:05}", {"jpg": jpeg, "cls": b"%d" % (at % 10)}) for at in range(SAMPLES))
    write_tar(folder / "a.tar", samples)


def decoded_images(folder: Path) -> DataLoader:
    """Images resized to 32 x 32, in threads."""
    dataset = ShardedDataset(str(folder / "a.tar"), decode={"jpg": Image(size=32), "cls": int})
    return DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=0)


def parquet(folder: Path) -> None:
    """Rows of a number and a text."""
    table = pa.table({"x": np.arange(SAMPLES), "text": [f"row {at}" for at in range(SAMPLES)]})
    pq.write_table(table, folder / "a.parquet", row_group_size=256)


def transformed_rows(folder: Path) -> DataLoader:
    """A function of the user's for each, in threads."""
    dataset = ShardedDataset(str(folder / "a.parquet"), transform=with_length)
    return DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=0)


def with_length(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The user's function."""
    return {"x": sample["x"], "length": len(sample["text"])}


CASES: dict[str, tuple[Callable[[Path], None], Callable[[Path], DataLoader]]] = {
    "JPEGs of a local tar": (tar_of_jpegs, decoded_images),
    "Parquet rows, transform": (parquet, transformed_rows),
}


def stations(
    write: Callable[[Path], None], make: Callable[[Path], DataLoader], argument: str = "", runs: int = RUNS
) -> dict[str, Any]:
    """What is told of one case: by part, functions, files, and the names."""
    taken = [stations_of_run(write, make, argument) for _ in range(runs)]
    return {part: figures(min((parts[part] for parts in taken), key=len)) for part in taken[0]}


def stations_of_run(
    write: Callable[[Path], None], make: Callable[[Path], DataLoader], argument: str
) -> dict[str, set[tuple[str, str]]]:
    """File and name of each function that ran, by part."""
    trace, parts = CallTrace(argument), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        with make(folder) as before:  # its catalog is kept, what is imported late is there, and it has ended
            for _ in before:
                pass
        page_of_process().due = math.inf  # written once a second: no station of a batch
        with trace.tracing():
            trace.on = True
            with make(folder) as loader:
                batches = iter(loader)
                next(batches)
                parts["first"] = trace.taken()
                for _ in range(WARM):
                    next(batches)
                trace.taken()
                for _ in range(STEADY):
                    next(batches)
                trace.on = False
                parts["steady"] = trace.taken()
    return parts


def unasked(found: Mapping[str, Any]) -> list[str]:
    """The functions of a part that nobody asked for."""
    names: Mapping[str, Sequence[str]] = found["names"]
    return [f"{file}: {', '.join(own)}" for file, own in names.items() if file.startswith(UNASKED)]


def too_many(told: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Say which parts pass more than they may."""
    lines = []
    for case, most in MOST.items():
        for part, limits in most.items():
            found = told[case][part]
            for what, limit in zip(("functions", "files"), limits, strict=True):
                if found[what] > limit:
                    lines.append(f"{case}, {part}: {found[what]} {what}, at most {limit} are allowed")
            lines += [f"{case}, {part}: enters what nobody asked for, {line}" for line in unasked(found)]
    return lines


def figures(found: set[tuple[str, str]]) -> dict[str, Any]:
    """Their number, that of their files, and their names by file."""
    by_file: dict[str, list[str]] = {}
    for file, name in sorted(found):
        by_file.setdefault(file, []).append(name)
    return {"functions": len(found), "files": len(by_file), "names": by_file}


def takers_of(parameter: str) -> dict[str, int]:
    """How many functions of the packages take a parameter of this name, and in how many folders they lie."""
    paths = [
        path
        for package in PACKAGES
        for path in sorted((REPOSITORY / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and parameter
        in [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    ]
    return {"functions": len(paths), "folders": len({path.parent for path in paths})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file to which the figures and all names are written")
    parser.add_argument("--names", action="store_true", help="print the functions, too")
    parser.add_argument("--argument", default="", help="count those that are given it, such as dataset")
    parser.add_argument("--check", action="store_true", help="fail where there are more than are allowed")
    arguments = parser.parse_args()
    told = {name: stations(*case, arguments.argument) for name, case in CASES.items()}
    source = takers_of("source")
    for name, parts in told.items():
        for part, found in parts.items():
            print(f"{name}, {part}: {found['functions']} functions in {found['files']} files")
            for file, names in found["names"].items() if arguments.names else ():
                print(f"  {file}: {', '.join(names)}")
    print(f"`source` is taken by {source['functions']} functions in {source['folders']} folders")
    if arguments.json:
        save_figures(arguments.json, stations=told, source=source)
    if arguments.check and (lines := too_many(told)):
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
