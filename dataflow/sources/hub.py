"""Find the shards of `hf://datasets/org/name` and `split=`, at one commit, with few requests for a job.

Whoever opens a dataset first lists its repository: one request, whatever the number of files. The others of
the job find the listing: on this machine in the cache folder, behind a claim that dies with its process; on
other machines in `torch.distributed`'s store, if that is initialised. Nothing here is a collective: a rank
that opens a dataset alone waits for nobody, and who waits for a listing that another one has begun to fetch
fetches it itself after `_PATIENCE_S`.

A branch means one commit for a job, though it may move meanwhile: processes of one launcher agree by a note
beside the listings, for an hour. Without a launcher, each process asks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any

from msgspec import structs

from dataflow.progress.bar import ProgressBar
from dataflow.sources.listing.claims import Listing, SourceArguments, Spec, claim_shards, refuse_unmeant
from dataflow.sources.listing.places import Places
from dataflow.sources.listing.shards import check_sets
from prefetch.cache.claims import Claims
from prefetch.store.retrier import Retrier
from sharding.catalog.listings import is_listing, shards_listed
from sharding.catalog.storage import open_url, store_errors
from sharding.formats import has_suffix
from sharding.hub.access import HubAccess
from sharding.hub.answers import CARD_BYTES, LISTING_S
from sharding.hub.card import CARD_FILES, card_configs
from sharding.hub.layout import split_files
from sharding.hub.names import HubName, is_hub, parse_name
from sharding.hub.snapshot import Snapshot, fetch_snapshot, hub_folder
from sharding.redaction import identity_of
from sharding.urls import is_glob, is_http, is_local, local_path
from sharding.write.file import private_folder

_UNDERSCORE, _TEMPORARY = re.compile(r"(^|/)_[^=/]*(/|$)"), re.compile(r"(^|/)_temporary(/|$)")
_SAVED_DICT = "dataset_dict.json"
_PATIENCE_S = 60.0
"""For a listing that another process fetches."""
_QUICK_S = 1.0
"""Seconds that a listing may take without saying so."""
_AGREED_S = 3600.0
"""Seconds after the first process of a job in which one that starts takes the same commit."""


def claim_repository(spec: Spec, asked: SourceArguments, places: Places) -> Listing:
    """The shards of repositories, these at their commits; of a single one the files of its split."""
    refuse_unmeant(spec, asked)
    access, revision = HubAccess.given(places.options), str(asked.revision) if asked.revision else None
    texts = [_pinned(text, access, places.retrier, revision) if is_hub(text) else text for text in spec.texts]
    files = _files_of_split(texts[0], access, asked, places) if len(texts) == 1 else None
    named: Any = files or (texts[0] if len(texts) == 1 else texts)
    return claim_shards(structs.replace(spec, source=named, texts=files or texts), asked, places)


def _files_of_split(url: str, access: HubAccess, asked: SourceArguments, places: Places) -> list[str] | None:
    """The files of a repository's split, or of a folder's in it; None: some files are named themselves."""
    name = parse_name(url)
    snapshot = Snapshot.kept(access.endpoint, name.repo, str(name.revision))
    assert snapshot is not None
    below = f"{name.path}/" if name.path else ""
    files = [file.removeprefix(below) for file in snapshot.files if file.startswith(below)]
    is_pattern = (is_glob(url) or "{" in name.path) and not files
    if (asked.config, asked.split) == (None, None) and (is_pattern or has_suffix(url)):
        return None
    if name.path in snapshot.files:
        return None

    def url_of(file: str) -> str:
        return structs.replace(name, path=below + file).url

    configs: Any = snapshot.configs if not below else []
    if _SAVED_DICT in files and not configs:
        configs = _saved_splits(places.files.read(url_of(_SAVED_DICT)))
    where = structs.replace(name, revision=None).url
    return places.retrier(lambda: _as_listed(asked, files, configs, url_of, where, places), where)


def claim_folder(spec: Spec, asked: SourceArguments, places: Places) -> Listing:
    """The files of a folder's split, which lie as on the Hub."""
    refuse_unmeant(spec, asked)
    url = spec.text
    is_folder = os.path.isdir(local_path(url)) if is_local(url) else not is_glob(url)
    if is_http(url) or (not is_folder and not places.files.exists(url)):
        raise ValueError(f"config= and split= are for a folder or a repository of the Hub, got {url!r}")
    place = local_path(url) if is_local(url) else url.rstrip("/")
    fs, root = open_url(place if is_local(url) else url, places.options)

    def look() -> tuple[list[str], dict[str, str]]:
        with store_errors(url):
            files = [file.removeprefix(root).strip("/") for file in fs.find(root)]
            left_out = _UNDERSCORE if any("=" in _folder(file) for file in files) else _TEMPORARY
            files = [file for file in files if not left_out.search(_folder(file))]  # not committed
            cards = {
                name: fs.cat_file(f"{root.rstrip('/')}/{name}", end=CARD_BYTES).decode(errors="replace")
                for name in (*CARD_FILES, _SAVED_DICT)
                if name in files
            }
        return files, cards

    files, cards = places.retrier(look, url)
    saved = cards.pop(_SAVED_DICT, None)
    configs = card_configs(cards, url) if saved is None else _saved_splits(saved)
    return asked.listing(
        _as_listed(asked, files, configs, lambda file: f"{place}/{file}", identity_of(place), places),
        spec=spec,
    )


