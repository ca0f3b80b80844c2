"""`dataflow bench storage`, `loader` and `compare` on tiny data, from end to end."""

import io
import json
import sys
import threading
from dataclasses import replace

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from http_kit import slowstore
from programs_kit import run_command
from rich.console import Console

from dataflow import DataLoader, Mixture, ShardedDataset, ShardWriter
from dataflow.telemetry.timing.records import StepTimes
from dataflow.tools.bench import loader
from dataflow.tools.bench.compare import (
    Contestant,
    LoaderRun,
    compare,
    contestants_over,
    measure,
    page_of,
    size_of,
)
from dataflow.tools.bench.evidence import device_bytes, evict, resident_share
from dataflow.tools.bench.fio import check_direct, run_fio
from dataflow.tools.bench.in_memory import InMemory
from dataflow.tools.bench.reads import Case
from dataflow.tools.bench.settings import BenchDataset, Comparison, Emulation, Sweep
from dataflow.tools.bench.stages import Work, own_blocks, run_phase
from dataflow.tools.bench.storage import KernelAccounts, bench_storage
from dataflow.tools.terminal.options import named_function, plain_errors
from dataflow.tools.terminal.report import save, show
from sharding.blocks import Shard
from sharding.errors import DataflowError, ShardReadError

SECONDS = 0.02


pytestmark = pytest.mark.usefixtures("own_cache")


def run(*arguments):
    """Exit code and everything printed, as one line."""
    code, text = run_command("bench", *arguments)
    return code, " ".join(text.split())


@pytest.fixture
def shards(tmp_path):
    """Two token shards of 256 KiB."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for name in "ab":
        np.arange(1 << 17, dtype=np.uint16).tofile(folder / f"{name}.bin")
    return folder


@pytest.fixture
def tars(tmp_path):
    with ShardWriter(str(tmp_path / "tar-%02d.tar"), max_count=20) as writer:
        for i in range(80):
            writer.write({"__key__": f"{i:03d}", "bin": bytes(i + 1), "cls": i % 10})
    return tmp_path / "tar-*.tar"


QUICK = ("--seconds", SECONDS)


# ---- storage --------------------------------------------------------------------------------------------


def test_storage_measures_every_combination(shards, tmp_path):
    picture = tmp_path / "p.png"
    given = ("--read", "buffered", "--block-size", "4KiB", "--block-size", "64KiB", "--in-flight", 1)
    code, text = run("storage", shards, *given, "--in-flight", 3, *QUICK, "--json", "-", "--plot", picture)
    assert code == 0
    found = json.loads(text)
    assert (found["shards"], found["stored_bytes"], found["read"]) == (2, 1 << 19, "buffered")
    seen = {
        (c["case"]["pattern"], c["case"]["block_bytes"], c["case"]["concurrency"]) for c in found["cases"]
    }
    assert len(seen) == len(found["cases"]) == 8
    for case in found["cases"]:
        assert case["total_bytes"] == case["reads"] * case["case"]["block_bytes"]
        assert case["mb_per_s"] == pytest.approx(case["total_bytes"] / case["seconds"] / 1e6)
        assert len(case["mb_per_s_over_time"]) == 20
        assert case["cpu_s_per_gb"] > 0
        assert case["label"]["word"] != "cold"  # the shards were just written
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_storage_prints_a_table_and_what_its_words_rest_on(shards):
    code, text = run("storage", shards, "--read", "buffered", "--in-flight", 2, *QUICK)
    assert code == 0
    assert "shards 2, 524 kB" in text
    assert "sequential 128 KiB 2" in text
    assert "random 128 KiB 2" in text
    assert "came from the device" in text
    assert "p99.9 needs 10,000" in text


FIO = """#!{python}
# What fio does of a job: it notes four reads a file, of 5 ms each, and says its figures.
import json, os, sys
job = sys.stdin.read()
words = dict(line.split("=") for line in job.splitlines() if "=" in line)
names = [line.partition("=")[2] for line in job.splitlines() if line.startswith("filename=")]
if words["bs"] == "65536":
    print("fio: pid=7, err=5/file:io_u.c:1803, func=io_u error, error=Input/output error")
    sys.exit(1)
with open(os.environ["FIO_JOBS"], "a") as jobs:
    jobs.write(json.dumps({{**words, "files": [os.path.realpath(name) for name in names]}}) + "\\n")
