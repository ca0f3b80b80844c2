"""Stores over HTTP for tests: folders, slowstore.py, as much of S3 as s3fs asks for."""

from __future__ import annotations

import gzip
import http.server
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

SERVERS = Path(__file__).parents[1] / "servers"
WAIT_S = 20.0


@contextmanager
def slowstore(folder: Path, *options: str) -> Iterator[str]:
    """The URL of a folder that a process of slowstore.py serves."""
    command = [sys.executable, str(SERVERS / "slowstore.py"), str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    name: str
    start: int
    end: int
    """Bytes [start, end) of the file; (0, 0) where none were asked for."""

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a head and a body in two writes would wait 40 ms for each other
    server: RangeServer

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = self.server.folder / unquote(url.path).strip("/")
        allowed = self.server.may_read(url.query, self.headers.get("Authorization", ""))
        if allowed and self.server.has_pages and path.is_dir():
            links = [one.name + "/" * one.is_dir() for one in [*path.iterdir(), Path("?C=N;O=D"), Path("..")]]
            page = "".join(f'<a href="{quote(link, safe="/?=;.")}">x</a>\n' for link in links).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)
            return
        if not allowed or not path.is_file():
            self.send_response(404 if allowed else 403)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content, wanted = path.read_bytes(), self.headers.get("Range")
        if self.server.packs:
            content, wanted = gzip.compress(content), None
        start, end = 0, len(content)
        if wanted:
            first, last = wanted.removeprefix("bytes=").split("-")
            start, end = int(first), int(last) + 1 if last else len(content)
        head = self.command == "HEAD"
        asked = Asked(self.command, path.name, 0 if head else start, 0 if head else end)
        with self.server.lock:
            self.server.asked.append(asked)
        self.server.may_answer(asked)
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", self.server.content_range(asked, len(content)))
        version = self.server.versions.get(path.name, "1")
        for name, value in (
            ("ETag", f'"{version}"'),
            ("Accept-Ranges", "bytes"),
            *self.server.more_fields,
            ("Content-Length", str(end - start)),
        ):
            self.send_header(name, value)
        self.end_headers()
        if not head:
            self.wfile.write(content[start:end])

    def log_message(self, *_: Any) -> None:
        pass


def _content_range(asked: Asked, size: int) -> str:
    return f"bytes {asked.start}-{asked.end - 1}/{size}"


class RangeServer(http.server.ThreadingHTTPServer):
    """Serves the files of a folder. `may_answer` is called before each answer and may block."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.lock = threading.Lock()  # guards `asked`
        self.asked: list[Asked] = []
        self.versions: dict[str, str] = {}
        """Etags, where they are not "1"."""
        self.may_answer: Callable[[Asked], None] = lambda asked: None
        self.content_range: Callable[[Asked, int], str] = _content_range
        self.more_fields: list[tuple[str, str]] = []
        """Of the head of each answer."""
        self.has_pages = False
        """Whether folders are answered by pages that link to their files."""
        self.packs = False
        """Whether files are compressed on their way, whatever range is asked for."""
        self.may_read: Callable[[str, str], bool] = lambda query, authorization: True
        """Whether a request with this query and authorization is answered; 403 if not."""

    def handle_error(self, *_: Any) -> None:
        """Clients that were closed hang up: nothing to say."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(server: RangeServer) -> Iterator[RangeServer]:
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.may_answer = lambda asked: None
            server.shutdown()
            thread.join()


# ---- S3 ---------------------------------------------------------------------------------------------------


class S3Server(http.server.ThreadingHTTPServer):
    """Any keys, one and its prefix side by side; `objects`: "bucket/key" -> bytes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _S3Handler)
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        """Uploads in parts that were begun: id -> "bucket/key", number -> bytes."""
        self.refuses: Callable[[str, str], bool] = lambda verb, path: False
        """Asked about each request that writes: whether it is forbidden."""

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


class _S3Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: S3Server

    def do_HEAD(self) -> None:
        self._object()

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        if "uploads" in query:
            self._list_uploads(query["prefix"][0])
        elif "list-type" in query:
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
        query = parse_qs(urlsplit(self.path).query)
        if self._is_refused():
            return
        if "uploadId" in query:
            self.server.uploads[query["uploadId"][0]][1][int(query["partNumber"][0])] = body
        else:
            self.server.objects[self._name()] = body
        self._say(200, b"", ETag='"1"')

    def do_POST(self) -> None:
        """Begin an upload in parts, or complete it; or remove objects."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        if self._is_refused():
            return
        if "delete" in query:
            for key in re.findall(r"<Key>(.*?)</Key>", body.decode()):
                self.server.objects.pop(f"{self._name().rstrip('/')}/{key}", None)
            self._say(200, b"<DeleteResult></DeleteResult>")
        elif "uploads" in query:
            name = uuid.uuid4().hex
            self.server.uploads[name] = self._name(), {}
            text = (
                f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
            )
            self._say(200, text.encode())
        else:
            key, parts = self.server.uploads.pop(query["uploadId"][0])
            self.server.objects[key] = b"".join(part for _, part in sorted(parts.items()))
            self._say(200, b"<CompleteMultipartUploadResult></CompleteMultipartUploadResult>")

    def do_DELETE(self) -> None:
        """Abort an upload, or remove an object."""
        query = parse_qs(urlsplit(self.path).query)
        if self._is_refused():
            return
        if "uploadId" in query:
            self.server.uploads.pop(query["uploadId"][0])
        else:
            self.server.objects.pop(self._name(), None)
        self._say(204, b"")

    def _is_refused(self) -> bool:
        refused = self.server.refuses(self.command, self.path)
        if refused:
            self._say(403, b"<Error><Code>AccessDenied</Code></Error>")
        return refused

    def _list_uploads(self, prefix: str) -> None:
        if self._is_refused():
            return
        found = [
            f"<Upload><Key>{escape(key)}</Key><UploadId>{name}</UploadId></Upload>"
            for name, (path, _) in self.server.uploads.items()
            for key in [path.removeprefix(f"{self._name().rstrip('/')}/")]
            if key.startswith(prefix)
        ]
        text = f"<ListMultipartUploadsResult>{''.join(found)}</ListMultipartUploadsResult>"
        self._say(200, text.encode())

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
