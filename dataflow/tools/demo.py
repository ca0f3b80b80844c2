"""`dataflow demo`: the whole project once, on this machine, with data that every machine has.

The source text of Python's standard library becomes shards: flat files of byte tokens, and WebDataset tars
with a module a sample; the same ones for the same Python. Ranks train a small transformer on the tokens. The
training is interrupted and resumed in new processes, and must give the losses of an uninterrupted one, bit
for bit. How other loaders do over the same data, `dataflow bench compare` answers.
"""

from __future__ import annotations

import json
import platform
import sysconfig
import time
from contextlib import ExitStack
from itertools import chain, islice, repeat, zip_longest
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from dataflow.dataset import ShardedDataset
from dataflow.explain.provenance import provenance
from dataflow.loader import DataLoader
from dataflow.progress.bar import ProgressBar
from dataflow.testing import run_ranks
from dataflow.tools.terminal.report import Sentence, machine, show
from sharding.write.writer import ShardWriter

LENGTH = 128
"""Tokens a sample is trained on."""
_SHARD_BYTES = 2 << 20
_LEFT_OUT = {"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"}


# ---- data -----------------------------------------------------------------------------------------------


def write_corpus(folder: Path, max_modules: int | None = None) -> dict[str, Any]:
    """Write `tokens-*.bin` and `modules-*.tar` with their catalogs; returns what was written."""
    began, root = time.perf_counter(), Path(sysconfig.get_path("stdlib"))
    names = ((path, path.relative_to(root).with_suffix("").parts) for path in sorted(root.rglob("*.py")))
    texts = ((".".join(parts), path.read_bytes()) for path, parts in names if not _LEFT_OUT & {*parts})
    is_utf8 = ((name, text) for name, text in texts if text.decode(errors="ignore").encode() == text != b"")
    modules = list(islice(is_utf8, max_modules))
    joined = b"\n\0\n".join(text for _, text in modules)  # the model sees where a module ends
    starts = range(0, len(joined), _SHARD_BYTES)
    for number, start in enumerate(starts):
        (folder / f"tokens-{number:06d}.bin").write_bytes(joined[start : start + _SHARD_BYTES])
    tokens(folder)  # indexes them, once for all ranks
    with ShardWriter(f"{folder}/modules-%06d.tar", max_count=200, overwrite=True) as writer:
        for number, (name, text) in enumerate(modules):
            about = {"name": name, "bytes": len(text), "lines": text.count(b"\n")}
            # Keys are numbers: WebDataset ends a key at its first dot and skips names like `__init__`.
            writer.write({"__key__": f"{number:06d}", "txt": text.decode(), "json": about})
    return {
        "folder": str(folder),
        "num_modules": len(modules),
        "num_bytes": sum(len(text) for _, text in modules),
        "token_shards": len(starts),
        "tar_shards": len(writer.shards),
        "seconds": time.perf_counter() - began,
    }


def tokens(folder: str | Path) -> ShardedDataset:
    """The token files; their catalog lies beside them."""
    files, catalog = f"{folder}/tokens-*.bin", f"{folder}/tokens.catalog"
    return ShardedDataset(files, format="tokens", dtype="uint8", length=LENGTH, catalog=catalog)


def read_tars(folder: str | Path) -> dict[str, Any]:
    """Stream all modules through a loader; returns how many, and the bytes of text delivered."""
    began = time.perf_counter()
    dataset = ShardedDataset(f"{folder}/modules-*.tar", catalog=f"{folder}/modules.catalog")
    num_modules = num_bytes = 0
    with DataLoader(dataset, batch_size=32, shuffle=False) as loader:
        for batch in loader:  # text and JSON arrive decoded
            num_bytes += sum(len(text.encode()) for text in batch["txt"])
            num_modules += len(batch["json"])
    return {"modules": num_modules, "bytes": num_bytes, "seconds": time.perf_counter() - began}


# ---- training -------------------------------------------------------------------------------------------


class ByteTransformer(nn.Module):
    """Predicts the next byte. int64 [batch, length] -> float32 [batch, length, 256]."""

    def __init__(self, length: int, width: int = 96, num_layers: int = 2, num_heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        options: Any = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, num_heads, 4 * width, **options) for _ in range(num_layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the byte after each position."""
        length = tokens.shape[1]
        x = self.token(tokens) + self.position[:length]
        past = nn.Transformer.generate_square_subsequent_mask(length)
        for layer in self.layers:
            x = layer(x, src_mask=past, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_byte_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats; `tokens` is int64 [batch, length + 1]."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(title: str, folder: str, first: int, last: int, batch_size: int, seed: int) -> dict[str, Any]:
    """Do the steps from `first` (unless 0, from the checkpoint) to `last`: what a rank runs, and measures."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(ByteTransformer(LENGTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # DDP settles the order in which gradients are added after its first backward: this changes nothing else.
    next_byte_loss(model, torch.zeros(batch_size, LENGTH + 1, dtype=torch.int64)).backward()
    began = time.perf_counter()
    times, waits, losses = [began], list[float](), list[float]()
    # [train]
    with (
        DataLoader(tokens(folder), batch_size, shuffle=True, seed=seed) as loader,
        ProgressBar(title, total=last, done=first, unit="step") as bar,
    ):
        if first:
            saved = torch.load(f"{folder}/checkpoint.pt", weights_only=True)
            model.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])
        batches = chain.from_iterable(repeat(loader))  # each loop over it is an epoch
        for step in range(first, last):
            batch = next(batches)["tokens"]
            waits.append(time.perf_counter() - times[-1])
            loss = next_byte_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(float(mean / dist.get_world_size()))
            bar.show(step + 1, text=f"loss {losses[-1]:.3f}")
            times.append(time.perf_counter())
            # [end]
        state, stats = loader.state_dict(), loader.stats()  # the state is the same on every rank
    if dist.get_rank() == 0:
        weights = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**weights, "loader": state}, f"{folder}/checkpoint.pt")
    seconds = times[-1] - began - waits[0]
    # Not getrusage: after fork and exec, its maximum includes the parent's.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "first_step": first,
        "losses": losses,  # means over all ranks
        "samples_per_s": len(losses) * batch_size * dist.get_world_size() / seconds,
        "seconds": seconds,  # from the first batch on, as the wait
        "waited_s": sum(waits[1:]),
        "waiting_share": sum(waits[1:]) / seconds,
        "first_batch_s": waits[0],
        "peak_bytes": int(status.get("VmHWM", "0 kB").split()[0]) * 1024,
        "loader_peak_bytes": stats.memory.peak_bytes,
        "loader_state": state,
    }


# ---- telling --------------------------------------------------------------------------------------------


