"""The commands `dataflow bench storage`, `loader` and `compare`."""

from __future__ import annotations

import click

from dataflow.tools.bench.settings import Comparison, Emulation, Sweep
from dataflow.tools.terminal.options import ReportFiles, options_of, plain_errors


@click.group(short_help="Measure a store, a loop's loading, or loaders side by side.")
def bench() -> None:
    """Measure a store, a training loop's loading, or loaders side by side.

    \b
      dataflow bench storage SOURCE    what the store can do
      dataflow bench loader SOURCE     what an emulated training gets of it, and what holds it up
      dataflow bench compare SOURCE    torch's DataLoader and this one, over your own dataset

    docs/guide/benchmarking.md explains every figure.
    """  # noqa: D301 - click wants the control character


@bench.command()
@options_of(Sweep)
@options_of(ReportFiles, "files")
@plain_errors
def storage(settings: Sweep, files: ReportFiles) -> None:
    """Measure what the store that holds SOURCE can do.

    SOURCE is what `dataflow index` takes: a file, a directory of shards, a URL, a glob or a brace pattern,
    or a catalog. Nothing is written. Every combination of order, block size and reads in flight is measured
    for some seconds: throughput in MB/s, latency percentiles in milliseconds, processor seconds a GB.
    With --need the report says whether that is enough, by how much, and with which reads; for a need in
    samples, SOURCE is indexed if it is not. Percentiles of too few reads are left out. Data is called cold
    only with evidence that it came from a device.

    \b
    Examples:
      dataflow bench storage data/
      dataflow bench storage 'data/*.bin' --pattern random --block-size 4KiB --in-flight 32 --seconds 10
      dataflow bench storage 's3://bucket/x-{000..099}.tar' --storage-option anon=true --in-flight 64
      dataflow bench storage train.catalog --need 16000/s
      dataflow bench storage data/ --need 2GB/s --strict
      dataflow bench storage data/ --read buffered --evict --json figures.json --plot figures.png
    """  # noqa: D301 - click wants the control character
    from dataflow.progress.bar import ProgressBar
    from dataflow.tools.bench.storage import bench_storage, case_text, page_of
    from dataflow.tools.terminal.report import fail_unless_yes, publish

    with ProgressBar("measuring") as bar:
        figures = bench_storage(settings, lambda done, total, case: bar.draw(done, total, case_text(case)))
    page = page_of(figures)
    publish(page, files)
    if settings.strict:
        fail_unless_yes(page)


@bench.command()
@options_of(Emulation)
@options_of(ReportFiles, "files")
@plain_errors
def loader(settings: Emulation, files: ReportFiles) -> None:
    """Measure what an emulated training gets of the data, and what holds it up.

    SOURCE is what `dataflow index` takes, or package.module:function, which makes your ShardedDataset.
    Ranks load batches, wait as long as an accelerator would compute, and go on together. Then each part is
    measured alone: storage, decoding from memory, computing. The report gives accelerator utilisation as
    MLPerf Storage defines it, what limits the training, and what a cure of that would gain; with --need, also
    whether loading alone is fast enough.

    \b
    Examples:
      dataflow bench loader 'data/*.bin' --dtype uint16 --length 2048 --compute-ms 20
      dataflow bench loader images.catalog --image-size 224 --compute-ms 60 --ranks 2 --batch-size 128
      dataflow bench loader 'https://host/x-{00..15}.tar' --compute-ms 50 --memory-limit 256MiB
      dataflow bench loader my_project.data:train_set --compute-ms 50 --need 2000/s --json figures.json
    """  # noqa: D301 - click wants the control character
    from dataflow.progress.bar import ProgressBar
    from dataflow.tools.bench.loader import emulate, page_of
    from dataflow.tools.terminal.report import fail_unless_yes, publish

    with ProgressBar("measuring") as bar:
        figures = emulate(settings, bar.draw)
    page = page_of(figures)
    publish(page, files)
    if settings.strict:
        fail_unless_yes(page)


@bench.command()
@options_of(Comparison)
@options_of(ReportFiles, "files")
@plain_errors
def compare(settings: Comparison, files: ReportFiles) -> None:
    """Run torch's DataLoader and this one over your own dataset.

    SOURCE is what `dataflow index` takes, or package.module:function, which takes no arguments and makes any
    torch dataset; its module is imported. The loaders are run one after the other, round after round, in
    fresh processes. Medians of samples a second are compared; if torch is faster, the report says so.

    \b
    Examples:
      dataflow bench compare images.catalog --image-size 224
      dataflow bench compare my_project.data:train_set --workers 2 --workers 8 --batch-size 128
    """  # noqa: D301 - click wants the control character
    from dataflow.progress.bar import ProgressBar
    from dataflow.tools.bench.compare import compare as compare_loaders, page_of
    from dataflow.tools.terminal.report import publish

    with ProgressBar("comparing") as bar:
        figures = compare_loaders(settings, bar.draw)
    publish(page_of(figures), files)
