"""Answers of all kinds over a raw socket: what is taken, asked again, or left to the client."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from forked_kit import exit_code_in_child

from prefetch.counts import ReadStats
from prefetch.errors import ReaderClosedError
from prefetch.http.connections import BadAnswerError, Connections, Destination, parse_head
from prefetch.retries import RetryPolicy
from prefetch.store.reader import StoreReader
from sharding.blocks import Shard
from sharding.errors import ShardChangedError, ShardReadError

pytest.importorskip("aiohttp")

CONTENT = np.random.default_rng(0).bytes(300_000)
WAIT_S = 20.0
QUICK = RetryPolicy(base_s=0.001, stall_s=WAIT_S, least_stall_s=WAIT_S, deadline_s=WAIT_S)
ONCE = RetryPolicy(max_attempts=1, stall_s=WAIT_S, deadline_s=WAIT_S)
"""Gives up at the first failure that is worth another attempt."""

Answer = Callable[[socket.socket, int, int], bool]
"""Answers a request for the bytes [start, end); whether the connection goes on."""


class RawServer:
    """Gives each request to the next answer of the script; then answers rightly."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self._context = context
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()  # guards the rest
        self._open: list[socket.socket] = []
        self.script: list[Answer] = []
        self.heads: list[tuple[int, str]] = []
        """Number of the connection and text of each request."""

    @property
    def url(self) -> str:
        scheme = "https" if self._context else "http"
        return f"{scheme}://localhost:{self._listening.getsockname()[1]}/x.bin"

    @property
    def connections(self) -> list[int]:
        with self._lock:
            return [number for number, _ in self.heads]

    def serve(self, pool: ThreadPoolExecutor) -> None:
        number = 0
        with suppress(OSError):
            while True:
                peer, _ = self._listening.accept()
                try:
                    pool.submit(self._answer, peer, number)
                except RuntimeError:  # the pool ends: it came while the server was being closed
                    peer.close()
                    return
                number += 1

    def _answer(self, raw: socket.socket, number: int) -> None:
        with suppress(OSError), raw:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = self._context.wrap_socket(raw, server_side=True) if self._context else raw
            with self._lock:
                self._open.append(peer)
            with peer, peer.makefile("rb") as lines:
                while True:
                    text = ""
                    while not text.endswith("\r\n\r\n"):
                        line = lines.readline().decode()
                        if not line:
                            return
                        text += line
                    with self._lock:
                        self.heads.append((number, text))
                        answer = self.script.pop(0) if self.script else whole
                    wanted = text.lower().partition("range: bytes=")[2].split("\r")[0].split("-")
                    if not answer(peer, int(wanted[0]), int(wanted[1]) + 1):
                        return

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._listening.close()
        with self._lock:
            for peer in self._open:
                with suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(context: ssl.SSLContext | None = None) -> Iterator[RawServer]:
    server = RawServer(context)
    with ThreadPoolExecutor(32) as pool:
        pool.submit(server.serve, pool)
        try:
            yield server
        finally:
            server.close()


@pytest.fixture
def server() -> Iterator[RawServer]:
    with serving() as server:
        yield server


def asked_by(client: str, server: RawServer) -> list[str]:
    """The ranges and paths that a client asked for, which tells its name."""
    heads = [text for _, text in server.heads if re.search(f"(?im)^user-agent: .*{client}", text)]
    return [f"{text.split()[1]} {text.lower().partition('range: bytes=')[2].split('-')[0]}" for text in heads]


def head(start: int, end: int, *, status: str = "206 Partial Content", **fields: str) -> bytes:
    given = {
        "Content-Range": f"bytes {start}-{end - 1}/{len(CONTENT)}",
        "Content-Length": str(end - start),
        **{name.replace("_", "-"): value for name, value in fields.items()},
    }
    lines = [f"{name}: {value}\r\n" for name, value in given.items() if value]
    return f"HTTP/1.1 {status}\r\n{''.join(lines)}\r\n".encode()


