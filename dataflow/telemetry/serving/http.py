"""A small HTTP server with limits: for scrapers and browsers, none of which may cost much or keep others out.

Every connection has one request and a deadline. Of more than 32 the oldest silent one is ended. On loopback
only this machine's own names are answered: a page of somebody else's that has its own name point here (DNS
rebinding) is told by the Host that the browser sends.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Mapping
from http import HTTPStatus

DEADLINE_S = 10.0
"""Seconds that one connection may take, whatever its client does."""
TEXT, JSON = "text/plain; charset=utf-8", "application/json"
_MOST_CONNECTIONS = 32
_MOST_REQUEST_BYTES = 8192
_LOOPBACK = {"127.0.0.1", "localhost", "[::1]"}
"""Names of this machine for itself."""

Answer = tuple[int, str, bytes]
"""Status, content type and body."""


class HttpServer:
    """Serves requests without bodies at a socket.

    Args:
        listener: the socket, which listens.
        answer: answers a method and a path, in a thread of its own.
        headers: sent with each answer.
    """

    def __init__(
        self,
        listener: socket.socket,
        answer: Callable[[str, str], Answer],
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.listener, self._answer, self._headers = listener, answer, headers or {}
        self._is_local = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
        self._open: dict[asyncio.StreamWriter, bool] = {}
        """The connections, the oldest first, and whether each is silent: has asked nothing yet."""

    async def serve(self, over: asyncio.Event) -> None:
        """Serve until `over`."""
        server = await asyncio.start_server(self._connected, sock=self.listener, limit=_MOST_REQUEST_BYTES)
        await over.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection: one request, within the deadline."""
        if len(self._open) >= _MOST_CONNECTIONS:  # silent clients must not keep out one that asks
            oldest = next((other for other, is_silent in self._open.items() if is_silent), writer)
            self._open.pop(oldest, None)
            oldest.transport.abort()
        self._open[writer] = True
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._respond(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client is gone, too slow, or no client of HTTP
        finally:
            self._open.pop(writer, None)
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()  # what a slow client has not taken is dropped
            writer.close()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self._open[writer] = False
        parts = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        host = _host_in(head)
        if self._is_local and host is not None and not _is_for_loopback(host):
            status, kind, body = 403, TEXT, b"this address is for http://127.0.0.1 and localhost\n"
        elif len(parts) == 3:
            status, kind, body = await asyncio.to_thread(self._answer, parts[0], parts[1])
        else:
            status, kind, body = 400, TEXT, b"no request of HTTP\n"
        headers = {"Content-Type": kind, "Content-Length": len(body), "Cache-Control": "no-store"}
        headers |= {**self._headers, "Connection": "close"}
        lines = (f"{name}: {value}" for name, value in headers.items())
        first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"
        writer.write("\r\n".join((first, *lines, "", "")).encode("latin-1"))
        if parts[0] != "HEAD":
            writer.write(body)
        await writer.drain()
        writer.write_eof()
        await reader.read(1)  # the client closes, or the deadline comes


def _is_for_loopback(host: str) -> bool:
    """Return whether the Host of a request is this machine's name for itself."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return name.lower() in _LOOPBACK


def _host_in(head: bytes) -> str | None:
    """Return the Host that a request names; None: it names none, so no browser has sent it."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.decode("latin-1").partition(":")
        if name.strip().lower() == "host":
            return value.strip()
    return None
