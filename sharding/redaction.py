"""Remove what must be neither shown nor kept: passwords and signatures in URLs.

`without_secrets` takes them out of any text. What names a shard in catalogs, caches, states and errors is its
URL without them (`identity_of`), so it stays the same when a signature is renewed; only what opens the shard
has them, and lives in memory. All our errors pass through here; `hide_secrets` does the same to those of
stores' clients, which stay as causes.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterator
from urllib.parse import unquote

from sharding.urls import is_local

_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^\s/?#'\"]*)@")
_UNQUOTED = re.compile(
    r"(https?|ftps?|sftp|ssh|smb|webdavs?)://([^\s/?#'\":@]*):(?!\d*(?:[/?#]|$))[^\s'\"]*@", re.IGNORECASE
)
"""A password with signs that end the host's part of a URL."""
_QUERY = re.compile(r"\?([^\s'\"<>]*?)(?=[)\],.;:]*(?:[\s'\"<>]|$))")
_SECRET = re.compile(
    r".*(token|signature|credentials?|password|passwd|pwd|secret|secretkey|accesskey|accountkey|apikey|jwt|hmac"
    r"|accesskeyid|accessid|authorization|sessionid)"
    r"|sig|sign|auth|hdnea|hdnts|hdntl|(xamz|xgoog|xoss|xcos|xobs|qsign|qkey|qheader|qurlparam|qak).*"
)
"""Names of parameters, in lower case and without signs, that are credentials or belong to a signature."""
_BESIDE = re.compile(
    "algorithm|e|exp|expires|expiry|hash|hashalgorithm|keypairid|md5|policy"
    "|se|ses|si|sip|ske|skoid|sks|skt|sktid|skv|sp|spr|sr|srt|ss|st|sv"
)
"""The parameters that change with a signature (CloudFront, Azure, nginx). Where there is none, they may name
a file."""
_PAIRS = ({"md5", "expires"}, {"st", "e"})
"""The parameters of a signature of nginx."""
_CLIENT_LOGS = ("fsspec", "fsspec.http", "fsspec.asyn", "fsspec.caching", "httpx", "httpx2")
"""Loggers of clients. (A filter of a logger does not see what loggers below it log.)"""
_KEY = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w-]{16,}")
"""A `key=` that names no object."""
_MOST_SIGNS = 4_000  # of an error's text: aiohttp quotes all that came where it found no head


def identity_of(url: str) -> str:
    """Return the name of a shard wherever something is kept or shown."""
    return url if is_local(url) else without_secrets(url)


def without_secrets(text: str) -> str:
    """Any text without the passwords and signatures of the URLs in it.

    Of a query, what signs it is left out, and what names a file stays. Over HTTP a user name goes with the
    password, as it may be a token.
    """
    if "@" in text:
        text = _UNQUOTED.sub(_without_password, _USER.sub(_without_password, text))
    return _QUERY.sub(_unsigned, text) if "?" in text else text


def has_unquoted_password(url: str) -> bool:
    """Return whether a password has signs in it that no URL can have there, and that clients would show."""
    return _UNQUOTED.search(_USER.sub(_without_password, url)) is not None


def hide_secrets(error: BaseException) -> None:
    """Take secrets out of what an error and its causes print, and what is very long.

    In place: whether to try again depends on types and attributes.
    """
    for cause in _with_causes(error):
        text = without_secrets(str(cause))[:_MOST_SIGNS]
        if text == str(cause):
            continue
        cause.args = tuple(without_secrets(a)[:_MOST_SIGNS] if isinstance(a, str) else a for a in cause.args)
        if isinstance(cause, OSError) and isinstance(cause.filename, str):
            cause.filename = without_secrets(cause.filename)
        if str(cause) != text:  # a class that makes its text of something else, such as aiohttp's
            kind = type(cause)
            hidden = {"__str__": lambda _, text=text: text, "__module__": kind.__module__}
            cause.__class__ = type(kind.__name__, (kind,), hidden)


def redact_logs() -> None:
    """Take secrets out of what stores' clients log from now on: at DEBUG they log each URL that they ask."""
    for name in _CLIENT_LOGS:
        logging.getLogger(name).addFilter(_without_secrets_in)  # once, however often it is added


def _without_secrets_in(record: logging.LogRecord) -> bool:
    record.msg, record.args = without_secrets(record.getMessage()), ()
    if record.exc_info and not record.exc_text:
        record.exc_text = without_secrets("".join(traceback.format_exception(*record.exc_info)).rstrip())
    return True


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and all that Python prints with it."""
    queue, ids = [error], set[int]()
    while queue:
        cause = queue.pop()
        if id(cause) not in ids:
            ids.add(id(cause))
            yield cause
            queue += [other for other in (cause.__cause__, cause.__context__) if other is not None]


def _without_password(match: re.Match[str]) -> str:
    protocol, user = match[1], match[2].partition(":")[0]
    return f"{protocol}://" if protocol.lower().startswith("http") else f"{protocol}://{user}@"


def _unsigned(match: re.Match[str]) -> str:
    parts = [(part, *_parameter(part)) for part in match[1].split("&")]
    names = {name for _, name, _ in parts}
    if not any(secret for *_, secret in parts) and not any(pair <= names for pair in _PAIRS):
        return match[0]
    public = [part for part, name, secret in parts if not secret and not _BESIDE.fullmatch(name)]
    return f"?{'&'.join(public)}" if public else ""


def _parameter(text: str) -> tuple[str, bool]:
    """The name of a parameter, in lower case and without signs; whether it is a secret."""
    name, _, value = text.partition("=")
    name = re.sub(r"[^a-z0-9]", "", unquote(name).lower())
    return name, bool(_SECRET.fullmatch(name) or (name == "key" and _KEY.fullmatch(value)))