def whole(peer: socket.socket, start: int, end: int) -> bool:
    peer.sendall(head(start, end) + CONTENT[start:end])
    return True


def closing(peer: socket.socket, start: int, end: int) -> bool:
    """A right answer; then the connection ends, unannounced."""
    whole(peer, start, end)
    return False


def sends(data: bytes, *, goes_on: bool = False) -> Answer:
    def answer(peer: socket.socket, start: int, end: int) -> bool:
        peer.sendall(data)
        return goes_on

    return answer


def with_head(nbytes: int | None = None, **fields: str) -> Answer:
    """A right body, of so many bytes, below a head with other fields."""

    def answer(peer: socket.socket, start: int, end: int) -> bool:
        peer.sendall(head(start, end, **fields) + CONTENT[start:end][:nbytes])
        return nbytes is None

    return answer


def read(
    server: RawServer, reader: StoreReader, offset: int = 7, nbytes: int = 100_000, version: str = ""
) -> None:
    out = np.zeros(nbytes, np.uint8)
    reader.read_into(Shard(server.url, len(CONTENT), version), offset, out)
    assert out.tobytes() == CONTENT[offset : offset + nbytes]


# ---- connections -------------------------------------------------------------------------------------------


def test_reads_share_a_connection(server: RawServer) -> None:
    reader = StoreReader()
    for offset in range(5):
        read(server, reader, offset)
    assert server.connections == [0] * 5
    assert "Range: bytes=4-100003\r\n" in server.heads[-1][1]
    assert f"Host: {server.url.split('/')[2]}\r\n" in server.heads[-1][1]


def test_a_connection_that_ended_between_requests_is_no_fault(server: RawServer) -> None:
    server.script = [closing, closing]
    reader = StoreReader(policy=ONCE)
    for offset in range(3):
        read(server, reader, offset)
    assert server.connections == [0, 1, 2]
    assert reader.stats() == ReadStats()


def test_a_connection_that_ends_when_it_is_asked_again_is_no_fault(server: RawServer) -> None:
    server.script = [whole, sends(b"")]  # the server closed it while the request was on its way
    reader = StoreReader(policy=ONCE)
    read(server, reader)
    read(server, reader)
    assert server.connections == [0, 0, 1]
    assert reader.stats() == ReadStats()


def test_a_fresh_connection_that_ends_is_a_fault(server: RawServer) -> None:
    server.script = [sends(b"")]
    reader = StoreReader(policy=QUICK)
    read(server, reader)
    assert reader.stats() == ReadStats(retries=1)


@pytest.mark.parametrize("said", ["close", "Close", "foo, close"])
def test_a_server_that_announces_the_end_is_asked_on_another_connection(server: RawServer, said: str) -> None:
    server.script = [with_head(Connection=said)]
    reader = StoreReader(policy=ONCE)
    read(server, reader)
    read(server, reader)
    assert server.connections == [0, 1]


def test_a_small_refusal_leaves_the_connection(server: RawServer) -> None:
    server.script = [sends(head(0, 4, status="503 Slow Down", Retry_After="0") + b"busy", goes_on=True)]
    reader = StoreReader(policy=QUICK)
    read(server, reader)
    assert server.connections == [0, 0]
    assert reader.stats() == ReadStats(retries=1, throttled=1)


def test_the_rest_of_a_long_refusal_is_not_taken_for_the_next_answer(server: RawServer) -> None:
    refusal = head(0, 100_000, status="503 Slow Down") + b"HTTP/1.1 206 Partial Content\r\n" * 3000
    server.script = [sends(refusal, goes_on=True)]
    reader = StoreReader(policy=QUICK)
    read(server, reader)
    assert server.connections == [0, 1]


