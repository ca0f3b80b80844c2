"""One in-flight budget for the ranks of a machine: never exceeded, fair, and it outlives the broker."""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from forked_kit import forked

from prefetch.control.broker import SharedGate, _Line, _Peer, broker_name
from prefetch.control.depth import Decision
from prefetch.control.inflight import CALM, Inflight
from prefetch.errors import ReaderClosedError

WAIT_S = 20.0


class FixedLimit(Inflight):
    """A control that never changes its mind, and notes the most that was in flight."""

    def __init__(self, limit: int) -> None:
        super().__init__(start_bytes=limit, max_bytes=limit)
        self.most = 0
        self.demanded: list[float | None] = []

    def _end_round(self, now_s: float) -> None:
        pass

    def sent(self, now_s: float, nbytes: int) -> object:  # type: ignore[override]
        sent = super().sent(now_s, nbytes)
        self.most = max(self.most, self.in_flight_bytes)
        return sent

    def demand(self, bytes_per_s: float | None) -> bool:
        is_news = super().demand(bytes_per_s)
        if is_news:
            self.demanded.append(bytes_per_s)
        return is_news


Make = Callable[..., SharedGate]


@pytest.fixture
def make() -> Iterator[Make]:
    name = f"dataflow-test-{uuid.uuid4().hex}"
    with ExitStack() as stack:

        def gate(rank: int = 0, control: Inflight | None = None) -> SharedGate:
            shared = control or FixedLimit(10)
            made = SharedGate(FixedLimit(10), name=name, rank=rank, shared_control=lambda: shared)
            stack.callback(made.close)
            return made

        yield gate


def brokers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch-broker"]


def test_all_ranks_together_keep_to_one_limit(make: Make) -> None:
    control = FixedLimit(10)
    gates = [make(rank, control) for rank in range(4)]

    def read_often(gate: SharedGate) -> None:
        for _ in range(25):
            with gate.read(4):
                pass

    with ThreadPoolExecutor(16) as threads:
        for done in [threads.submit(read_often, gate) for gate in gates for _ in range(4)]:
            done.result(WAIT_S)
    assert 4 <= control.most <= 10
    assert sum(gate.serves for gate in gates) == 1
    assert gates[3].decision.value == 10
    assert "all ranks of the node" in gates[3].decision.reason
    for gate in gates:
        gate.close()
    assert control.in_flight_bytes == 0
    assert not brokers()


def test_one_request_may_always_go(make: Make) -> None:
    with make().read(1000):
        pass


def test_ranks_take_turns() -> None:
    """A rank with many threads gets no more than a rank with few."""
    line, ours = _Line(), [socket.socket() for _ in range(7)]
    peers = [_Peer(connection, rank) for connection, rank in zip(ours, [1, 1, 1, 1, 0, 0, 2], strict=True)]
    for peer in peers:
        line.add(peer)
    line.remove(peers[2])  # its rank died
    order = []
    while (first := line.first()) is not None:
        line.remove(first)
        order.append(peers.index(first))
    for connection in ours:
        connection.close()
    assert order == [4, 6, 0, 5, 1, 3]


def test_the_credits_of_a_killed_rank_come_back(make: Make) -> None:
    gate = make(0)
    with gate.read(1):  # this process serves
        pass

    def hold(stop: Callable[[], None]) -> None:
        other = make(1)
        with other.read(10):
            stop()

    with forked(hold) as child, ThreadPoolExecutor(1) as thread:
        child.reached()
        waiting = thread.submit(read_once, gate)
        child.kill()
        waiting.result(WAIT_S)


def read_once(gate: SharedGate, nbytes: int = 10) -> None:
    with gate.read(nbytes):
        pass


def test_when_the_broker_dies_another_takes_over(make: Make) -> None:
    gate, other = make(0), make(1)

    def serve(stop: Callable[[], None]) -> None:
        first = make(2)
        with first.read(10):
            assert first.serves
            stop()

    with forked(serve) as child, ThreadPoolExecutor(2) as threads:
        child.reached()
        waiting = [threads.submit(read_once, each) for each in (gate, other)]
        assert not gate.serves
        child.kill()
        for done in waiting:
            done.result(WAIT_S)
    assert [gate.serves, other.serves].count(True) == 1


