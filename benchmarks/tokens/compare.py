"""`python -m benchmarks.tokens.compare`: from raw text to packed rows of tokens, beside other ways.

The text is this Python's standard library, a document for each part of a file between two empty lines, as
JSON Lines. All use the same tokenizer (BPE of 8,000, trained on some of it), put an end behind each document
and deliver one epoch of rows of a fixed length, with what tells documents apart:

- dataflow: `Tokenize` and `Packed`, with what it chooses by itself;
- datasets.map: `map(batched=True)` in a process a core, then best-fit decreasing, written by hand, over
  buffers of 4,096 documents;
- Grain: documents tokenized and packed by its best-fit packer (64 bins) in a process a core;
- torchtitan: its own dataset, which joins documents and cuts where a row ends, in one process;
- tokenizer alone: the limit, in a thread a core, over text in memory; nothing is packed or delivered.

Each run is a process of its own with an empty cache folder, and a second one that goes on where the first was
after 90 % of the tokens, with what is in the cache by then. Repeats are interleaved, and medians shown.
Tokens count without padding; CPU seconds are those of all processes, from constructing the loader to the end
of the epoch.
"""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks import REPOSITORY
from benchmarks.harness import interleaved, medians, run_child
from benchmarks.options import data_option, json_option, repeats_option
from benchmarks.report import ReportSummary, machine, save_runs, versions
from benchmarks.tokens.loaders import END, LIMIT, LOADERS, OURS, TextData, measured

LIMIT_S = 600.0
NUM_SHARDS = 8
VOCABULARY = 8_000


@dataclass(frozen=True, kw_only=True)
class TokensRun:
    """One run. Either `reason` says why there are no figures, or all of them are there."""

    loader: str
    tokens_per_s: float = 0.0
    """From constructing the loader to the epoch's end."""
    fill: float = 0.0
    """Share of the rows that is no padding."""
    cpu_s_per_million: float = 0.0
    first_batch_s: float = 0.0
    """From constructing the loader; imports excluded."""
    resume_s: float = 0.0
    """The same, of a new process that goes on after 90 % of the tokens."""
    lost_tokens: float = 0.0
    """That the epoch should have had and did not, or had twice."""
    reason: str = ""


