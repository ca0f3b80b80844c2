"""A Ray cluster whose actors serve one loader after the other, for tests that open thousands of loaders.

An actor takes 2 s of a core to start: Python and torch. Here a loader's actor is an object in a process that
has served others before, and is itself an actor. Calls, objects and the store they lie in are Ray's; only a
death is none of a process (tests/ecosystem/test_ecosystem_ray.py has those).
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent import futures
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray

from dataflow.actors import builders
from dataflow.actors.actor import ActorResponse, BuilderActor

_END_S = 10.0
"""A process in which a loader's actor does not end within that is not used again."""
_CALLS = 16
_STORE_BYTES = 256 << 20
_KITS = Path(__file__).parent
_TESTS = _KITS.parent


class Host:
    """A process that is the actor of one loader at a time."""

    def __init__(self) -> None:
        self._now = BuilderActor(), 0
        """The actor and the number of its loader, in one: a late call must not come to another's actor."""

    def call(self, number: int, name: str, *arguments: Any) -> Any:
        """What a method of the actor returns; `number`: of the loader, as calls may come late."""
        actor, own = self._now
        if number != own:
            raise RuntimeError("the loader was closed")
        return getattr(actor, name)(*arguments)

    def end(self) -> bool:
        """End what a process would take with it, and be another actor; False: something still runs."""
        actor, number = self._now
        self._now = BuilderActor(), number + 1
        actor._ended.set()
        has_ended = True
        if actor._pool is not None:
            calls = actor._transport
            calls._requests.put(None)  # type: ignore[arg-type]
            has_ended = actor._pool.close(_END_S)
            for number in [*calls._responses]:  # calls that nobody waits for
                calls._responses.pop(number).put((ActorResponse(-1, 0, (0, 0, 0)), None))
        if actor._reader is not None:
            has_ended = actor._reader._threads.close(_END_S) and has_ended
        return has_ended


class _Actor:
    """What `RayBuilders` takes for the handle of an actor."""

    def __init__(self, host: Any, number: int) -> None:
        self.host, self.number = host, number

    def __getattr__(self, name: str) -> Any:
        def call(method: Any) -> Any:
            return partial(method.remote, self.number, name)

        method = self.host.call
        return SimpleNamespace(
            remote=call(method),
            options=lambda **options: SimpleNamespace(remote=call(method.options(**options))),
        )


def start_cluster() -> None:
    """Start a cluster, which ends with this process, and connect to it; for children, too."""
    _connect(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=_STORE_BYTES,
        _system_config={"worker_niceness": 0},  # Ray's is 15: beside other work tests would wait for ever
    )
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address


def _connect(**options: Any) -> None:
    folders = [_TESTS.parent, _KITS, *(path for path in (_TESTS / "dataflow").iterdir() if path.is_dir())]
    variables = {"PYTHONPATH": os.pathsep.join([*map(str, folders), *filter(None, sys.path)])}
    ray.init(log_to_driver=False, runtime_env={"env_vars": variables}, **options)


class ReusedActors:
    """The module `ray`, connected to a cluster, but for how actors begin and end."""

    def __init__(self) -> None:
        if not ray.is_initialized():
            _connect(address=os.environ["RAY_ADDRESS"])
        self._new_host = ray.remote(Host).options(num_cpus=0, max_concurrency=_CALLS).remote
        self._lock = threading.Lock()  # guards the hosts
        self._hosts: list[tuple[Any, int]] = []
        """Those that serve no loader, and how many they have served."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)

    def remote(self, _: type) -> Any:
        """As `ray.remote(BuilderActor)`."""
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._start))

    def _start(self) -> _Actor:
        with self._lock:
            return _Actor(*(self._hosts.pop() if self._hosts else (self._new_host(), 0)))

    def kill(self, actor: _Actor) -> None:
        """As `ray.kill`: the second call does nothing."""
        host, actor.host = actor.host, None
        if host is not None:
            host.end.remote().future().add_done_callback(partial(self._take_back, host, actor.number + 1))

    def _take_back(self, host: Any, number: int, has_ended: futures.Future[bool]) -> None:
        error = has_ended.exception()
        if isinstance(error, AttributeError):  # the actor is another than this kit knows
            print(f"actors cannot be used again, and each takes 5 s: {error}", file=sys.stderr, flush=True)
            os.abort()
        if error is None and has_ended.result():
            with self._lock:
                self._hosts.append((host, number))


def reuse_actors() -> None:
    """Have loaders use the cluster that was started for this process, until it ends."""
    connected = ReusedActors()
    builders.connected_ray = lambda: connected
