"""A store for the examples: HTTP with byte ranges on this machine, which may say that it is busy."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Store(ThreadingHTTPServer):
    """Serves the files of a folder."""

    busy = 0
    """So many requests for ranges are answered 503."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.url = folder, f"http://127.0.0.1:{self.server_port}"
        self._lock = threading.Lock()

    def is_busy(self) -> bool:
        """Count one request."""
        with self._lock:  # each request has a thread
            self.busy, was_busy = max(self.busy - 1, 0), self.busy > 0
        return was_busy

    def handle_error(self, *_: object) -> None:
        """Clients that have what they need hang up: nothing to say."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Store

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        """Send a file, or a range of it."""
        path, wanted = self.server.folder / self.path.lstrip("/"), self.headers.get("Range")
        if not path.is_file() or (wanted and self.server.is_busy()):
            self._send(503 if path.is_file() else 404, b"")
            return
        data = path.read_bytes()
        first, _, last = (wanted or "bytes=0-").removeprefix("bytes=").partition("-")
        body = data[int(first) : int(last or len(data)) + 1]
        fields = {"ETag": f'"{path.stat().st_mtime_ns}"', "Accept-Ranges": "bytes"}
        if wanted:
            fields["Content-Range"] = f"bytes {first}-{int(first) + len(body) - 1}/{len(data)}"
        self._send(206 if wanted else 200, body, **fields)

    def _send(self, status: int, body: bytes, **fields: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **fields}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serve(folder: Path) -> Iterator[Store]:
    """Serve a folder until the block is left."""
    with Store(folder) as store:
        thread = threading.Thread(target=store.serve_forever)
        thread.start()
        try:
            yield store
        finally:
            store.shutdown()
            thread.join()
