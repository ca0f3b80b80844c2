"""No wait without a deadline in what the training thread runs: every call that may wait is looked at.

A wait that takes a time, or is known not to wait, is fine. The others are listed with the reason why they
end; a new one has to get a deadline, or a line here.
"""

from __future__ import annotations

import ast

from source_kit import MODULES, facts, waits_of

NOT_OURS = (
    *("dataflow.conversion", "dataflow.executors", "dataflow.tools"),
    *("dataflow.testing", "dataflow.pytest_plugin", "dataflow.integrations"),
)
"""Commands, tests and frameworks' code: no loop over batches waits there."""
BUILDS = "a thread or process that builds, which the loader wakes when it is closed"
DONE = "called back when it is done"
LOOP = "in an event loop, whose requests have deadlines; closing cancels them"
OURS = "for a thread that runs code of ours alone, which was just told to end"
GROUP = "a collective, which ends with the time-out of its process group"
ENDS = {
    "dataflow.actors.actor": BUILDS,
    "dataflow.actors.builders.RayBuilders": DONE,
    "dataflow.actors.reading.ChunkReads.rows": BUILDS,
    "dataflow.grad.strategies": GROUP,
    "dataflow.telemetry.serving.http.HttpServer": "a process of its own, or until it is interrupted",
    "dataflow.telemetry.serving.serve.MetricsEndpoint.close": "it was killed",
    "dataflow.planning.ahead.PartsKnown.wait_for": "a thread that reads, which closing wakes",
    "dataflow.processes.builders.ProcessBuilders._listen": BUILDS,
    "dataflow.text.template_bounds": "a context variable, no queue",
    "dataflow.workers.iterator.WorkerIterator._next_data": "a daemon thread where the interpreter ends",
    "prefetch.control.broker.Broker.close": OURS,
    "prefetch.control.gate.ReadGate.read": "a thread that reads, which closing wakes",
    "prefetch.engine.pool.PriorityPool._run": BUILDS,
    "prefetch.ipc.pipe.PipeTransport.receive": BUILDS,
    "prefetch.memory.guards.FileGuards.close": OURS,
    "prefetch.memory.interrupts.Monitor.wait": "a lock that was just made",
    "prefetch.http.connections": DONE,
    "prefetch.store.fetching": LOOP,
    "prefetch.http.hub": DONE,
    "prefetch.store.retrier.Retrier.__exit__": OURS,
    "prefetch.workers.starting._kill": "it was killed",
    "prefetch.workers.template._serve": "a process of its own, for one that has ended",
    "prefetch.workers.threads.WorkerThreads.on_all": "for threads of ours, which have just begun",
    "prefetch.workers.threads.WorkerThreads._with_rest": "it is not empty, and nobody else takes from it",
}
"""Functions, classes or modules with waits that have no time, and why these end."""


def test_every_wait_of_the_training_thread_has_a_deadline_or_a_reason() -> None:
    found = [
        f"{where}:{line}"
        for path in MODULES
        if not ".".join(path.with_suffix("").parts).startswith(NOT_OURS)
        for where, line in facts(path).waits
    ]
    assert not [where for where in found if not where.startswith(tuple(ENDS))], "waits without a deadline"
    assert not [reason for reason in ENDS if not any(where.startswith(reason) for where in found)]


def test_a_wait_without_a_time_is_found() -> None:
    code = "class A:\n    def b(self):\n        self.x.wait(None)\n        self.x.wait(1)\n        y.join()\n"
    assert [*waits_of(ast.parse(code), "m")] == [("m.A.b", 3), ("m.A.b", 5)]
