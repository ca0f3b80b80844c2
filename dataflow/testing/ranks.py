"""Run a function in several ranks on this machine: the test-kit for multi-process code.

Each rank is a fresh process with the environment that torchrun gives it, and with `torch.distributed`
initialised over loopback. The rendezvous store lives in the calling process and listens on a port that the
system chose, so there is no race for ports. The caller waits on pipes and process sentinels with one
deadline; whatever ends the wait (results, an exception, a dead rank, the deadline, Ctrl-C), all ranks and
the temporary folder are gone before `run_ranks` returns or raises.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, get_args

from dataflow.testing.rank_process import Raised, RankTask, run_rank
from sharding.errors import DataflowError

R = TypeVar("R")
StartMethod = Literal["spawn", "forkserver"]
Output = Literal["shared", "by rank"]

_EXIT_S = 10.0
"""Seconds a process gets to end by itself once it is told to."""
_PRELOADED = ["__main__", "torch.distributed", "torch._dynamo", __name__]
"""Modules that the fork server imports; making a DistributedDataParallel imports torch._dynamo, 1.3 s a
rank."""
_GRACE_S = 1.0
"""Seconds to look for a dead rank behind another rank's complaint."""


class RankError(DataflowError):
    """A rank died, left early, or raised what cannot be sent between processes.

    Attributes:
        rank: which one.
        reason: what happened, in words.
        exitcode: exit code of its process, negative for a signal; None if it had not ended.
    """

    def __init__(self, rank: int, reason: str, exitcode: int | None = None) -> None:
        super().__init__(rank, reason, exitcode)
        self.rank, self.reason, self.exitcode = rank, reason, exitcode

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}"


def run_ranks(
    fn: Callable[..., R],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    backend: str | None = "gloo",
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    num_nodes: int = 1,
    hosts: Sequence[str] | None = None,
    racks: Sequence[str] | None = None,
    output: Output = "shared",
    start_method: StartMethod = "spawn",
    prepare: Callable[[], object] | None = None,
) -> list[R]:
    """Call `fn(*args, **kwargs)` once in each of `world_size` processes and wait for all of them.

    A rank asks `torch.distributed.get_rank()` or the environment who it is. One torch thread a rank, as
    under torchrun, unless `OMP_NUM_THREADS` says otherwise.

    Args:
        fn: a function at module level (ranks import it; lambdas and inner functions have no name to
            import). In a script, the call must stand under `if __name__ == "__main__":`.
        world_size: number of ranks.
        args: its positional arguments, the same for every rank; pickled.
        kwargs: its named arguments, likewise.
        backend: what `torch.distributed` is initialised with; None: not at all, `fn` may do it.
        timeout_s: seconds for everything, the start of the processes (1 to 3 s with "spawn") included.
        env: environment variables for the ranks, beside this process's own; set before `fn` is imported.
        num_nodes: pretend that the ranks are spread over so many machines, in consecutive groups.
        hosts: host name of each node, as Python in its ranks and `Topology` tell it; None: this machine's.
        racks: rack of each node, told as Slurm tells switches; None: what the environment says.
        output: "shared": what ranks print goes to this process's stdout and stderr as it comes. "by rank": it
            is kept, and printed to `sys.stdout` when all have ended, however they did, rank by rank, with
            "[rank 1] " before each line.
        start_method: "spawn" starts an interpreter a rank; "forkserver" forks a helper that has torch
            imported, which takes milliseconds (the helper ends with this process).
        prepare: called in each rank before `fn` is imported; picklable.

    Returns:
        What each rank returned, in rank order; pickled on the way.

    Raises:
        Exception: what a rank raised, with the rank's traceback as a note; the other ranks were stopped.
        RankError: a rank died, by a signal or an exit.
        TimeoutError: ranks were not done in time; the stacks of their threads are notes.
        ValueError: `fn` or its arguments cannot be sent to the ranks.

    Examples:
        >>> numbers = run_ranks(torch.distributed.get_rank, world_size=2)  # any function at module level
        >>> numbers
        [0, 1]
    """
    __tracebackhide__ = True
    if world_size < 1 or num_nodes < 1 or world_size % num_nodes:
        raise ValueError(
            f"world_size must be a multiple of num_nodes, both >= 1, got {world_size} and {num_nodes}"
        )
    for name, names in (("hosts", hosts), ("racks", racks)):
        if names is not None and (isinstance(names, str) or len(names) != num_nodes or not all(names)):
            raise ValueError(f"{name} must be a list of num_nodes={num_nodes} names, got {names!r}")
    if output not in get_args(Output):
        raise ValueError(f'output must be "shared" or "by rank", got {output!r}')
    if timeout_s <= 0:
        raise ValueError(f"timeout_s must be > 0 seconds, got {timeout_s}")
    call = _pickled_call(fn, tuple(args), dict(kwargs or {}))
    with ExitStack() as stack:
        port = stack.enter_context(_Store())
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="dataflow-ranks-")))
        ranks = stack.enter_context(_Ranks(timeout_s, start_method))
        for rank in range(world_size):
            node = rank * num_nodes // world_size
            environ = _environ(rank, world_size, num_nodes, port) | _switch(racks, node) | dict(env or {})
            task = RankTask(
                call=call,
                environ=environ,
                backend=backend,
                stacks=str(folder / f"{rank}.stacks"),
                prepare=prepare,
                host=None if hosts is None else hosts[node],
                output=str(folder / f"{rank}.output") if output == "by rank" else None,
            )
            ranks.start(task)
        return ranks.results()