def documents() -> Iterator[str]:
    """The standard library in parts, without installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            yield from (part for part in path.read_text("utf-8", "replace").split("\n\n\n") if part.strip())


def prepared(folder: Path, megabytes: float) -> TextData:
    """The text as JSON Lines, its tokenizer, and how many tokens there are; made once."""
    told = folder / "told.json"
    if not told.exists():
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        folder.mkdir(parents=True, exist_ok=True)
        texts, left = list[str](), megabytes * 1e6
        for text in documents():
            if left <= 0:
                break
            texts.append(text)
            left -= len(text)
        for shard in range(NUM_SHARDS):
            lines = (json.dumps({"text": text}) for text in texts[shard::NUM_SHARDS])
            (folder / f"text-{shard}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts[:: max(1, len(texts) // 4000)], trainer)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
        batches = (texts[at : at + 256] for at in range(0, len(texts), 256))
        counts = (len(each.ids) + 1 for batch in batches for each in tokenizer.encode_batch_fast(batch))
        told.write_text(json.dumps({"documents": len(texts), "tokens": sum(counts)}))
    return TextData(str(folder), **json.loads(told.read_text()))


def run_twice(data: TextData, run: TokensRun, *, length: int, rows: int, window: int | None) -> TokensRun:
    """The run with its figures: an epoch, and another process that goes on near its end."""
    cache = tempfile.mkdtemp(prefix="dataflow-tokens-")
    job = {"loader": run.loader, "data": asdict(data), "length": length, "rows": rows, "cache": cache}
    job["window"] = window
    environment = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": cache, "HF_HOME": cache}
    environment |= {"HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    figures: dict[str, float] = {}
    try:
        for resumes in (False, True) if run.loader != LIMIT else (False,):
            asked = job | {"resumes": resumes}
            told, _ = run_child(measured, asked, environment=environment, limit_s=LIMIT_S)
            if told.get("reason"):
                return replace(run, reason=("resuming: " if resumes else "") + told["reason"])
            figures |= told["result"]
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    return replace(run, **figures)


def verdicts(rows: Sequence[TokensRun]) -> list[ReportSummary]:
    """What the bars say of ours."""
    [own] = [row for row in rows if row.loader == OURS]
    peers = [row.tokens_per_s for row in rows if row.loader not in (OURS, LIMIT) and not row.reason]
    if own.reason:
        return []
    ratio = own.tokens_per_s / max(peers) if peers else None
    return [
        ReportSummary("tokens/s", "x the best peer", ratio, 1.5),
        ReportSummary("fill", "of the rows", own.fill, 0.99),
        ReportSummary("resume", "s", own.resume_s, 2.0, at_most=True),
        ReportSummary("tokens lost", "", own.lost_tokens, 0, at_most=True),
    ]


def show(console: Console, data: TextData, rows: Sequence[TokensRun]) -> None:
    """A table: one row a loader."""
    table = Table(title=f"{data.documents:,} documents, {data.tokens:,} tokens", title_justify="left")
    headings = ("documents/s", "tokens/s", "full", "CPU s/million", "first s", "resume s", "lost")
    table.add_column("loader")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        if row.reason:
            console.print(f"  {row.loader}: not run: {row.reason}", markup=False, highlight=False)
            continue
        per_s = row.tokens_per_s * data.documents / data.tokens
        table.add_row(
            row.loader,
            f"{per_s:,.0f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.fill:.4f}",
            f"{row.cpu_s_per_million:.2f}",
            f"{row.first_batch_s:.2f}",
            f"{row.resume_s:.2f}",
            f"{row.lost_tokens:,.0f}",
        )
    console.print(table)


@click.command()
@click.option("--loaders", default=",".join(LOADERS), show_default=True, help="Which loaders.")
@click.option("--megabytes", type=float, default=20.0, show_default=True, help="Of text, at most.")
@click.option("--length", type=click.IntRange(2), default=2048, show_default=True, help="Tokens of a row.")
@click.option("--rows", type=click.IntRange(1), default=8, show_default=True, help="Rows of a batch.")
@click.option("--window", type=click.IntRange(1), help="Documents that ours plans together.")
@repeats_option
@data_option
@json_option
def main(
    loaders: str,
    megabytes: float,
    length: int,
    rows: int,
    window: int | None,
    repeats: int,
    root: Path | None,
    output: Path | None,
) -> None:
    """Measure packed tokens/s from raw text."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    names = loaders.split(",")
    if unknown := set(names) - LOADERS.keys():
        raise click.BadParameter(f"no such loader: {', '.join(unknown)}", param_hint="--loaders")
    folder = (root or REPOSITORY / ".bench-data").resolve() / f"tokens-{megabytes:g}"
    data = prepared(folder, megabytes)
    console.print(machine(), versions())

    def measure(name: str) -> TokensRun:
        run = run_twice(data, TokensRun(loader=name), length=length, rows=rows, window=window)
        figures = run.reason or f"{run.tokens_per_s:,.0f} tokens/s"
        console.print(f"{name}: {figures}", markup=False, highlight=False)
        return run

    runs = list(interleaved(names, repeats, measure))
    table = medians(runs, "loader")
    show(console, data, table)
    bars = verdicts(table) if OURS in names else []
    for bar in bars:
        ratio = "" if bar.measured is None else f"{bar.measured:.3g} "
        console.print(f"  {bar.workload}: {ratio}{bar.bar}: {bar.says}", markup=False, highlight=False)
    if output:
        told = {"documents": data.documents, "tokens": data.tokens}
        save_runs(output, bars, table, runs, data=told)


if __name__ == "__main__":
    main()