def test_when_the_broker_is_closed_reads_go_on(make: Make) -> None:
    first, second = make(0), make(1)
    with first.read(10), ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(read_once, second)
        first.close()
        waiting.result(WAIT_S)
    read_once(second)  # the broker that ends may have granted the one before when the first gate let go
    assert second.serves


def test_the_broker_ends_while_a_child_lives_that_was_forked_beside_it(make: Make) -> None:
    """As builders are, of a loader that is made when another one reads."""
    first, second = make(0), make(1)
    read_once(first)
    with forked(lambda stop: stop()) as child, ThreadPoolExecutor(1) as thread:
        child.reached()
        thread.submit(first.close).result(WAIT_S)
        read_once(second)
        assert second.serves


def test_closing_ends_the_wait(make: Make) -> None:
    first, second = make(0), make(1)
    with first.read(10), ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(read_once, second)
        second.close()
        with pytest.raises(ReaderClosedError):
            waiting.result(WAIT_S)
    with pytest.raises(ReaderClosedError):
        read_once(second)


def test_a_failed_read_gives_its_credits_back(make: Make) -> None:
    gate = make()

    def fail() -> None:
        with gate.read(10):
            raise ConnectionError("down")

    with pytest.raises(ConnectionError):
        fail()
    read_once(gate)


def test_without_a_broker_a_rank_is_limited_alone() -> None:
    name, control = f"dataflow-test-{uuid.uuid4().hex}", FixedLimit(10)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger, ThreadPoolExecutor(1) as thread:
        stranger.bind(f"\0{name}")  # and nobody listens
        gate = SharedGate(control, name=name, rank=0, shared_control=lambda: FixedLimit(10))
        with gate.read(10):
            waiting = thread.submit(read_once, gate)
            assert control.in_flight_bytes == 10
            assert not waiting.done()
        waiting.result(WAIT_S)
        assert not gate.serves
        assert control.in_flight_bytes == 0
        gate.close()


def test_demands_are_added_up_and_a_rank_that_waits_needs_all(make: Make) -> None:
    control = FixedLimit(10)
    gates = [make(rank, control) for rank in range(2)]
    for rank, value in [(0, 5.0), (1, 7.0), (0, None)]:
        gates[rank].demand(value)
        read_once(gates[rank])  # the answer comes after the message was heard
    assert control.demanded == [5.0, 12.0, None]


def test_what_a_rank_used_that_is_gone_is_not_counted(make: Make) -> None:
    control = FixedLimit(10)
    staying, going = (make(rank, control) for rank in range(2))
    read_once(staying)  # it serves
    staying.demand(5.0)
    going.demand(7.0)
    read_once(going)
    going.close()
    for _ in range(2):  # its last word may be heard with the first, then surely its end with the second
        read_once(staying)
    assert control.demanded == [5.0, 12.0, 5.0]


def test_a_rank_that_has_not_told_what_it_uses_is_not_held_back(make: Make) -> None:
    control = FixedLimit(10)
    gates = [make(rank, control) for rank in range(2)]
    gates[0].demand(5.0)
    read_once(gates[0])
    read_once(gates[1])
    assert control.demanded == [5.0, None]


def test_the_pace_of_a_training_reaches_the_broker_once(make: Make) -> None:
    control = FixedLimit(10)
    gate = make(0, control)
    for _ in range(CALM + 3):
        gate.observe_use(100, 1.0)
    read_once(gate)
    assert control.demanded == [100.0]
    gate.raise_priority()
    gate.raise_priority()
    read_once(gate)
    assert control.demanded == [100.0, None]


def test_decisions_of_the_shared_control_are_told(make: Make) -> None:
    control = FixedLimit(10)
    control.decision = Decision(7, "because")
    gate = make(0, control)
    read_once(gate)
    assert gate.decision == Decision(7, "because; for all ranks of the node")


def test_names_tell_jobs_and_stores_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(key, raising=False)
    assert broker_name("s3://a") is None
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    of_slurm = broker_name("s3://a")
    monkeypatch.setenv("MASTER_ADDR", "h")
    monkeypatch.setenv("MASTER_PORT", "1")
    names = {of_slurm, broker_name("s3://a"), broker_name("s3://b")}
    assert len(names) == 3
    assert None not in names