def test_idle_connections_are_closed(server: RawServer) -> None:
    ended = threading.Event()

    def last(peer: socket.socket, start: int, end: int) -> bool:
        whole(peer, start, end)
        peer.settimeout(WAIT_S)
        assert peer.recv(1) == b""
        ended.set()
        return False

    async def ask_once() -> bool:
        dest = Destination(memoryview(bytearray(10)), lambda nbytes: None)
        port = urlsplit(server.url).port
        assert port
        request = b"GET /x.bin HTTP/1.1\r\nRange: bytes=0-9\r\n\r\n"
        await Connections(idle_s=0.05).request(("http", "localhost", port), request, lambda head: dest)
        return await asyncio.to_thread(ended.wait, WAIT_S)

    server.script = [last]
    assert asyncio.run(ask_once())


def test_a_forked_child_makes_its_own_connections(server: RawServer) -> None:
    reader = StoreReader()
    read(server, reader)
    assert exit_code_in_child(lambda: read(server, reader, 100)) == 0
    read(server, reader, 200)
    assert server.connections == [0, 1, 0]


def test_closing_the_reader_closes_the_connection_it_waits_on(server: RawServer) -> None:
    begun, ended = threading.Event(), threading.Event()

    def silent(peer: socket.socket, start: int, end: int) -> bool:
        peer.sendall(head(start, end) + CONTENT[start : start + 10])
        begun.set()
        peer.settimeout(WAIT_S)
        with suppress(ConnectionResetError):
            peer.recv(1)
        ended.set()
        return False

    server.script = [silent]
    reader = StoreReader(policy=QUICK)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, server, reader)
        assert begun.wait(WAIT_S)
        reader.close()
        with pytest.raises(ReaderClosedError):
            reading.result(WAIT_S)
    assert ended.wait(WAIT_S)


# ---- answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [1, 5, 40, 90])
def test_a_head_may_come_in_pieces(server: RawServer, split: int) -> None:
    def in_two(peer: socket.socket, start: int, end: int) -> bool:
        data = head(start, end) + CONTENT[start:end]
        peer.sendall(data[:split])
        peer.sendall(data[split:])
        return True

    server.script = [in_two]
    read(server, StoreReader(policy=ONCE))


def test_a_body_that_ends_early_is_continued(server: RawServer) -> None:
    server.script = [with_head(30_000), with_head(0)]
    reader = StoreReader(policy=QUICK)
    read(server, reader)
    asked = [text.partition("bytes=")[2].split("-")[0] for _, text in server.heads]
    assert asked == ["7", "30007", "30007"]
    assert reader.stats() == ReadStats(retries=2, resumed=2)