with open("reads_lat.log", "w") as log:
    for number in range(4 * len(names)):
        log.write(f"{{10 * number + 5}}, {{5_000_000}}, 0, {{words['bs']}}, 0\\n")
print("a note of fio's")
print(json.dumps({{"jobs": [{{"usr_cpu": 2.0, "sys_cpu": 3.0, "job_runtime": 1000, "error": 0}}]}}))
"""


@pytest.fixture
def fio(tmp_path, monkeypatch):
    """A stand-in for fio, and the jobs that it was given; direct reads are said to be possible."""
    folder, jobs = tmp_path / "bin", tmp_path / "jobs"
    folder.mkdir()
    (folder / "fio").write_text(FIO.format(python=f"{sys.executable} -S"))
    (folder / "fio").chmod(0o755)
    monkeypatch.setenv("FIO_JOBS", str(jobs))
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr("dataflow.tools.bench.storage.check_direct", lambda shards: None)
    return lambda: [json.loads(line) for line in jobs.read_text().splitlines()]


def counted(*amounts):
    """The kernel's account of device bytes, one look after the other."""
    return KernelAccounts(iter(amounts).__next__, lambda shards: pytest.fail("it is for buffered reads"))


def test_fio_reads_around_the_page_cache_where_it_is_installed(shards, fio):
    asked = Sweep(source=[str(shards)], seconds=0.5, block_bytes=[8192], concurrency=[3], patterns=["random"])
    figures = bench_storage(asked, accounts=counted(0, 5, 100, 100 + 8 * 8192))
    first, job = fio()
    assert (first["bs"], first["iodepth"], first["number_ios"]) == ("4096", "1", "101")
    assert (job["rw"], job["bs"], job["iodepth"], job["runtime"]) == ("randread", "8192", "3", "500000us")
    assert (job["direct"], job["allow_file_create"]) == ("1", "0")
    assert job["files"] == [str(shards / "a.bin"), str(shards / "b.bin")]
    [one] = figures.cases
    assert (figures.how, one.reads, one.total_bytes) == ("direct", 8, 8 * 8192)
    assert (one.seconds, one.latency_s["50"], one.cpu_s_per_gb * one.total_bytes / 1e9) == pytest.approx(
        (0.075, None, 0.05)
    )
    assert one.label.word == "cold"
    assert figures.first_byte.first_s == pytest.approx(0.005)
    assert figures.first_byte.reads == 7


def test_without_fio_files_are_read_as_in_training_and_that_is_said(shards, monkeypatch):
    monkeypatch.setenv("PATH", str(shards))
    quick = (shards, "--in-flight", 1, "--pattern", "random", *QUICK)
    code, text = run("storage", *quick)
    assert code == 0
    assert "through the page cache, with the reader that training uses" in text
    assert "fio is not installed (apt-get install fio" in text
    assert "fio" not in run("storage", *quick, "--read", "buffered")[1]
    code, text = run("storage", *quick, "--read", "direct")
    assert code == 1
    assert "fio is not installed (apt-get install fio" in text


def test_shards_that_are_shorter_than_a_block_are_left_out_and_counted(shards, fio):
    (shards / "short.bin").write_bytes(bytes(5000))
    quick = (shards, "--in-flight", 1, "--pattern", "sequential", *QUICK)
    code, text = run("storage", *quick, "--block-size", "4KiB", "--block-size", "8KiB")
    assert code == 0
    assert (
        "1 of the shards, or fewer, are shorter than a block and were not read (sequential 8 KiB x 1)" in text
    )
    assert [len(job["files"]) for job in fio()] == [3, 3, 2]
    code, text = run("storage", *quick, "--block-size", "1MiB")
    assert code == 0
    assert "every shard is shorter than a block of 1,048,576 bytes, which fio cannot read: these are" in text
    assert run("storage", *quick, "--block-size", "1MiB", "--read", "direct")[0] == 1


def test_what_fio_complains_of_is_the_error(shards, fio):
    with pytest.raises(
        DataflowError, match=r"fio failed: fio: pid=7, .*Input/output error; use --read buffered"
    ):
        run_fio(Case("random", 65536, 1), [shard_of(shards / "a.bin")], 1.0, from_device=lambda: None)


def shard_of(path):
    return Shard(str(path), path.stat().st_size, "")


