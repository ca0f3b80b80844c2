"""`dataflow index` and `convert` on an engine, in each of which a worker is killed in the middle.

    python -m work_with_deaths FOLDER NAME ENGINE [OPTION=VALUE ...]

FOLDER has shards `*.tar`. What was made lies in FOLDER/NAME, with the ids of the processes that were killed.
`only=index` leaves out the latter. An ENGINE called "here" is this process, and nobody is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from dataflow import convert
from dataflow.executors import engine, run_all
from dataflow.tools.terminal.indexing import index_source
from sharding.formats.tar.format import TarFormat

FIRST = "FIRST_PROCESS"
"""The environment's id of the process that starts the engine: as a global it would tell runs apart."""


def die_once(note: str) -> None:
    """Kill this process, and tell in a file which it was; not a second time."""
    with contextlib.suppress(FileExistsError), open(note, "x") as file:
        file.write(str(os.getpid()))
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


class DyingTar(TarFormat):
    """The format of tars; who first looks at `2.tar` is killed then."""

    def __init__(self, note: str) -> None:
        super().__init__()
        self._note = note

    def scan(self, file: Any, shard: Any, *, block_bytes: int) -> Any:
        scan = super().scan(file, shard, block_bytes=block_bytes)
        if shard.url.endswith("/2.tar"):
            die_once(self._note)
        return scan


def dying(sample: dict[str, Any], note: str) -> dict[str, Any]:
    """The sample; the worker that first maps the third of `1.tar` is killed then."""
    is_first = str(os.getpid()) == os.environ.get(FIRST)  # which looks at some samples, too
    if sample["__key__"] == "1-2" and not is_first:
        die_once(note)
    return sample


def main(folder: str, name: str, engine_name: str, *options: str) -> None:
    import work_with_deaths as ours  # workers import it, and not `__main__`

    os.environ[FIRST] = str(os.getpid())
    made = Path(folder, name)
    made.mkdir(exist_ok=True)
    notes = [str(made / "index.died"), str(made / "convert.died")]
    given = dict(option.split("=", 1) for option in options)
    workers, only = int(given.pop("workers", 0)) or None, given.pop("only", "")
    if engine_name == "slurm":  # on one machine, files are there at once
        from submitit.core.core import Job

        Job._results_timeout_s = 0
    started: Any = nullcontext()
    if engine_name == "here":
        for note in notes:
            Path(note).touch()
    else:
        started = engine(engine_name, workers=workers, options=given, say=print)
    with started as executor:
        index_source(
            [f"{folder}/*.tar"],
            {"format": ours.DyingTar(notes[0])},
            output=f"{made}/x.catalog",
            block_bytes=None,
            executor=executor,
        )
        if only != "index":
            convert(
                f"{folder}/*.tar",
                made / "rows",
                to="tar",
                shard_samples=4,
                map=partial(ours.dying, note=notes[1]),
                workers=1 if executor is None else None,
                executor=executor,
            )


def _say_and_wait(folder: str) -> None:
    Path(folder, "begun").write_text(f"{os.getpid()}\n")
    Path(folder, "never").read_text()


def wait_for_ever(folder: str) -> None:
    """Run a task that has no end, on processes."""
    with engine("processes", workers=1) as executor:
        for _ in run_all(executor, _say_and_wait, [folder]):
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