def test_a_shorter_range_than_asked_is_continued_on_the_same_connection(server: RawServer) -> None:
    def half(peer: socket.socket, start: int, end: int) -> bool:
        return whole(peer, start, (start + end) // 2)

    server.script = [half]
    reader = StoreReader(policy=QUICK)
    read(server, reader)
    assert server.connections == [0, 0]
    assert reader.stats().resumed == 1


def test_a_longer_body_than_asked_ends_the_connection_and_spoils_nothing(server: RawServer) -> None:
    def longer(peer: socket.socket, start: int, end: int) -> bool:
        peer.sendall(head(start, end + 100_000) + CONTENT[start : end + 100_000])
        return True

    server.script = [longer]
    reader = StoreReader(policy=ONCE)
    memory = np.full(60, 0xA5, np.uint8)
    shard = Shard(server.url, len(CONTENT), "")
    reader.read_into(shard, 7, memory[20:40])
    assert memory.tobytes() == b"\xa5" * 20 + CONTENT[7:27] + b"\xa5" * 20
    read(server, reader)
    assert server.connections == [0, 1]


def test_a_server_without_ranges_serves_the_beginning_of_an_object(server: RawServer) -> None:
    def all_of_it(peer: socket.socket, start: int, end: int) -> bool:
        peer.sendall(head(0, len(CONTENT), status="200 OK", Content_Range="") + CONTENT)
        return True

    server.script = [all_of_it, all_of_it]
    read(server, StoreReader(policy=ONCE), 0, 1000)
    with pytest.raises(ShardReadError, match="the server gives no byte ranges"):
        read(server, StoreReader(policy=ONCE), 7, 1000)


@pytest.mark.parametrize("given", ["bytes 8-100007/300000", "bytes 0-99999/300000", "", "octets 7"])
def test_another_range_than_asked_is_asked_again_and_given_up_in_the_end(
    server: RawServer, given: str
) -> None:
    reader = StoreReader(policy=QUICK)
    server.script = [with_head(Content_Range=given)] * 5
    read(server, reader)
    assert reader.stats().retries == 5
    server.script = [with_head(Content_Range=given)] * 6
    said = re.escape(f"the answer's Content-Range is {given!r}, where bytes from 7 were asked for")
    with pytest.raises(ShardReadError, match=f"6 answers in a row were not what was asked for.*{said}"):
        read(server, reader)


def test_an_object_of_another_length_is_refused(server: RawServer) -> None:
    server.script = [with_head(Content_Range="bytes 7-100006/300001")]
    with pytest.raises(ShardChangedError, match="its size is 300001"):
        read(server, StoreReader(policy=QUICK))


def test_an_object_with_another_etag_is_refused(server: RawServer) -> None:
    server.script = [with_head(ETag="two")]
    with pytest.raises(ShardChangedError, match="its etag is two; it was one"):
        read(server, StoreReader(policy=QUICK), version="etag:one")


def test_without_etags_an_object_with_another_modification_time_is_refused(server: RawServer) -> None:
    server.script = [with_head(Last_Modified="Wed, 02 Jan 2030 00:00:00 GMT")]
    with pytest.raises(ShardChangedError, match=r"its modification time is Wed, 02 .*; it was Tue, 01"):
        read(server, StoreReader(policy=QUICK), version="mtime:Tue, 01 Jan 2030 00:00:00 GMT")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (sends(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), "does not speak HTTP/1.1.*SSH"),
        (sends(b"HTTP/1.1 206 Partial\r\nno colon\r\n\r\n"), "has a line 'no colon'"),
        (sends(b"HTTP/1.1 206 Partial\r\n" + b"x: y\r\n" * 20_000), "longer than 65536 bytes"),
        (with_head(Content_Length="12x"), "length is '12x'"),
        (with_head(Content_Length="-1"), "length is '-1'"),
        (with_head(Content_Length="5, 7"), "length is '5, 7'"),
        (sends(b"HTTP/1.1 206 Part"), "closed the connection before it answered"),
    ],
)
def test_what_is_no_answer_is_a_fault_that_is_named(server: RawServer, answer: Answer, reason: str) -> None:
    server.script = [answer]
    with pytest.raises(ShardReadError, match=reason):
        read(server, StoreReader(policy=ONCE))
    server.script = [answer]
    reader = StoreReader(policy=QUICK)
    read(server, reader)
    assert reader.stats() == ReadStats(retries=1)


def chunked(peer: socket.socket, start: int, end: int) -> bool:
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (CONTENT[start:end], b""))
    peer.sendall(head(start, end, Content_Length="", Transfer_Encoding="chunked") + body)
    return True


def without_length(peer: socket.socket, start: int, end: int) -> bool:
    peer.sendall(head(start, end, Content_Length="") + CONTENT[start:end])
    return False


@pytest.mark.parametrize("answer", [chunked, without_length])
def test_bodies_without_a_length_are_left_to_the_client_from_then_on(
    server: RawServer, answer: Answer
) -> None:
    server.script = [answer] * 2
    reader = StoreReader(policy=ONCE)
    read(server, reader)
    read(server, reader, 9)
    assert asked_by("aiohttp", server) == ["/x.bin 7", "/x.bin 9"]
    assert len(server.heads) == 3
    assert reader.stats() == ReadStats()


def test_redirects_are_left_to_the_client(server: RawServer) -> None:
    elsewhere = server.url.replace("x.bin", "y.bin")
    server.script = [sends(head(0, 0, status="302 Found", Location=elsewhere), goes_on=True)] * 2
    read(server, StoreReader(policy=ONCE))
    assert asked_by("aiohttp", server) == ["/x.bin 7", "/y.bin 7"]


