"""One in-flight control for all ranks of a machine that read the same store.

Ranks that each controlled their own share would see each other as noise, and start up side by side. Here one
of them, the *broker*, holds the control (`prefetch.control.inflight`), and every reader thread of every rank
asks it before it reads: "may I send for n bytes", and tells it when they came. Ranks are served one after the
other.

The broker is whoever binds a name in the abstract socket namespace first: that is atomic, and the kernel
frees the name when its process dies. Everything else is tied to the life of processes, too: a connection that
ends gives its credits back, and when the broker's connections end, whoever notices first binds the name
again. Reads that run go on; while nobody serves, a rank is limited by a control of its own.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from prefetch.control.depth import Decision
from prefetch.control.gate import ReadGate
from prefetch.control.inflight import Inflight, Sent
from prefetch.errors import ReaderClosedError
from prefetch.memory.interrupts import HiddenThread
from prefetch.memory.lifetimes import only_ours

_MESSAGE = struct.Struct("<cqi")  # kind, value, rank
_ASK, _DONE, _FAILED, _DEMAND = b"a", b"d", b"f", b"n"
_GRANT = struct.Struct("<q")  # the limit; then its reason
_LONGEST = 512
_UNLIMITED = -1
_TRIES = 50
"""To find or become the broker. More than one is needed only while one is about to listen, or just ended."""
_CONNECT_S = 5.0
"""The kernel answers for a broker that runs; one that was stopped is done without."""


def broker_name(store: str) -> str | None:
    """A name for the ranks of this job on this machine that read one store; None if the job has no name."""
    job = [os.environ.get(key) for key in ("MASTER_ADDR", "MASTER_PORT")]
    if None in job:
        job = [os.environ.get(key) for key in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    if None in job:
        return None
    text = "\0".join([str(os.getuid()), *map(str, job), store])
    return f"dataflow-broker-1-{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"


@dataclass(eq=False)
class _Peer:
    """A reader thread of some rank."""

    connection: socket.socket
    rank: int = -1
    asked_bytes: int | None = None
    sent: Sent | None = None


class _Line(dict[int, deque[_Peer]]):
    """The readers that wait, by rank: the first rank is served next, and is the last one then."""

    def add(self, peer: _Peer) -> None:
        self.setdefault(peer.rank, deque()).append(peer)

    def first(self) -> _Peer | None:
        return next(iter(self.values()))[0] if self else None

    def remove(self, peer: _Peer) -> None:
        waiting = self.pop(peer.rank)
        waiting.remove(peer)
        if waiting:
            self[peer.rank] = waiting


class Broker:
    """Serves one name until `close`; the thread is its own.

    Args:
        name: in the abstract namespace.
        control: the broker's own.
        now: seconds on a clock that only goes forward.

    Raises `OSError` if the name is taken.
    """

    def __init__(self, name: str, control: Inflight, *, now: Callable[[], float] = time.perf_counter) -> None:
        self._control, self._now = control, now
        self._line = _Line()
        self._peers: set[_Peer] = set()
        self._demands: dict[int, float | None] = {}
        """The demand of each rank that has a connection and has sent its own."""
        self._listener = _new_socket()
        try:
            self._listener.bind(f"\0{name}")
            self._listener.listen(128)
        except OSError:
            self._listener.close()
            raise
        self._wake, self._woken = map(only_ours, socket.socketpair())
        self._thread = HiddenThread(target=self._serve, name="prefetch-broker")
        self._thread.start()

    def close(self) -> None:
        """Stop serving; the others find a new broker. Joins."""
        with self._wake:
            self._wake.shutdown(socket.SHUT_RDWR)  # tells, whoever else has a copy
        self._thread.join()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener, self._woken:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            try:
                while True:
                    for key, _ in selector.select():
                        if key.fileobj is self._woken:
                            return
                        if key.fileobj is self._listener:
                            connection, _ = self._listener.accept()
                            peer = _Peer(only_ours(connection))
                            self._peers.add(peer)
                            selector.register(connection, selectors.EVENT_READ, peer)
                        elif not self._receive(key.data):
                            selector.unregister(key.data.connection)
                            key.data.connection.close()
                    self._grant()
            finally:
                for key in list(selector.get_map().values()):
                    if key.data is not None:
                        key.data.connection.close()

    def _receive(self, peer: _Peer) -> bool:
        """Take a message; False: that was the last."""
        data = b""
        with suppress(OSError):
            data = peer.connection.recv(_LONGEST)
        if len(data) != _MESSAGE.size:
            self._disconnected(peer)
            return False
        kind, value, rank = _MESSAGE.unpack(data)
        if kind == _DEMAND:
            self._demands[rank] = None if value == _UNLIMITED else float(value)
        if kind == _DEMAND or rank != peer.rank:
            peer.rank = rank
            self._demand()
        now = self._now()
        if kind == _ASK and peer.sent is None and peer.asked_bytes is None:
            peer.asked_bytes = value
            self._line.add(peer)
        elif kind != _DEMAND and peer.sent is not None:
            sent, peer.sent = peer.sent, None
            if kind == _DONE:
                self._control.done(now, sent)
                if value:
                    self._control.refused(now, value)
            else:
                self._control.failed(sent)
        return True

    def _disconnected(self, peer: _Peer) -> None:
        if peer.asked_bytes is not None:
            self._line.remove(peer)
        if peer.sent is not None:
            self._control.failed(peer.sent)
        peer.asked_bytes = peer.sent = None
        self._peers.discard(peer)
        if all(other.rank != peer.rank for other in self._peers):
            self._demands.pop(peer.rank, None)
        self._demand()

    def _demand(self) -> None:
        """Add up what all ranks use; no limit while one waits for data, or was not heard of yet."""
        demands = [self._demands.get(rank) for rank in {peer.rank for peer in self._peers} - {-1}]
        limited = [demand for demand in demands if demand is not None]
        self._control.demand(sum(limited) if limited and len(limited) == len(demands) else None)

    def _grant(self) -> None:
        """Admit the readers that may go."""
        now = self._now()
        while (peer := self._line.first()) is not None:
            assert peer.asked_bytes is not None
            if not self._control.admits(now, peer.asked_bytes):
                return
            self._line.remove(peer)
            peer.sent, peer.asked_bytes = self._control.sent(now, peer.asked_bytes), None
            decision = self._control.decision
            with suppress(OSError):  # its end is heard of next
                peer.connection.send(_GRANT.pack(decision.value) + decision.reason.encode()[:400])
        self._control.drained(now)


class SharedGate(ReadGate):
    """A gate whose control is the machine's. Thread-safe.

    Args:
        control: limits this rank alone while there is no broker.
        name: of the broker (`broker_name`).
        rank: of this process on its machine.
        shared_control: makes the control, should this process become the broker.
        refusals: as for `ReadGate`.
    """

    def __init__(
        self,
        control: Inflight,
        *,
        name: str,
        rank: int,
        shared_control: Callable[[], Inflight],
        refusals: Callable[[], int] = lambda: 0,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(control, refusals=refusals, now=now)
        self._name, self._rank, self._shared_control = name, rank, shared_control
        self._electing = threading.Lock()  # guards _broker
        self._broker: Broker | None = None
        self._lock = threading.Lock()  # guards what is below
        self._idle: list[socket.socket] = []
        self._all: set[socket.socket] = set()
        self._last_decision = Decision(0, "no read was granted yet")
        self._ended = False

    @contextmanager
    def read(self, nbytes: int) -> Iterator[None]:
        """A read of that many bytes, when it may begin. `ReaderClosedError` if the gate was closed."""
        connection = self._granted(nbytes)
        if connection is None:
            with super().read(nbytes):
                yield
            return
        try:
            yield
        except BaseException:
            self._finish(connection, _FAILED, 0)
            raise
        self._finish(connection, _DONE, self._new_refusals())

    def _set_demand(self, bytes_per_s: float | None) -> bool:
        if is_news := super()._set_demand(bytes_per_s):
            with suppress(ReaderClosedError):
                self.demand(bytes_per_s)
        return is_news

    def demand(self, bytes_per_s: float | None) -> None:
        """Say what this rank uses; None while it waits for data. The broker adds the ranks' up."""
        connection = self._connected()
        if connection is not None:
            self._finish(connection, _DEMAND, _UNLIMITED if bytes_per_s is None else int(bytes_per_s))

    @property
    def decision(self) -> Decision:
        """Bytes that all ranks of the machine together may have in flight, as last heard, and why."""
        with self._lock:
            return self._last_decision

    @property
    def serves(self) -> bool:
        """Return whether this process is the broker."""
        with self._electing:
            return self._broker is not None

    def close(self) -> None:
        """Close as `ReadGate.close`; if this process is the broker, another one takes over. Idempotent."""
        super().close()
        with self._lock:
            self._ended = True
            for connection in self._all:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            idle, self._idle = self._idle, []
        for connection in idle:
            self._drop(connection)
        with self._electing:
            broker, self._broker = self._broker, None
        if broker is not None:
            broker.close()

    # ---- connections --------------------------------------------------------------------------------

    def _granted(self, nbytes: int) -> socket.socket | None:
        """The connection on which a read was granted; None: nobody serves."""
        for _ in range(_TRIES):
            connection = self._connected()
            if connection is None:
                return None
            data = b""
            with suppress(OSError):
                connection.send(_MESSAGE.pack(_ASK, nbytes, self._rank))
                data = connection.recv(_LONGEST)
            if data:
                with self._lock:
                    reason = data[_GRANT.size :].decode(errors="replace")
                    self._last_decision = Decision(
                        _GRANT.unpack_from(data)[0], f"{reason}; for all ranks of the node"
                    )
                return connection
            self._drop(connection)  # the broker ended, or this gate
        return None

    def _finish(self, connection: socket.socket, kind: bytes, value: int) -> None:
        try:
            connection.send(_MESSAGE.pack(kind, value, self._rank))
        except OSError:
            self._drop(connection)
            return
        with self._lock:
            if not self._ended:
                self._idle.append(connection)
                return
        self._drop(connection)

    def _connected(self) -> socket.socket | None:
        """An idle connection or a new one; None if nobody serves."""
        with self._lock:
            if self._ended:
                raise ReaderClosedError("the loader was closed while a read waited to be admitted")
            if self._idle:
                return self._idle.pop()
        with self._electing:
            connection = self._connect()
        if connection is not None:
            with self._lock:
                self._all.add(connection)
                if self._ended:
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
        return connection

    def _connect(self) -> socket.socket | None:
        for _ in range(_TRIES):
            connection = _new_socket()
            try:
                connection.settimeout(_CONNECT_S)
                connection.connect(f"\0{self._name}")
                connection.settimeout(None)
                if _uid_of(connection) == os.getuid():
                    return connection
                connection.close()
                return None
            except ConnectionRefusedError:
                connection.close()
            except OSError:
                connection.close()
                return None
            with self._lock:
                if self._ended:
                    return None
            if self._broker is None:
                with suppress(OSError):  # another rank was faster
                    self._broker = Broker(self._name, self._shared_control(), now=self._now)
        return None

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._all.discard(connection)
        connection.close()


def _new_socket() -> socket.socket:
    return only_ours(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))


def _uid_of(connection: socket.socket) -> int:
    """The user of the other end: names in the abstract namespace are anybody's."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
