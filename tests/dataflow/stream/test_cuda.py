"""Batches on a CUDA device are those in host memory, whoever builds them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets_kit import Make
from loader_kit import session_of

from dataflow import DataLoader, Mixture, Packed, Ragged, ShardedDataset
from dataflow.processes.builders import ProcessBuilders
from prefetch.memory import device as device_module

DEVICE = "cuda"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.here,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
TIMEOUT_S = 60.0
LIMIT = 64 << 20
BUILDERS: Mapping[str, dict[str, Any]] = {
    "consumer": {"num_workers": 0},
    "threads": {"num_workers": 2, "workers": "thread"},
    "processes": {"num_workers": 2, "workers": "process"},
    "automatic": {},
}


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Ragged):
        yield from (value.values, value.offsets)
    elif hasattr(value, "__dataclass_fields__"):
        yield from tensors_of([getattr(value, name) for name in value.__dataclass_fields__])
    elif isinstance(value, Mapping):
        yield from tensors_of([*value.values()])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for part in value:
            yield from tensors_of(part)


def epochs_of(dataset: Any, batch_size: int, *, count: int = 2, **options: Any) -> list[list[Any]]:
    """Content of `count` epochs, each tensor as a list; each batch is changed in place afterwards."""
    epochs = []
    with DataLoader(dataset, batch_size, True, seed=7, timeout=TIMEOUT_S, **options) as loader:
        for _ in range(count):
            epochs.append([])
            for batch in loader:
                found = [*tensors_of(batch)]
                assert found
                assert all(tensor.device.type == options.get("device", "cpu") for tensor in found)
                epochs[-1].append([tensor.tolist() for tensor in found])
                for tensor in found:
                    tensor.zero_()  # of the consumer: nobody else's memory
    return epochs


@pytest.mark.parametrize("builders", BUILDERS)
@pytest.mark.parametrize("name", ["tar", "parquet", "tokens.bin"])
def test_batches_on_the_device_are_those_of_the_host(made: Make, name: str, builders: str) -> None:
    dataset = made(name).open()
    assert epochs_of(dataset, 5, device=DEVICE, **BUILDERS[builders]) == epochs_of(dataset, 5)


def shifted(sample: dict[str, Any], *, rng: Any) -> dict[str, Any]:
    return {"n": sample["cls"] + 1000, "draw": rng.random(), "row": torch.full((700,), sample["cls"])}


@pytest.mark.parametrize("builders", BUILDERS)
def test_what_transforms_make_arrives_whole(made: Make, builders: str) -> None:
    dataset = made("tar").open(transform=shifted)
    assert epochs_of(dataset, 4, device=DEVICE, **BUILDERS[builders]) == epochs_of(dataset, 4)


@pytest.mark.parametrize("builders", BUILDERS)
def test_pinned_batches_are_pinned(made: Make, builders: str) -> None:
    dataset = made("tar").open(transform=shifted)
    with DataLoader(dataset, 4, pin_memory=True, timeout=TIMEOUT_S, **BUILDERS[builders]) as loader:
        assert all(tensor.is_pinned() for batch in loader for tensor in tensors_of(batch))


def test_memory_is_registered_once_and_unlocked_at_the_end(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: dict[int, int] = {}
    real = device_module.register_pinned

    def register(address: int, nbytes: int) -> Any:
        assert address not in registered
        registered[address] = nbytes
        unlock = real(address, nbytes)

        def release() -> None:
            unlock()
            del registered[address]

        return release

    for where in ("dataflow.stream.resources", "prefetch.ipc.pipe"):
        monkeypatch.setattr(f"{where}.register_pinned", register)
    dataset = made("tar").open(transform=shifted)
    options: dict[str, Any] = {**BUILDERS["processes"], "device": DEVICE, "timeout": TIMEOUT_S}
    options["memory_limit"] = LIMIT
    with DataLoader(dataset, 2, **options) as loader:
        for _ in range(4):
            list(loader)
        assert 0 < sum(registered.values()) <= LIMIT
    assert not registered


def test_a_process_that_is_killed_costs_no_batch(made: Make) -> None:
    dataset = made("tar").open(transform=shifted)
    whole = epochs_of(dataset, 2, count=1)[0]
    with DataLoader(
        dataset, 2, True, seed=7, device=DEVICE, timeout=TIMEOUT_S, **BUILDERS["processes"]
    ) as loader:
        batches = iter(loader)
        got = [next(batches)]
        builders = session_of(loader).resources.engine._builders
        assert isinstance(builders, ProcessBuilders)
        os.kill(builders._processes.pool.processes[0].pid, signal.SIGKILL)
        got += batches
    assert [[tensor.tolist() for tensor in tensors_of(batch)] for batch in got] == whole


class MakesTokens:
    """A document is its number, as often as it is long."""

    fingerprint = "cuda-tokens"

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return {"tokens": torch.full((1 + sample["n"] % 13,), sample["n"])}


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ShardedDataset]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources = []
    for name, start in (("a", 0), ("b", 1000)):
        rows = "".join(json.dumps({"n": start + n}) + "\n" for n in range(150))
        (tmp_path / f"{name}.jsonl").write_text(rows)
        sources.append(ShardedDataset(tmp_path / f"{name}.jsonl", transform=MakesTokens(), block_bytes=300))
    return sources


@pytest.mark.parametrize("builders", BUILDERS)
@pytest.mark.parametrize("is_mixture", [False, True])
def test_rows_of_found_lengths_arrive_whole(
    texts: list[ShardedDataset], builders: str, is_mixture: bool
) -> None:
    dataset = Mixture({texts[0]: 0.7, texts[1]: 0.3}) if is_mixture else texts[0]
    options: dict[str, Any] = {"batching": Packed(64, window=50)}
    found = epochs_of(dataset, 4, device=DEVICE, **options, **BUILDERS[builders])
    assert found == epochs_of(dataset, 4, **options)


def test_weights_set_while_it_runs_hold_on_the_device(texts: list[ShardedDataset]) -> None:
    def rows(**options: Any) -> list[Any]:
        mixture = Mixture({texts[0]: 0.7, texts[1]: 0.3})
        batching = Packed(64, window=30)
        got: list[Any] = []
        with DataLoader(mixture, 2, True, seed=7, batching=batching, timeout=TIMEOUT_S, **options) as loader:
            for batch in loader:
                got.append([tensor.tolist() for tensor in tensors_of(batch)])
                if len(got) == 3:
                    mixture.set_weights([0.1, 0.9])
        return got

    assert rows(device=DEVICE) == rows()


def test_a_state_saved_on_the_device_resumes_in_host_memory(made: Make) -> None:
    dataset = made("tar").open(transform=shifted)
    with DataLoader(dataset, 4, True, seed=7, device=DEVICE, timeout=TIMEOUT_S) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
    with DataLoader(dataset, 4, True, seed=7) as loader:
        loader.load_state_dict(state)
        rest = [[tensor.tolist() for tensor in tensors_of(batch)] for batch in loader]
    assert rest == epochs_of(dataset, 4, count=1)[0][3:]