def test_cold_is_refused_over_files_in_memory(shards):
    for path in shards.glob("*.bin"):
        path.read_bytes()
    given = ("--read", "buffered", "--pattern", "sequential", "--in-flight", 1, *QUICK)
    code, text = run("storage", shards, *given, "--require-cold")
    assert code == 1
    assert "were not cold" in text
    assert "--evict" in text


def test_cold_is_refused_where_nobody_counts_device_bytes(shards):
    sweep = Sweep(source=[str(shards)], read="buffered", concurrency=[1], seconds=SECONDS, require_cold=True)
    with pytest.raises(DataflowError, match="the kernel does not say how many bytes came from a device"):
        bench_storage(sweep, accounts=KernelAccounts(from_device=lambda: None))


def swept(shards, *, device_bytes, **asked):
    """The one case of a sweep; the device is said to have given so many bytes, with none in memory before."""
    counted = iter([0, device_bytes])
    accounts = KernelAccounts(lambda: next(counted), lambda shards: 0.0)
    sweep = Sweep(source=[str(shards)], read="buffered", patterns=["sequential"], **asked)
    [one] = bench_storage(sweep, accounts=accounts).cases
    return one


def test_evicted_files_are_read_once_and_called_by_what_the_device_gave(shards):
    asked = {"evict": True, "require_cold": True, "seconds": 5, "block_bytes": [4096], "concurrency": [2]}
    one = swept(shards, device_bytes=1 << 19, **asked)
    assert one.exhausted
    assert one.passes == 1
    assert one.label.word == "cold"


def test_what_is_read_a_second_time_is_not_called_cold(shards):
    asked = {"seconds": 0.1, "block_bytes": [1 << 18], "concurrency": [1]}
    one = swept(shards, device_bytes=1 << 50, **asked)
    assert one.passes > 1
    assert one.label.word == "mixed"


def test_residency_is_seen_and_needs_the_right_to_know(shards):
    path = shards / "a.bin"
    path.read_bytes()
    shard = Shard(str(path), path.stat().st_size, "")
    assert resident_share([shard]) == 1
    evict([shard])
    assert resident_share([shard]) <= 1  # tmpfs keeps everything
    assert resident_share([]) is None
    assert resident_share([Shard("http://host/x.bin", 10, "")]) is None
    assert resident_share([replace(shard, size=1 << 50)]) is None
    assert resident_share([shard], lambda path, status: False) is None


def test_device_bytes_are_unknown_without_the_kernels_account(tmp_path):
    assert device_bytes(str(tmp_path / "none")) is None
    (tmp_path / "io").write_text("rchar: 5\nread_bytes: 4096\nwrite_bytes: 7\n")
    assert device_bytes(str(tmp_path / "io")) == 4096


def test_storage_reads_a_remote_store_with_the_production_reader(shards):
    with slowstore(shards) as url:
        code, text = run("storage", f"{url}/a.bin", "--in-flight", 2, *QUICK, "--json", "-")
        refused = run("storage", f"{url}/a.bin", "--require-cold")
    assert code == 0
    found = json.loads(text)
    assert found["read"] == "store"
    assert found["first_byte"]["nbytes"] == 1
    assert {case["label"]["word"] for case in found["cases"]} == {"unknown"}
    assert refused[0] == 1
    assert "a remote store cannot be called cold" in refused[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing/x.tar",), "no such file"),
        (("shards", "--block-size", "1000"), "a multiple of 4096 bytes, got 1000"),
        (("shards", "--plot", "x.gif"), "a picture must end in .png or .svg or .html"),
        (("empty.bin",), "nothing to read"),
    ],
)
def test_storage_errors_are_one_line(shards, fio, monkeypatch, arguments, message):
    monkeypatch.chdir(shards.parent)
    (shards.parent / "empty.bin").touch()
    code, text = run("storage", *arguments)
    assert code == 1
    assert message in text


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
@pytest.mark.parametrize("command", [("storage",), ("loader", "--compute-ms", "1"), ("compare",)])
def test_seconds_are_a_finite_number_above_0(shards, monkeypatch, command, seconds):
    monkeypatch.chdir(shards.parent)
    assert run(*command, "shards", "--seconds", seconds)[0] == 2


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(13, "Permission denied"), r"a\.bin.*permission denied"),
        (OSError(22, "Invalid argument"), "use --read buffered"),
    ],
)
def test_a_shard_that_cannot_be_read_directly_is_named(shards, error, message):
    def refuse(path, flags):
        raise error

    with pytest.raises(ShardReadError, match=message):
        check_direct([shard_of(shards / "a.bin")], refuse)


