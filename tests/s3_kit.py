"""A store that speaks as much of S3 as s3fs asks for: any keys, one and its prefix side by side."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class S3Server(http.server.ThreadingHTTPServer):
    """Serves `objects`: "bucket/key" -> bytes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}

    @property
    def options(self) -> dict[str, Any]:
        """The `storage_options` that lead here."""
        return {"anon": True, "endpoint_url": f"http://127.0.0.1:{self.server_port}"}

    def handle_error(self, *_: Any) -> None:
        """Clients that were closed hang up: nothing to say."""


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server in a thread of its own."""
    with S3Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: S3Server

    def do_HEAD(self) -> None:
        self._object()

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        if "list-type" in query:
            self._list({name: values[0] for name, values in query.items()})
        else:
            self._object()

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            whole, body = body, b""
            while size := int(whole.partition(b"\r\n")[0].partition(b";")[0], 16):
                start = whole.index(b"\r\n") + 2
                body, whole = body + whole[start : start + size], whole[start + size + 2 :]
        self.server.objects[self._name()] = body
        self._say(200, b"", ETag='"1"')

    def _name(self) -> str:
        return unquote(urlsplit(self.path).path.lstrip("/"))

    def _object(self) -> None:
        content = self.server.objects.get(self._name())
        if content is None:
            self._say(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        fields, status, end = {"ETag": '"1"'}, 200, len(content)
        if wanted := self.headers.get("Range"):
            first, last = wanted.removeprefix("bytes=").split("-")
            start, end, status = int(first), min(int(last or end) + 1, end), 206
            fields["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
            content = content[start:end]
        self._say(status, content, **fields)

    def _list(self, query: dict[str, str]) -> None:
        bucket, prefix = self._name().rstrip("/"), query.get("prefix", "")
        keys, folders, out = [], set(), []
        for name, content in sorted(self.server.objects.items()):
            key = name.removeprefix(f"{bucket}/")
            if not name.startswith(f"{bucket}/{prefix}"):
                continue
            deeper = key[len(prefix) :].partition("/") if query.get("delimiter") else (key, "", "")
            if deeper[1]:
                folders.add(prefix + deeper[0] + "/")
            else:
                keys.append((key, len(content)))
        for key, size in keys:
            when = "<LastModified>2020-01-01T00:00:00.000Z</LastModified>"
            out.append(f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size>{when}</Contents>")
        out += [f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders)]
        head = f"<KeyCount>{len(out)}</KeyCount><IsTruncated>false</IsTruncated>"
        self._say(200, f"<ListBucketResult>{head}{''.join(out)}</ListBucketResult>".encode())

    def _say(self, status: int, body: bytes, **fields: str) -> None:
        self.send_response(status)
        for name, value in {**fields, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass
