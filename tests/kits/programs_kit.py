"""Python programs for tests, started or forked, each in a process group of its own.

To start Python and to import torch takes 1.9 s of a core; to fork a process that has done so, milliseconds.
A `Nursery` is such a process, with one thread and nothing but imports behind it. A program forked from it is
executed in the real `__main__` and ends as any program does, with all that the interpreter does at its end.
Tests of how a program is started (from a file, by `-m`, by `-c`) start theirs. The commands of `dataflow` run
in the process of the test.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WAIT_S = 60.0
"""Nothing here waits longer; a machine that is busy with other things may need some of it."""
IMPORTED = ("dataflow.workers.process_main", "dataflow.loader", "psutil", "worker_kit")
"""What most programs import, torch among it."""
_MOST_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


class Nursery:
    """A process with modules imported that programs are forked from, one at a time; ends with this one."""

    def __init__(self, imported: Sequence[str]) -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        run = f"import programs_kit; exec(programs_kit.next_program({theirs.fileno()}, {imported}))"
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", run],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": _search_path()},
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self.close)

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.wait(WAIT_S)


_nurseries: dict[tuple[str, ...], Nursery] = {}
"""Those of this process, by what they have imported, once a program was asked for."""


def nursery(*imported: str) -> Nursery:
    """One of this process, made when first needed."""
    if imported not in _nurseries:
        _nurseries[imported] = Nursery(imported)
    return _nurseries[imported]


def nursery_pids() -> list[int]:
    """Their processes, which live as long as this one does."""
    return [each.process.pid for each in _nurseries.values()]


def next_program(connection_fd: int, imported: Sequence[str]) -> CodeType:
    """Fork a child for each program that is asked for; returns in the children, what they are to execute."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in imported:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the children need not look through torch at their end
    connection = socket.socket(fileno=connection_fd)
    while True:
        message, outputs, _, _ = socket.recv_fds(connection, _MOST_BYTES, 2)
        if not message:
            os._exit(0)
        child = os.fork()
        if not child:
            os.setsid()
            connection.send(json.dumps(os.getpid()).encode())
            connection.close()
            return _prepared(json.loads(message), *outputs)
        for fd in outputs:
            os.close(fd)
        connection.send(json.dumps(os.waitpid(child, 0)[1]).encode())


def _prepared(program: dict[str, Any], *outputs: int) -> CodeType:
    """Make this process as if Python had been started for the program; returns its code."""
    for fd, replaced in zip(outputs, (1, 2), strict=True):
        os.dup2(fd, replaced)
        os.close(fd)
    os.chdir(program["cwd"])
    os.environ.clear()
    os.environ.update(program["environment"])
    tempfile.tempdir = None  # as the environment says
    path = Path(program["argv"][0])
    sys.argv[:] = program["argv"]
    sys.path.insert(0, str(path.parent))
    vars(sys.modules["__main__"])["__file__"] = str(path)
    return compile(path.read_text(), str(path), "exec")


class ForkedProgram:
    """A program forked from the nursery, as far as `subprocess.Popen` has the same."""

    def __init__(
        self, arguments: list[str], environment: dict[str, str], cwd: str, imported: Sequence[str]
    ) -> None:
        self.returncode: int | None = None
        self._connection = nursery(*imported).connection
        self._output, output = os.pipe()
        self._errors, errors = os.pipe()
        program = {"argv": arguments, "environment": environment, "cwd": cwd}
        socket.send_fds(self._connection, [json.dumps(program).encode()], [output, errors])
        os.close(output), os.close(errors)
        self.pid: int = json.loads(self._connection.recv(_MOST_BYTES))

    def communicate(self, timeout: float = WAIT_S) -> tuple[str, str]:
        """Its output and errors, when it has ended and nobody else may write there any more."""
        if self.returncode is not None:
            return "", ""
        texts = {self._output: bytearray(), self._errors: bytearray()}
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for fd in texts:
                selector.register(fd, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise subprocess.TimeoutExpired("a forked program", timeout)
                for key, _ in ready:
                    if piece := os.read(key.fd, _MOST_BYTES):
                        texts[key.fd] += piece
                    else:
                        selector.unregister(key.fd)
        for fd in texts:
            os.close(fd)
        self.returncode = os.waitstatus_to_exitcode(json.loads(self._connection.recv(_MOST_BYTES)))
        output, errors = (bytes(text).decode() for text in texts.values())
        return output, errors


class Script:
    """A Python program of its own process group; ends with the `with` block at the latest."""

    def __init__(
        self,
        text: str,
        *args: object,
        how: str = "file",
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        imported: Sequence[str] = IMPORTED,
    ) -> None:
        environment = {**os.environ, "PYTHONPATH": _search_path(*filter(None, [folder])), **(variables or {})}
        command = [] if how == "forked" else [sys.executable, "-X", "faulthandler"]
        if how == "-c":
            command += ["-c", text]
        else:
            assert folder is not None
            (folder / "script_main.py").write_text(text)
            command += ["-m", "script_main"] if how == "-m" else [str(folder / "script_main.py")]
        command += map(str, args)
        self.process = (
            ForkedProgram(command, environment, str(cwd or Path.cwd()), imported)
            if how == "forked"
            else subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                cwd=cwd,
                start_new_session=True,
            )
        )

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def end(self, timeout_s: float = WAIT_S) -> tuple[int, str, str]:
        """Wait for its end: exit code, output, errors."""
        out, err = self.process.communicate(timeout=timeout_s)
        code = self.process.returncode
        assert code is not None
        return code, out, err


def _search_path(*folders: Path) -> str:
    """Where a program looks for modules before those that are installed."""
    return os.pathsep.join(
        [*map(str, (*folders, HERE, HERE / "grad", ROOT)), os.environ.get("PYTHONPATH", "")]
    )


SERVER_BY_DEFAULT = """
import multiprocessing
multiprocessing.get_all_start_methods = lambda: ["forkserver", "fork", "spawn"]
multiprocessing.get_start_method = lambda allow_none=False: "forkserver"
"""
"""At the beginning of a script: processes start from a server unless it says otherwise, as in Python 3.14."""


def run_script(text: str, *args: object, **options: Any) -> tuple[int, str, str]:
    """Run a program to its end, with options of `Script`: exit code, output, errors."""
    with Script(text, *args, **options) as script:
        return script.end()


def run_command(*arguments: object) -> tuple[int, str]:
    """Exit code and everything printed by a command of `dataflow`, without indents and runs of spaces."""
    from click.testing import CliRunner

    from dataflow.tools.cli import main

    result = CliRunner().invoke(main, [*map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, "\n".join(" ".join(line.split()) for line in result.output.splitlines())


def printed_on(page: str, script: str) -> str:
    """The first text block behind the first lines of `examples/<script>.py` on a page."""
    text = (ROOT / page).read_text("utf-8")
    _, begun, rest = text.partition(f"<!-- include examples/{script}.py")
    found = re.search(r"^```text\n(.*?)^```$", rest, re.MULTILINE | re.DOTALL)
    assert begun, f"{page} does not show {script}.py"
    assert found, f"{page} does not show what {script}.py prints"
    return found[1]


def without_figures(text: str) -> str:
    """A text as any run prints it: each number is 0, and runs of spaces are one."""
    return re.sub(r"[ \t]+", " ", re.sub(r"\d[\d,]*(\.\d+)?", "0", text))