# ---- loader ---------------------------------------------------------------------------------------------


def tokens_in(folder):
    return BenchDataset(source=[str(folder)], format="tokens", dtype="uint16", length=64)


def in_this_process(work, ranks):
    assert ranks == 1
    return [run_phase(replace(work, seconds=SECONDS))]


def emulated(shards):
    emulation = Emulation(dataset=tokens_in(shards), compute_ms=5.0, batch_size=8, seconds=SECONDS)
    return loader.emulate(emulation, run=in_this_process)


def test_loader_measures_each_part_and_says_what_binds(shards, tmp_path):
    console = Console(record=True, file=io.StringIO(), width=100)
    page = loader.page_of(emulated(shards))
    show(page.told, console)
    save(page, picture=str(tmp_path / "p.png"), csv_path=str(tmp_path / "r.csv"))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    phases = [line.partition(",")[0] for line in (tmp_path / "r.csv").read_text().splitlines()]
    assert phases[:3] == ["phase", "training", "loader"]
    text = " ".join(console.export_text().split())
    assert "rank AU samples/s MB/s read waiting in step first batch memory" in text
    assert "loading from memory" in text
    assert "accelerator utilisation" in text
    assert "Too short to tell what holds this training up" in text
    assert "expected gain of curing one part" in text
    assert "the slowest part alone predicts" in text
    assert "ledger: at most" in text


def test_loader_figures_agree_with_each_other(shards):
    found = json.loads(json.dumps(emulated(shards).to_json()))
    [rank] = found["phases"]["training"]
    steps = rank["steps"]
    assert rank["samples"] == 8 * (steps["count"] - 1)
    assert rank["utilisation"] == pytest.approx((steps["count"] - 1) * 0.005 / steps["running_s"])
    assert found["accelerator_utilisation"] == rank["utilisation"] <= 1
    assert {"training", "loader", "storage", "memory", "undecoded"} <= set(found["phases"])
    assert found["rates_samples_per_s"]["measured"] == pytest.approx(rank["samples_per_s"])
    assert found["bottleneck"]["bound"] in found["bottleneck"]["gains"]
    rates, headspace = found["rates_samples_per_s"], found["headspace"]
    assert rates["compute"] / rates["measured"] == pytest.approx(headspace["gain"])
    assert headspace["live"]["usual"] == pytest.approx(rank["samples_per_s"] / 8, rel=0.1)


def test_loader_runs_in_gloo_ranks_that_go_in_step(shards):
    work = Work(
        phase="training",
        dataset=tokens_in(shards),
        batch_size=8,
        compute_s=0.001,
        seconds=SECONDS,
        seed=0,
        memory_limit=None,
        kept_bytes=1 << 20,
    )
    found = loader.run_in_ranks(work, 2)
    assert [one.rank for one in found] == [0, 1]
    assert found[0].steps.counted == found[1].steps.counted >= 1


def test_data_that_came_from_the_disk_is_dropped_before_each_further_phase(shards):
    dropped = []
    asked = Emulation(dataset=tokens_in(shards), compute_ms=5.0, batch_size=8)

    def figures(work, ranks):
        [one] = in_this_process(work, ranks)
        return [replace(one, device_bytes=one.read_bytes, samples_per_s=100.0)]

    found = loader.emulate(asked, run=figures, drop=lambda shards: dropped.append(len(shards)))
    assert found.evicted
    assert dropped == [2] * 4


def faster(times, steps):
    return tuple(
        StepTimes(window=one.window, microbatches=1, data_s=0.0, compute_s=one.total_s / times)
        for one in steps
    )


def test_a_loader_behind_its_parts_is_tried_with_more_memory(shards):
    asked = Emulation(dataset=tokens_in(shards), compute_ms=5.0, batch_size=8, memory_limit=64 << 20)
    rates = {"loader": 10.0, "training": 10.0, "more memory": 100.0}
    limits = {}

    def figures(work, ranks):
        limits[work.phase] = work.memory_limit
        [one] = in_this_process(work, ranks)
        if one.replayed:
            one = replace(one, replayed=replace(one.replayed, windows=faster(9, one.steps.windows)))
        return [replace(one, samples_per_s=rates.get(work.phase, 90.0), device_bytes=0)]

    found = loader.emulate(asked, run=figures)
    assert limits["more memory"] == 4 * limits["training"]
    assert found.bottleneck.bound == "memory"