@pytest.mark.parametrize(
    ("options", "direct"),
    [
        ({"headers": {"Authorization": "Bearer x"}}, True),
        ({"client_kwargs": {"headers": {"Authorization": "Bearer x"}}}, True),
        ({"headers": {"authorization": "Bearer x", "Host": "other"}}, False),
        ({"cookies": {"a": "b"}, "headers": {"Authorization": "Bearer x"}}, False),
        ({"client_kwargs": {"trust_env": True, "headers": {"Authorization": "Bearer x"}}}, False),
    ],
)
def test_headers_are_sent_and_other_options_are_left_to_the_client(
    server: RawServer, options: dict[str, Any], direct: bool
) -> None:
    read(server, StoreReader(options, policy=ONCE))
    assert asked_by("dataflow-loader", server) == (["/x.bin 7"] if direct else [])
    assert asked_by("aiohttp", server) == ([] if direct else ["/x.bin 7"])
    assert "authorization: bearer x\r\n" in server.heads[-1][1].lower()


def test_headers_that_would_be_two_are_refused(server: RawServer) -> None:
    with pytest.raises(ShardReadError, match=r"(?i)newline|header"):
        read(server, StoreReader({"headers": {"X": "1\r\nY: 2"}}, policy=ONCE))
    assert not server.heads


# ---- TLS ---------------------------------------------------------------------------------------------------


@cache
def certificate() -> tuple[bytes, bytes]:
    """PEM of a certificate for localhost, signed by itself, and of its key."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now, names = datetime.now(UTC), x509.SubjectAlternativeName([x509.DNSName("localhost")])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    signed = made.add_extension(names, critical=True).sign(key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return signed.public_bytes(pem), key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)


@contextmanager
def serving_tls(folder: Path) -> Iterator[RawServer]:
    for name, text in zip(("certificate", "key"), certificate(), strict=True):
        (folder / name).write_bytes(text)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "certificate", folder / "key")
    with serving(context) as server:
        yield server


@contextmanager
def trusted_in_children(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, forked children trust the certificate of `serving_tls`: this process asked the system once."""
    certificate()  # made by the parent, for all
    with monkeypatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(folder / "certificate"))
        yield


def test_ranges_come_through_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_twice() -> None:
        with serving_tls(tmp_path) as server:
            reader = StoreReader(policy=QUICK)
            server.script = [whole, with_head(40_000)]
            read(server, reader)
            read(server, reader, 11, 250_000)
            assert server.connections == [0, 0, 1]
            assert reader.stats() == ReadStats(retries=1, resumed=1)

    with trusted_in_children(tmp_path, monkeypatch):
        assert exit_code_in_child(read_twice) == 0


def test_a_certificate_that_nobody_signed_is_refused(tmp_path: Path) -> None:
    with serving_tls(tmp_path) as server, pytest.raises(ShardReadError, match=r"(?i)certificate"):
        read(server, StoreReader(policy=ONCE))
    assert not server.heads


# ---- heads -------------------------------------------------------------------------------------------------


def test_a_head_is_taken_apart() -> None:
    head = parse_head(b"HTTP/1.1 206 \r\nContent-Length:  12 \r\nX:1\r\nx: 2")
    assert (head.status, head.reason, head.length) == (206, "", 12)
    assert head.fields == {"content-length": "12", "x": "1, 2"}


@pytest.mark.parametrize(
    ("text", "keeps"),
    [
        (b"HTTP/1.1 200 OK", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close", False),
        (b"HTTP/1.0 200 OK", False),
        (b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive", True),
    ],
)
def test_whether_a_connection_goes_on(text: bytes, keeps: bool) -> None:
    assert parse_head(text).keeps_connection is keeps


@pytest.mark.parametrize(
    "text",
    [b"", b"HTTP/2 200 OK", b"HTTP/1.1 20 OK", b"HTTP/1.1 200 OK\r\n folded", b"HTTP/1.1 200 OK\r\n: x"],
)
def test_what_is_no_head_is_refused(text: bytes) -> None:
    with pytest.raises(BadAnswerError):
        parse_head(text)
