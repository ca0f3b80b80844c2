"""A cluster of Ray without Ray: actors are objects of this process, whose calls run in threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from threads_kit import threads_left

from dataflow.actors import builders


class ActorDiedError(Exception):
    """As Ray's."""


class ActorUnavailableError(Exception):
    """As Ray's."""


class RayTaskError(Exception):
    """As Ray's."""


class Result:
    """An object reference: a value to come, and its second half."""

    def __init__(self) -> None:
        self._future: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self._future

    def answer(self, value: Any) -> None:
        """Give the value, unless the actor has died meanwhile: what comes first counts."""
        with suppress(InvalidStateError):
            self._future.set_result(value)

    def fail(self, error: Exception) -> None:
        """Give the error, likewise."""
        with suppress(InvalidStateError):
            self._future.set_exception(error)


class LocalActor:
    """An actor whose calls run in threads of this process, until it is killed."""

    def __init__(self, made: Any, hears: Callable[[int, int], None], options: dict[str, Any]) -> None:
        self.made, self._hears, self.options_given = made, hears, options
        self.is_placed = threading.Event()
        self.calls: list[Result] = []
        self._openings: list[threading.Thread] = []
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(
            remote=lambda *arguments: self._call(name, 1, arguments)[0],
            options=lambda num_returns: SimpleNamespace(
                remote=lambda *arguments: self._call(name, num_returns, arguments)
            ),
        )

    def _call(self, name: str, count: int, arguments: Any) -> list[Result]:
        results = [Result() for _ in range(count)]
        self.calls.extend(results)
        if self.error is not None:
            self.die(self.error)
        else:
            thread = threading.Thread(target=self._run, args=(name, results, arguments), daemon=True)
            thread.start()
            if name == "open":
                self._openings.append(thread)
        return results

    def _run(self, name: str, results: list[Result], arguments: Any) -> None:
        self.is_placed.wait()
        if self.error is not None:
            return
        if name == "handle":
            self._hears(*arguments[:2])
        try:
            value = getattr(self.made, name)(*arguments)
        except Exception as error:
            for result in results:
                result.fail(RayTaskError(str(error)))
            return
        for result, part in zip(results, value if len(results) > 1 else [value], strict=True):
            if isinstance(part, np.ndarray) and not result.future().done():
                part.flags.writeable = False  # as in Ray's store
            result.answer(part)

    def die(self, error: Exception) -> None:
        """All calls that are under way fail."""
        self.error = error
        for result in self.calls:
            result.fail(error)
        self.calls.clear()
        self.is_placed.set()
        self.made._transport._requests.put(None)
        self.made._ended.set()

    def finish(self) -> None:
        """End what a process would take with it: first who builds, then who reads for him."""
        for thread in self._openings:
            thread.join(10)
        self.made._transport._requests.put(None)
        if self.made._pool is not None:
            self.made._pool.close(10)
        if self.made._reader is not None:
            self.made._reader._threads.close(10)


class LocalRay:
    """What `RayBuilders` uses of Ray: a cluster of one node."""

    exceptions = SimpleNamespace(ActorDiedError=ActorDiedError, RayTaskError=RayTaskError)
    util = SimpleNamespace(
        scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
    )

    def __init__(self) -> None:
        self.actors: list[LocalActor] = []
        self.hears: Callable[[LocalActor, int, int], None] = lambda actor, kind, number: None
        self.num_cpus = 8
        self._lock = threading.Lock()

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "one", "Alive": True, "Resources": {"CPU": float(self.num_cpus)}, "Labels": {}}]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "one")

    def remote(self, made: type) -> Any:
        def start(options: dict[str, Any]) -> LocalActor:
            actor = LocalActor(made(), lambda *message: self.hears(actor, *message), options)
            self.actors.append(actor)
            self._place()
            return actor

        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=partial(start, options)))

    def _place(self) -> None:
        """Let actors begin that there are CPUs for."""
        with self._lock:
            alive = [actor for actor in self.actors if actor.error is None]
            free = self.num_cpus - sum(
                actor.options_given["num_cpus"] for actor in alive if actor.is_placed.is_set()
            )
            for actor in alive:
                if not actor.is_placed.is_set() and actor.options_given["num_cpus"] <= free:
                    free -= actor.options_given["num_cpus"]
                    actor.is_placed.set()

    def kill(self, actor: LocalActor) -> None:
        actor.die(ActorDiedError("killed"))
        self._place()


@contextmanager
def ray_is_local() -> Iterator[LocalRay]:
    """Actors of all loaders are those of one cluster; they have ended afterwards."""
    ray = LocalRay()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builders, "connected_ray", lambda: ray)
        yield ray
    assert threads_left("dataflow-hand-out") == []  # which kill them, where nobody waits for that
    assert all(actor.error for actor in ray.actors)
    for actor in ray.actors:
        actor.finish()
    assert threads_left() == []
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