def test_a_dataset_in_memory_reads_nothing_from_its_store(tars):
    with slowstore(tars.parent) as url:
        urls = [f"{url}/tar-{i:02d}.tar" for i in range(4)]
        dataset = InMemory(ShardedDataset(urls), 1 << 30)
    assert not any(thread.name.startswith("dataflow-bench") for thread in threading.enumerate())
    with DataLoader(dataset, batch_size=8, shuffle=True) as batches:  # the server is gone
        assert sum(len(batch["cls"]) for batch in batches) == 80


def test_a_dataset_in_memory_is_as_long_as_fits_and_may_stay_undecoded(tars):
    whole = ShardedDataset(str(tars))
    stored = int(whole.catalog.blocks.length.sum())
    assert len(InMemory(whole, stored // 2)) == 40
    assert len(InMemory(whole, 1)) == 1
    assert len(InMemory(whole, 1, at_least=7)) == 7
    for options, dtype in (({}, torch.int64), ({"decode": False}, torch.uint8)):
        with DataLoader(InMemory(whole, 1 << 30, **options), batch_size=80, shuffle=False) as batches:
            [batch] = batches
        assert batch["cls"].dtype == dtype


def test_ranks_share_the_blocks(tars):
    dataset = ShardedDataset(str(tars))
    shares = [own_blocks(dataset, 0, rank, 3).tolist() for rank in range(3)]
    assert sorted(number for share in shares for number in share) == [0, 1, 2, 3]
    assert sorted(own_blocks(dataset, 0, 0, 9).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.tar", "--compute-ms", 5), "no such file"),
        (("tokens.bin", "--compute-ms", 5), "needs --length"),
        (("nowhere:make", "--compute-ms", 5), "there is no module 'nowhere'"),
        (("own_data:plain", "--compute-ms", 5), "dataflow bench compare"),
        (("own_data:plain", "--compute-ms", 5, "--length", 3), "leave out the options that describe shards"),
        (("a.tar", "--compute-ms", 0), "must be > 0"),
    ],
)
def test_loader_errors_are_one_line(own_data, tmp_path, arguments, message):
    (tmp_path / "tokens.bin").write_bytes(bytes(1000))
    code, text = run("loader", *arguments)
    assert code == 1
    assert message in text


def test_an_error_of_a_rank_comes_without_its_traceback():
    @click.command()
    @plain_errors
    def fails():
        error = ValueError("too little memory")
        error.add_note("raised by rank 0 of 2:\nTraceback (most recent call last):\n  File")
        raise error

    result = CliRunner().invoke(fails, [])
    assert result.exit_code == 1
    assert " ".join(result.output.split()) == "Error: too little memory raised by rank 0 of 2"


# ---- compare --------------------------------------------------------------------------------------------


@pytest.fixture
def own_data(tmp_path, monkeypatch):
    """A module of the user's, in the current folder."""
    (tmp_path / "own_data.py").write_text(
        "import torch\n"
        "from torch.utils.data import IterableDataset, TensorDataset\n"
        "def plain(): return TensorDataset(torch.zeros(64, 3), torch.arange(64))\n"
        "def none(): return 3\n"
        "class Endless(IterableDataset):\n"
        "    def __iter__(self): return iter(range(32))\n"
        "def endless(): return Endless()\n"
        "def empty(): return TensorDataset(torch.zeros(0, 3))\n"
        "def pairs(samples): return torch.stack([x for x, _ in samples])\n"
        "number = 3\n"
    )
    (tmp_path / "broken_data.py").write_text("import surely_not_there\n")
    monkeypatch.chdir(tmp_path)
    path = [*sys.path]
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("own_data", None)


def test_compare_runs_both_loaders_in_turns_over_a_torch_dataset(own_data):
    turns = []

    def in_process(contestant, settings):
        turns.append(contestant.name)
        return measure(contestant, settings)

    figures = compare(comparison("own_data:plain", workers=(0,), repeats=2), run=in_process)
    assert turns == ["dataflow, no workers", "torch, no workers"] * 2
    assert figures.dataset == "TensorDataset"
    assert "samples/s" in page_of(figures).verdict.text


def comparison(source, **settings):
    dataset = BenchDataset(source=[str(source)])
    return Comparison(**{"dataset": dataset, "batch_size": 8, "seconds": SECONDS, **settings})


def test_compare_over_shards_gives_torch_the_map_style_dataset(tars):
    found = compare(comparison(tars, workers=(0,), repeats=1, seconds=0.5), run=measure).to_json()
    found = json.loads(json.dumps(found))
    assert [one["name"] for one in found["contestants"]] == ["dataflow", "torch, no workers"]
    assert found["ratio"] > 0
    assert all(run["samples"] >= 8 for one in found["contestants"] for run in one["runs"])


def test_a_run_is_a_process_of_its_own(own_data):
    code, text = run(
        "compare", "own_data:plain", "--workers", 0, "--repeats", 1, *QUICK, "--collate", "own_data:pairs"
    )
    assert code == 0
    assert "own_data" in sys.modules  # imported because it was named
    assert "torch, no workers" in text


def compared(ours, theirs):
    runs = {
        Contestant("dataflow", 2): [LoaderRun(rate, 0.1, 1) for rate in ours],
        Contestant("torch", 2): [LoaderRun(rate, 0.1, 1) for rate in theirs],
    }
    turns = {one: iter(each) for one, each in runs.items()}
    asked = Comparison(dataset=BenchDataset(source=["own_data:plain"]), workers=(2,), repeats=len(ours))
    return compare(asked, run=lambda one, _: next(turns[one]))


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([100, 90, 110], [200, 210, 190], "torch is faster here, 2.00 x"),
        ([200, 210, 190], [100, 90, 110], "dataflow is faster here, 2.00 x"),
        ([100, 103, 97], [100, 102, 98], "no difference beyond 5%"),
    ],
)
def test_who_is_faster_is_said_plainly_from_the_medians(own_data, ours, theirs, said):
    found = compared(ours, theirs)
    assert found.ratio == pytest.approx(sorted(ours)[1] / sorted(theirs)[1])
    assert page_of(found).verdict.text.startswith(said)


