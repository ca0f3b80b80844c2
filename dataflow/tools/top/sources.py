"""Read figures of trainings: from the pages of this machine, or from an endpoint, which has a deadline."""

from __future__ import annotations

import io
import os
import pwd
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, Protocol, Self, cast
from urllib.parse import SplitResult, urlsplit

from dataflow.telemetry.status.reading import page_folders, pages_in, unread_pages
from dataflow.telemetry.status.record import VERSION, TrainingRecord, from_json, newest_version
from sharding.errors import DataflowError
from sharding.printable import printable_name
from sharding.redaction import without_secrets

DEADLINE_S = 5.0
"""Seconds that an endpoint has for its whole answer."""
_PORT = 9400
_PATH = "/figures"
_MOST_BYTES = 64 << 20
_WHERE = (
    "A training writes its page when it takes a batch from a dataflow.DataLoader, unless DATAFLOW_LIVE=0. "
    "One in a container, or with another XDG_RUNTIME_DIR or TMPDIR, writes elsewhere; one of another machine "
    "is followed by its endpoint: dataflow top http://HOST:9400"
)


@dataclass(frozen=True)
class Reading:
    """The records of trainings at one time."""

    records: Sequence[TrainingRecord]
    notes: Sequence[str] = ()
    """Pages that could not be read, and why."""
    fault: str = ""
    """The reason why nothing could be read at all; "": it could."""


class FigureSource(Protocol):
    """A place where trainings say how they fare."""

    def read(self) -> Reading:
        """Read all that is there now."""

    def nothing(self, reading: Reading) -> str:
        """Say why no training runs there, and where to look."""


class MachinePages:
    """The pages of this user's trainings on this machine.

    Args:
        folders: where pages lie; None: where trainings of this user write them.
    """

    def __init__(self, folders: Sequence[Path] | None = None) -> None:
        self._folders = page_folders() if folders is None else folders

    def read(self) -> Reading:
        """See `FigureSource`."""
        records = list(pages_in(self._folders))
        unread = [f"{path.name} is left out: {why}" for path, why in unread_pages(self._folders)]
        return Reading(records, unread)

    def nothing(self, reading: Reading) -> str:
        """See `FigureSource`."""
        looked = ", ".join(map(str, self._folders))
        parts = [
            f"no training of yours runs on this machine (pages were looked for in {looked})",
            *ended(reading),
        ]
        return ". ".join([*parts, *reading.notes, *_of_others(), _WHERE])


def ended(reading: Reading) -> Iterator[str]:
    """Yield what is known of the training that was last there."""
    last = max(reading.records, key=lambda record: record.written_at, default=None)
    if last is not None:
        minutes = max(0.0, time.time() - last.written_at) / 60
        how = "ended" if last.state == "ended" else "died without a word"
        error = f", with {last.error}" if last.error else ""
        yield printable_name(f"{last.program} {how} {minutes:,.0f} min ago{error}")


def _of_others() -> Iterator[str]:
    """Yield who else has a folder of pages, which this user may not look into."""
    for path in sorted(Path(tempfile.gettempdir()).glob("dataflow-*")):
        with suppress(OSError, KeyError):
            owner = path.lstat().st_uid
            if path.name == f"dataflow-{owner}" and owner != os.geteuid():
                name = pwd.getpwuid(owner).pw_name
                yield (
                    f"Trainings of user {name} can be seen by them and by root only: "
                    f"sudo -u {name} dataflow top"
                )


class Endpoint:
    """The endpoint of a training, which answers within a deadline or is said not to.

    Args:
        url: such as "http://host:9400".
        deadline_s: seconds for the whole answer.
    """

    def __init__(self, url: str, deadline_s: float = DEADLINE_S) -> None:
        self._parts, self._deadline_s = _parts_of(url), deadline_s

    @property
    def name(self) -> str:
        """The endpoint, as text without secrets."""
        return printable_name(without_secrets(f"{self._parts.scheme}://{self._parts.netloc}"))

    def read(self) -> Reading:
        """See `FigureSource`."""
        try:
            text = self._fetch()
        except (OSError, HTTPException, ValueError) as error:
            return Reading(
                (), fault=f"{self.name} does not answer: {printable_name(str(error) or type(error).__name__)}"
            )
        try:
            return Reading(from_json(text))
        except ValueError:
            return Reading((), fault=f"{self.name} {_why_no_records(text)}")

    def nothing(self, reading: Reading) -> str:
        """See `FigureSource`."""
        return ". ".join([f"no training runs at {self.name}", *ended(reading)])

    def _fetch(self) -> bytes:
        answer = HTTPResponse(cast("Any", _Received(self._received())))
        answer.begin()
        if answer.status != 200:
            raise ValueError(f"it says {answer.status} {answer.reason}; is it a training's endpoint?")
        return answer.read()

    def _received(self) -> bytes:
        """Return all bytes of the answer. Each byte would begin a new time-out, so it is set each time."""
        ends_s = time.monotonic() + self._deadline_s
        host, path = self._parts.hostname or "", self._parts.path.rstrip("/") or _PATH
        is_safe = self._parts.scheme == "https"
        port = self._parts.port or (443 if is_safe else _PORT)
        asked = f"GET {path} HTTP/1.0\r\nHost: {self._parts.netloc}\r\nAccept: application/json\r\n\r\n"
        received = bytearray()
        with ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection((host, port), self._deadline_s))
            if is_safe:
                safe = ssl.create_default_context().wrap_socket(connection, server_hostname=host)
                connection = stack.enter_context(safe)
            connection.sendall(asked.encode())
            while len(received) <= _MOST_BYTES:
                connection.settimeout(max(0.001, ends_s - time.monotonic()))
                try:
                    part = connection.recv(1 << 16)
                except TimeoutError:
                    raise TimeoutError(f"nothing whole within {self._deadline_s:g} s") from None
                if not part:
                    return bytes(received)
                received += part
                if time.monotonic() > ends_s:
                    raise TimeoutError(f"nothing whole within {self._deadline_s:g} s")
        raise ValueError(f"it sends more than {_MOST_BYTES >> 20} MiB; is it a training's endpoint?")


class _Received(io.BytesIO):
    """An answer that has come, as `http.client` reads it."""

    def makefile(self, _mode: str) -> Self:
        """Return the bytes."""
        return self


def _parts_of(url: str) -> SplitResult:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        ok = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 0) >= 0
    except ValueError:
        ok = False
    if not ok or parts.username is not None:
        raise DataflowError(
            f"an endpoint must be like http://host:9400, got {printable_name(without_secrets(url))}"
        )
    return parts


def _why_no_records(text: bytes) -> str:
    """Say what an answer is that holds no records of this version."""
    newer = newest_version(text)
    if newer > VERSION:
        versions = f"its pages have version {newer}, this one reads {VERSION}"
        return f"is of a newer dataflow ({versions}): upgrade here with pip install -U dataflow-loader"
    return "sends no figures of a training: is it the address that DATAFLOW_METRICS names?"