def run_demo(*, folder: Path | None, keep: bool, max_modules: int | None, **settings: int) -> dict[str, Any]:
    """Do all of it and print as it goes. Returns all figures, as JSON types.

    `settings`: num_ranks, steps, batch_size and seed. `max_modules`: of the library; None: all.
    """
    began, steps, ranks = time.perf_counter(), settings["steps"], settings["num_ranks"]
    half = steps // 2
    with ExitStack() as opened:
        place = Path(folder or mkdtemp(prefix="dataflow-demo-")).absolute()
        place.mkdir(parents=True, exist_ok=True)
        if not (folder or keep):
            opened.callback(rmtree, place)
        _say("\nPython's standard library as shards", "bold", 0)
        corpus, tars = write_corpus(place, max_modules), read_tars(place)
        _say(
            f"{corpus['num_modules']:,} modules, {corpus['num_bytes'] / 1e6:.1f} MB of source text: "
            f"{corpus['token_shards']} files of byte tokens and {corpus['tar_shards']} WebDataset tars, "
            f"written and indexed in {corpus['seconds']:.1f} s"
        )
        same = (tars["modules"], tars["bytes"]) == (corpus["num_modules"], corpus["num_bytes"])
        said = "every byte there" if same else "NOT the bytes that were written"
        _say(f"read back from the tars in {tars['seconds']:.2f} s: {said}", "" if same else "red")
        _say(f"\nTraining on {ranks} ranks, interrupted and resumed", "bold", 0)
        runs = {}
        pieces = {"whole": (0, steps), "interrupted": (0, half), "resumed": (half, steps)}
        for name, piece in pieces.items():
            args = (name, str(place), *piece, settings["batch_size"], settings["seed"])
            options: Any = {"start_method": "forkserver", "timeout_s": 600 + 10 * steps}
            runs[name] = run = run_ranks(train, ranks, args=args, **options)[0]
            _say(
                f"{name}: loss {run['losses'][0]:.3f} to {run['losses'][-1]:.3f}; first batch after "
                f"{run['first_batch_s'] * 1e3:,.0f} ms, {run['samples_per_s']:,.0f} samples/s, waiting "
                f"{run['waiting_share']:.1%}, memory {run['peak_bytes'] / 1e6:,.0f} MB"
            )
        state = json.dumps(runs["interrupted"]["loader_state"])
        _say(f"the loader's state at the interruption is JSON, {len(state)} bytes: {state}", "dim")
        losses, resumed = runs["whole"]["losses"], runs["interrupted"]["losses"] + runs["resumed"]["losses"]
        _say(losses_text(losses, resumed, half), "green" if losses == resumed else "red")
        _say(waiting_text(runs["whole"]["waiting_share"]))
        step = max(range(half, steps), key=losses.__getitem__)
        table = provenance(runs["resumed"]["loader_state"], tokens(place), step)
        _say(samples_text(step, losses[step], table))
    seconds = time.perf_counter() - began
    location = f"; shards and checkpoint are in {place}" if place.exists() else ""
    _say(f"done in {seconds:.0f} s; the training loop is {__file__}{location}")
    return {
        "identical": losses == resumed,
        "settings": {"folder": str(place), "keep": keep, "max_modules": max_modules, **settings},
        "corpus": corpus,
        "tars": tars,
        "runs": runs,
        "explained": {"step": step, "samples": table["sample"].to_pylist()},
        "seconds": seconds,
        "machine": {**machine(), "python": platform.python_version(), "torch": torch.__version__},
    }


def _say(text: str, style: str = "", indent: int = 2) -> None:
    show([Sentence(text, style, indent)])


def losses_text(whole: list[float], pieces: list[float], half: int) -> str:
    """Say whether the resumed training is the uninterrupted one; if not, the first step that differs."""
    for step, (loss, other) in enumerate(zip_longest(whole, pieces, fillvalue="none"), 1):
        if loss != other:
            return f"different: step {step} has loss {loss} uninterrupted and {other} resumed"
    return (
        f"identical: {len(whole)} losses of the run that was interrupted after step {half} and resumed in "
        "new processes equal those of the uninterrupted one, bit for bit"
    )


def samples_text(step: int, loss: float, table: pa.Table) -> str:
    """Name some of the samples of the step whose loss was largest after the interruption."""
    rows = table.select(["rank", "shard", "offset"]).slice(0, 3).to_pylist()
    named = (f"{Path(row['shard']).name}, byte {row['offset']:,}, on rank {row['rank']}" for row in rows)
    return (
        f"step {step} had the largest loss of the second half, {loss:.3f}. Its {table.num_rows} samples "
        f"follow from the last state alone: {'; '.join(named)} ... `dataflow explain` tells those of any step"
    )


def waiting_text(share: float) -> str:
    """Return whether the loader kept up, by the share of the time that the training waited."""
    if share < 0.05:
        return "the model is the limit: no loader could make this training faster"
    return f"the loader made the training wait for {share:.0%} of its time"