def test_overlapping_runs_are_too_close_to_tell(own_data):
    assert "ranges of the single runs overlap" in page_of(compared([100, 160], [120, 110])).verdict.text
    assert "overlap" not in page_of(compared([100, 101], [120, 110])).verdict.text


def test_an_iterable_dataset_is_compared_unshuffled(own_data):
    asked = comparison("own_data:endless")
    assert measure(Contestant("torch", 0), asked).samples >= 8
    assert measure(Contestant("dataflow", 0), asked).samples >= 8


def test_a_mixture_and_an_empty_dataset_are_refused(tars, own_data):
    dataset = ShardedDataset(str(tars))
    with pytest.raises(ValueError, match="cannot read a Mixture"):
        contestants_over(Mixture({dataset: 1.0}), (0,))
    with pytest.raises(ValueError, match=r"no batch|num_samples"):
        measure(Contestant("dataflow", 0), comparison("own_data:empty"))


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(5, 2), 5),
        ({"x": torch.zeros(4), "y": [1]}, 4),
        ([torch.zeros(3), torch.zeros(3)], 3),
        (["a", "b"], 2),
        (torch.tensor(1), 1),
        (object(), 9),
    ],
)
def test_samples_of_a_batch_are_counted(batch, size):
    assert size_of(batch, 9) == size


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nowhere:make", ImportError, "there is no module 'nowhere' here"),
        ("own_data:absent", ValueError, "has no function 'absent'"),
        ("own_data:number", ValueError, "has no function 'number'"),
        ("own_data", ValueError, "package.module:name"),
        ("broken_data:make", ImportError, "surely_not_there"),
    ],
)
def test_a_name_that_is_no_function_is_an_error(own_data, name, error, message):
    with pytest.raises(error, match=message):
        named_function(name)


def test_a_function_that_makes_no_dataset_is_an_error(own_data):
    code, text = run("compare", "own_data:none")
    assert code == 1
    assert "own_data:none() gave a int, which is no dataset" in text


def test_a_file_of_that_name_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert BenchDataset(source=["a:b"]).function == "a:b"
    (tmp_path / "a:b").touch()
    assert BenchDataset(source=["a:b"]).function is None
    assert BenchDataset(source=["s3://bucket/x.tar"]).function is None
    assert BenchDataset(source=["a:b", "c:d"]).function is None


def test_help_teaches_by_examples():
    assert "dataflow bench compare SOURCE" in run("--help")[1]
    for command in ("storage", "loader", "compare"):
        code, text = run(command, "--help")
        assert code == 0
        assert f"dataflow bench {command} " in text
