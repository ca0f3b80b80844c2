"""`dataflow index --on` an engine, with a worker that is killed while it looks at a shard.

    python index_with_death.py FOLDER ENGINE [NAME=VALUE ...]

FOLDER has shards `*.tar`; `ENGINE.catalog` is written there, and `ENGINE.died`: the process that was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

from dataflow.engines import engine
from dataflow.tools.terminal.indexing import index_source
from sharding.formats.tar.format import TarFormat


class DyingTar(TarFormat):
    """The format of tars; who first looks at `03.tar` is killed then."""

    def __init__(self, note: str) -> None:
        super().__init__()
        self._note = note

    def scan(self, file: Any, shard: Any, *, block_bytes: int) -> Any:
        scan = super().scan(file, shard, block_bytes=block_bytes)
        if shard.url.endswith("/03.tar"):
            with contextlib.suppress(FileExistsError), open(self._note, "x") as note:
                note.write(str(os.getpid()))
                note.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        return scan


def main(folder: str, name: str, *options: str) -> None:
    given = dict(option.split("=", 1) for option in options)
    workers = given.pop("workers", None)
    with engine(name, workers=workers and int(workers), options=given, say=print) as executor:
        print(f"here: {os.getpid()}")
        index_source(
            [f"{folder}/*.tar"],
            {"format": _format(f"{folder}/{name}.died")},
            output=f"{folder}/{name}.catalog",
            block_bytes=None,
            executor=executor,
        )


def _format(note: str) -> TarFormat:
    """Of this module by its name, which workers import, and not of `__main__`."""
    import index_with_death

    return index_with_death.DyingTar(note)


if __name__ == "__main__":
    main(*sys.argv[1:])