def _as_listed(
    asked: SourceArguments,
    files: Sequence[str],
    configs: Any,
    url_of: Callable[[str], str],
    where: str,
    places: Places,
) -> list[str]:
    """The URLs of the files of a split; of folders with a list of their own, those that it has."""
    matches = split_files(
        files, configs, where=where, config=asked.config, split=asked.split, format=asked.format_name
    )
    folders = {_folder(file) for file in matches}
    lists = {
        _folder(name): listed
        for name in filter(is_listing, files)
        if _folder(name) in folders and (listed := shards_listed(url_of(name), places.options)) is not None
    }
    check_sets([file for file in matches if _folder(file) not in lists], where)
    urls: dict[str, None] = {}
    for file in matches:
        urls |= dict.fromkeys(lists.get(_folder(file), [url_of(file)]))
    return list(urls)


def _folder(file: str) -> str:
    return file.rpartition("/")[0]


def _saved_splits(saved: str | bytes) -> list[dict[str, Any]]:
    """The splits of a `DatasetDict` that was saved, as the config of a README would say them."""
    files = {name: f"{name}/*.arrow" for name in json.loads(saved)["splits"]}
    return [{"config_name": "default", "data_files": files}]


# ---- listings -------------------------------------------------------------------------------------------


def _pinned(url: str, access: HubAccess, retrier: Retrier, revision: str | None) -> str:
    """The URL at its commit, whose listing is kept from now on."""
    name = parse_name(url)
    if revision is not None and name.revision not in (None, revision):
        raise ValueError(f"revision={revision!r} contradicts the one in {url!r}")
    name = structs.replace(name, revision=revision or name.revision)
    if not name.is_pinned or Snapshot.kept(access.endpoint, name.repo, str(name.revision)) is None:
        name = structs.replace(name, revision=_listing(name, access, retrier).commit)
    return name.url


def _listing(name: HubName, access: HubAccess, retrier: Retrier) -> Snapshot:
    repo = structs.replace(name, path="")
    key = hashlib.blake2b(f"{access.endpoint}\0{repo.url}".encode(), digest_size=16).hexdigest()
    with _claimed(key):
        note = _note_of_job(key)
        commit = str(name.revision) if name.is_pinned else _agreed(note)
        state = Snapshot.kept(access.endpoint, name.repo, commit) if commit else None
        if state is None:
            with ProgressBar(f"listing {repo.url}", unit="part", after_s=_QUICK_S) as bar:
                ends_s, parts = time.monotonic() + LISTING_S, count(1)

                def is_late() -> bool:
                    bar.show(next(parts))  # asked after each part of an answer
                    return time.monotonic() > ends_s

                state = _shared(key, lambda: retrier(lambda: fetch_snapshot(access, repo, is_late), repo.url))
            state.keep()
            _agree(note, state.commit)
    return state


@contextmanager
def _claimed(key: str) -> Iterator[None]:
    """One process of this machine at a time, as far as the cache folder allows."""
    folder = os.path.join(hub_folder(), "claims")
    with ExitStack() as held:
        with suppress(OSError):
            private_folder(folder)
            claims = held.enter_context(closing(Claims(folder)))
            if (claim := claims.take(key, patience_s=_PATIENCE_S)) is not None:
                held.callback(claim.release)
        yield


def _note_of_job(key: str) -> str | None:
    """The file where processes of this job on this machine agree on a commit; None: the job has no name."""
    env = os.environ
    job = [env.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")]
    if None in job:
        job = [env.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    if None in job:
        return None
    # A port is used again by the next job: its processes have another parent.
    text = "\0".join([key, *map(str, job), env.get("TORCHELASTIC_RUN_ID", ""), str(os.getppid())])
    return os.path.join(hub_folder(), f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.commit")


def _agreed(note: str | None) -> str | None:
    if note is None:
        return None
    with suppress(OSError):
        if time.time() - os.stat(note).st_mtime < _AGREED_S:
            with open(note) as file:
                return file.read()
    return None


def _agree(note: str | None, commit: str) -> None:
    if note is not None:
        with suppress(OSError):
            unfinished = f"{note}.{os.getpid()}"
            with open(unfinished, "w") as file:
                file.write(commit)
            os.replace(unfinished, note)


def _shared(key: str, ask: Callable[[], Snapshot]) -> Snapshot:
    """Return what another rank has asked for, or else what the Hub says, for other ranks to find."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return ask()
    store: Any = dist.distributed_c10d._get_default_store()
    key = f"dataflow/hub/{key}"
    if store.add(f"{key}/asked", 1) == 1:
        answer = b""
        try:
            snapshot = ask()
            answer = zlib.compress(snapshot.to_bytes(), 1)
        finally:
            store.set(key, answer)  # also where it failed, for whoever waits
        return snapshot
    with suppress(RuntimeError, ValueError, zlib.error):  # torch's DistError is a RuntimeError
        store.wait([key], timedelta(seconds=_PATIENCE_S))
        return Snapshot.from_bytes(zlib.decompress(store.get(key)))
    return ask()