def _pickled_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        pickle.dumps(fn)
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise ValueError(
            f"fn must be a function at module level, which the ranks can import; got {name}"
        ) from error
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise ValueError(f"the arguments of fn must be picklable: {error}") from error


def _environ(rank: int, world: int, num_nodes: int, port: int) -> dict[str, str]:
    local_world = world // num_nodes
    node, local = divmod(rank, local_world)
    return {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(local_world),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # As under torchrun: the store is there already, no rank has to host it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _switch(racks: Sequence[str] | None, node: int) -> dict[str, str]:
    """Slurm's variables for a node below the switch, or the path of switches "s0.s4", that a rack is."""
    if racks is None:
        return {}
    kinds = ["switch"] * len(racks[node].split("."))
    return {
        "SLURM_TOPOLOGY_ADDR": f"{racks[node]}.node{node}",
        "SLURM_TOPOLOGY_ADDR_PATTERN": ".".join([*kinds, "node"]),
    }


class _Store:
    """The rendezvous store, in this process, on a free port."""

    def __enter__(self) -> int:
        from torch import distributed

        self._store: Any = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return int(self._store.port)

    def __exit__(self, *_: object) -> None:
        self._store = None  # the last reference: it stops listening


@dataclass(kw_only=True)
class _Rank:
    """One process and what it has said."""

    number: int
    process: Any
    pipe: Connection
    alive: Connection
    """Open as long as this process lives; the rank ends when it closes."""
    task: RankTask
    started: bool = False
    outcome: bytes | Raised | None = None

    def hear(self) -> bool:
        """Take one message; False if the process is gone without another."""
        try:
            if not self.pipe.poll():
                return False
            kind, value = self.pipe.recv()
        except (EOFError, ConnectionError):
            return False
        self.started = True
        if kind != "started":
            self.outcome = value
        return True

    def kill(self) -> None:
        """End the process and what it started, and reap it."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # also after its own end: children may live on
        except (ProcessLookupError, PermissionError):  # none is left, or it has no group of its own yet
            self.process.kill()
        self.process.join()

    def stack_text(self) -> str:
        """Return what faulthandler wrote, or ""."""
        return _text_of(self.task.stacks).strip()

    def print_output(self) -> None:
        """Print the output that was kept, each line with the rank's number."""
        for line in _text_of(self.task.output).splitlines() if self.task.output else ():
            print(f"[rank {self.number}] {line}")


class _Ranks:
    """The processes of one `run_ranks`; leaving the block ends them all."""

    def __init__(self, timeout_s: float, start_method: StartMethod) -> None:
        self._context: Any = get_context(start_method)
        if start_method == "forkserver":
            # Imported once for all ranks to come; only the first call in this process has an effect.
            self._context.set_forkserver_preload(_PRELOADED + ["_pytest.config"] * ("pytest" in sys.modules))
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        self._ranks: list[_Rank] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.process.close()
            rank.pipe.close()
            rank.alive.close()
        for rank in self._ranks:
            rank.print_output()

    def start(self, task: RankTask) -> None:
        """Start the process of the next rank."""
        ours, theirs = self._context.Pipe()
        watched, alive = self._context.Pipe(duplex=False)
        number = len(self._ranks)
        process = self._context.Process(target=run_rank, args=(task, theirs, watched), name=f"rank-{number}")
        try:
            process.start()
        finally:
            theirs.close()
            watched.close()
        self._ranks.append(_Rank(number=number, process=process, pipe=ours, alive=alive, task=task))

    def results(self) -> list[Any]:
        """Wait for all ranks, let them go together, and unpickle what they returned."""
        __tracebackhide__ = True
        while waiting := [rank for rank in self._ranks if rank.outcome is None]:
            news = [rank.pipe for rank in waiting] + [rank.process.sentinel for rank in waiting]
            ready = wait(news, max(0.0, self._deadline - time.monotonic()))
            if not ready:
                raise self._hung(waiting)
            for rank in waiting:
                if (rank.pipe in ready or rank.process.sentinel in ready) and not rank.hear():
                    raise self._died(rank)
                if isinstance(rank.outcome, Raised):
                    raise self._first_cause(self._failed(rank, rank.outcome))
        self._let_go()
        return [pickle.loads(rank.outcome) for rank in self._ranks]  # type: ignore[arg-type]

    def _let_go(self) -> None:
        for rank in self._ranks:
            try:
                rank.pipe.send(None)
            except OSError:
                raise self._died(rank) from None
        for rank in self._ranks:
            rank.process.join(_EXIT_S)
            if rank.process.exitcode != 0:
                raise self._died(rank)

    def _died(self, rank: _Rank) -> RankError:
        rank.process.join(_EXIT_S)
        code = rank.process.exitcode
        when = "after it had returned" if rank.outcome is not None else "before it returned"
        if code is None:
            how = f"did not end within {_EXIT_S:g} s"
        elif code < 0:
            how = f"was killed by {_signal_name(-code)}"
        else:
            how = f"exited with code {code}"
        if not rank.started:
            when = 'before it began (in a script, run_ranks must stand under `if __name__ == "__main__":`)'
        error = RankError(rank.number, f"{how} {when}", code)
        if text := rank.stack_text():
            error.add_note(text)
        return error

    def _failed(self, rank: _Rank, raised: Raised) -> BaseException:
        error: BaseException | None = None
        if raised.error is not None:
            try:
                error = pickle.loads(raised.error)
            except Exception:  # its class cannot be imported here
                error = None
        if error is None or isinstance(error, (SystemExit, KeyboardInterrupt, GeneratorExit)):
            error = RankError(rank.number, f"raised {raised.summary}")
        error.add_note(f"raised by rank {rank.number} of {len(self._ranks)}:\n{raised.traceback.rstrip()}")
        return error

    def _first_cause(self, error: BaseException) -> BaseException:
        """The death of a rank if it is what another rank complains about, else that complaint.

        The connections of a dying rank close before its end is seen here, so its peers may be heard first.
        """
        if not isinstance(error, (RuntimeError, ConnectionError)):
            return error
        others = {rank.process.sentinel: rank for rank in self._ranks if rank.outcome is None}
        for sentinel in wait(list(others), _GRACE_S):
            rank = others[sentinel]
            while rank.hear():
                pass
            if rank.outcome is None:
                died = self._died(rank)
                died.add_note(f"then another rank raised {type(error).__name__}: {error}")
                return died
        return error

    def _hung(self, waiting: Sequence[_Rank]) -> TimeoutError:
        for rank in waiting:
            if rank.process.exitcode is None:
                os.kill(rank.process.pid, signal.SIGUSR1)
        numbers = ", ".join(str(rank.number) for rank in waiting)
        error = TimeoutError(
            f"rank {numbers} of {len(self._ranks)} not done after {self._timeout_s:g} s"
            f" ({len(self._ranks) - len(waiting)} returned)"
        )
        give_up = time.monotonic() + _EXIT_S
        for rank in waiting:
            rank.process.join(max(0.0, give_up - time.monotonic()))
            text = rank.stack_text() or ("no stacks" if rank.started else "the process was still starting")
            error.add_note(f"rank {rank.number} stood at:\n{text}")
        return error


def _text_of(path: str) -> str:
    """Return the text of a file that a rank wrote; "" if it has not begun."""
    try:
        return Path(path).read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
