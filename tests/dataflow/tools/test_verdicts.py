"""The verdicts of reports: what they say, what they advise, and yes or no, from figures that were made up."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from programs_kit import run_command

from dataflow.tools.terminal.report import ReportSummary
from dataflow.tools.verdicts.loading import comparison_verdict, loader_verdict
from dataflow.tools.verdicts.need import parse_need
from dataflow.tools.verdicts.plans import inspection_verdict, plan_verdict
from dataflow.tools.verdicts.storage import storage_verdict

# ---- what is asked for ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("16000/s", 16_000, "samples"),
        ("16,000 samples/s", 16_000, "samples"),
        ("2e3images/sec", 2_000, "samples"),
        ("2GB/s", 2e9, "bytes"),
        (" 1.5 GiB / s", 1.5 * 2**30, "bytes"),
        ("512B/s", 512, "bytes"),
    ],
)
def test_a_need_is_samples_or_bytes_a_second(text: str, amount: float, unit: str) -> None:
    need = parse_need(text)
    assert (need.amount, need.unit) == (amount, unit)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("16000", "without a time: write 16000/s"),
        ("2GB/h", "a rate for each 'h'"),
        ("5furlongs/s", "'furlongs' is no unit of samples or bytes"),
        ("10Gb/s", "a small b is bits, which are 1.25GB/s"),
        ("0/s", "must be more than 0"),
        ("-3GB/s", "must be more than 0"),
        ("fast", "must be samples a second, such as 16000/s, or bytes a second, such as 2GB/s, got 'fast'"),
        ("1.2.3/s", "must be samples a second"),
    ],
)
def test_what_is_no_rate_is_an_error_that_says_what_to_write(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"must be") as error:
        parse_need(text)
    assert said in str(error.value)


def test_a_need_is_told_in_both_units_where_the_size_of_a_sample_is_known() -> None:
    assert parse_need("100/s").to_json(50.0)["bytes_per_s"] == 5_000
    assert parse_need("5kB/s").to_json(50.0)["samples_per_s"] == 100
    assert parse_need("5kB/s").to_json(None)["samples_per_s"] is None


# ---- storage --------------------------------------------------------------------------------------------


def case(mb_per_s: float, in_flight: int = 4, **values: Any) -> dict[str, Any]:
    """A case of random reads of 2 MiB, of 2 s."""
    return {
        "case": {
            "pattern": values.pop("pattern", "random"),
            "block_bytes": 2 << 20,
            "concurrency": in_flight,
        },
        "reads": 1000,
        "seconds": 2.0,
        "mb_per_s": mb_per_s,
        "mb_per_s_over_time": [mb_per_s] * 20,
        "exhausted": False,
        "client_is_busy": False,
        "passes": 1.0,
        "label": {"word": "cold", "reason": "100% came from the device"},
        "faults": {"throttled": 0},
        **values,
    }


def storage(
    *cases: dict[str, Any], need: str = "", sample_bytes: float = 1e5, read: str = "direct"
) -> ReportSummary:
    figures = {
        "need": parse_need(need).to_json(sample_bytes) if need else None,
        "read": read,
        "seconds_a_case": 2.0,
        "cases": cases,
    }
    return storage_verdict(figures)


def test_a_store_that_gives_more_is_fast_enough_with_the_fewest_reads_in_flight_that_do() -> None:
    found = storage(case(900, 1), case(2000, 4), case(2100, 16), need="16000/s")
    assert (found.answer, found.margin) == ("yes", pytest.approx(1.25))
    assert found.text == (
        "Yes, this store is fast enough: random reads of 2 MiB, 4 in flight, give 2 GB/s, 1.25 times the "
        "1.6 GB/s that are needed (16,000 samples/s of 100 kB)."
    )
    assert found.advice.startswith("Read blocks of 2 MiB (dataflow index --block-bytes 2MiB), 4 in flight")
    assert "dataflow bench loader --need" in found.advice


def test_the_faster_block_size_and_a_rate_that_never_falls_below_the_need_are_chosen() -> None:
    small = case(1200, 1)
    small["case"]["block_bytes"] = 128 << 10
    assert "blocks of 2 MiB" in storage(small, case(1300, 1), need="1GB/s").advice
    steady = storage(case(1010, 1, **UNEVEN), case(1100, 4), need="1GB/s")
    assert (steady.answer, "4 in flight" in steady.text) == ("yes", True)


def test_a_store_that_gives_less_is_not() -> None:
    found = storage(case(790, 4), case(800, 16), need="1.6GB/s")
    assert (found.answer, found.margin) == ("no", 0.5)
    assert found.text.startswith("No, this store is not fast enough: random reads of 2 MiB, 16 in flight")
    assert "a faster disk" in found.advice
    remote = storage(case(790, 4), case(800, 16), need="1.6GB/s", read="store")
    assert "cache=" in remote.advice


def test_random_reads_decide_where_there_are_any() -> None:
    assert storage(case(5000, pattern="sequential"), case(500, 1), case(500), need="1GB/s").answer == "no"
    alone = storage(case(5000, pattern="sequential"), need="1GB/s")
    assert alone.answer == "yes"
    assert "nothing but sequential reads was measured" in alone.text


WARM = {"label": {"word": "warm", "reason": "0% of the bytes came from the device"}}
SLOWED = {"mb_per_s_over_time": [1500.0] * 10 + [300.0] * 10}
SLOWED_SOON = {"mb_per_s_over_time": [1500.0] * 5 + [300.0] * 15}
THROTTLED = {"faults": {"throttled": 7}}
UNEVEN = {"mb_per_s_over_time": [*[600.0] * 5, *[1400.0] * 5, *[1000.0] * 10]}


@pytest.mark.parametrize(
    ("cases", "need", "answer", "said", "advised"),
    [
        (
            [case(5000, seconds=0.3)],
            "1GB/s",
            "unknown",
            "0.3 s and 1,000 reads were measured",
            "--seconds 10",
        ),
        ([case(5000, reads=9)], "1GB/s", "unknown", "2 s and 9 reads were measured", "Measure longer"),
        ([case(10, 1), case(10, reads=9)], "1GB/s", "no", "0.01 times", "a faster disk"),
        ([case(5000, **WARM)], "1GB/s", "unknown", "page cache of this machine answered (0%", "direct reads"),
        ([case(500, 1), case(499, **WARM)], "1GB/s", "no", "0.5 times", "a faster disk"),
        ([case(1010, **UNEVEN)], "1GB/s", "unknown", "from 600 MB/s to 1.4 GB/s", "Measure longer"),
        ([case(900, **UNEVEN)], "1GB/s", "unknown", "from 600 MB/s to 1.4 GB/s", "Measure longer"),
        (
            [case(900, **SLOWED)],
            "500MB/s",
            "no",
            "300 MB/s at the end, after 1.5 GB/s at the begin",
            "--seconds 60",
        ),
        ([case(900, **SLOWED)], "200MB/s", "yes", "300 MB/s at the end", "Read blocks"),
        ([case(600, **SLOWED_SOON)], "500MB/s", "no", "300 MB/s at the end, after 1.5 GB/s", "--seconds 60"),
        ([case(500, **THROTTLED)], "1GB/s", "no", "it refused 7 requests (429, 503)", "prefixes"),
        (
            [case(500, client_is_busy=True)],
            "1GB/s",
            "unknown",
            "this client was the limit",
            "several processes",
        ),
        (
            [case(500)],
            "1GB/s",
            "unknown",
            "more reads in flight than were tried may give more",
            "--in-flight 8",
        ),
        (
            [case(100, 1), case(500, 16)],
            "1GB/s",
            "unknown",
            "more reads in flight than were tried may give more",
            "--in-flight 32",
        ),
    ],
)
def test_a_store_is_not_judged_beyond_what_was_measured(
    cases: list[dict[str, Any]], need: str, answer: str, said: str, advised: str
) -> None:
    found = storage(*cases, need=need)
    assert (found.answer, said in found.text, advised in found.advice) == (answer, True, True), found


def test_a_remote_store_that_is_asked_for_the_same_again_may_have_it_in_memory() -> None:
    assert "read 9 times, which a store may answer" in storage(case(5000, passes=9.0), read="store").text
    found = storage(case(5000, passes=9.0), need="1GB/s", read="store")
    assert (found.answer, "read 9 times" in found.text) == ("yes", True)
    assert "times, which" not in storage(case(5000, passes=9.0), need="1GB/s").text


def test_reads_that_end_after_the_asked_time_are_no_sign_of_a_store_that_slows_down() -> None:
    ending = case(1000, seconds=4.0, mb_per_s_over_time=[1500.0] * 10 + [500.0] * 10)
    assert "at the end" not in storage(ending, need="700MB/s").text


@pytest.mark.parametrize(
    ("cases", "said", "advised"),
    [
        (
            [case(980, 4), case(1000, 16)],
            "This store gives 1 GB/s by random reads of 2 MiB, 16",
            "4 in flight",
        ),
        ([case(500, 4), case(1000, 16)], "This store gives 1 GB/s", "--in-flight 32 --in-flight 64"),
        ([case(1000, seconds=0.1)], "Too short to tell what this store gives", "Measure longer"),
        (
            [case(1000, **WARM)],
            "What this store gives was not measured, as the page cache of this machine answered",
            "direct reads",
        ),
        ([case(1000, **SLOWED)], "300 MB/s by random reads of 2 MiB, 4 in flight at the end", "--seconds 60"),
        ([case(1000, **THROTTLED)], "This store gives", "larger blocks"),
        ([case(1000, client_is_busy=True)], "where this client was the limit", "several processes"),
    ],
)
def test_a_store_that_nothing_is_asked_of_is_described(
    cases: list[dict[str, Any]], said: str, advised: str
) -> None:
    found = storage(*cases)
    assert (found.answer, said in found.text, advised in found.advice) == (None, True, True), found


# ---- loader ---------------------------------------------------------------------------------------------


def rank(count: int = 100, by_quarter: tuple[float, ...] = (10, 10, 10, 10), from_disk: int = 100) -> Any:
    steps = {"count": count, "steps_per_s_by_quarter": list(by_quarter)}
    stats = {"workers": "thread", "build": {"threads": 2}}
    return {"steps": steps, "device_bytes": from_disk, "read_bytes": 100, "stats": stats}


def loading(need: str = "", ranks: Any = None, **values: Any) -> ReportSummary:
    """Loading 1,000 samples/s, with parts that reach 5,000 alone."""
    rates = {
        "loader": 1000,
        "storage": 5000,
        "decode": 5000,
        "compute": 9000,
        "more_memory": None,
        "cores_used": 0.9,
    }
    rates |= values.pop("rates", {})
    rate = {"usual": 10, "slowest": 9, "fastest": 11}
    figures = {
        "need": parse_need(need).to_json(1e5) if need else None,
        "asked": {"seconds": 5.0, "ranks": 1, "batch_size": 100, "compute_ms": 10},
        "machine": {"memory_bytes": 8e9},
        "memory_limit": 1e9,
        "stored_bytes": 1e9,
        "is_local": True,
        "rates_samples_per_s": rates,
        "bottleneck": {
            "predicted": 5000,
            "gains": dict.fromkeys(("compute", "storage", "decode", "memory", "epochs"), 1.0),
            "bound": "decode",
            "reason": "decoding reaches 1,000 samples/s",
            **values.pop("bottleneck", {}),
        },
        "headspace": {"gain": 2.0, "live": rate, "replayed": {**rate, "slowest": 18}},
        "phases": {"loader": ranks or [rank()], "training": ranks or [rank()]},
        **values,
    }
    return loader_verdict(figures)


def test_a_loader_that_reaches_the_rate_is_fast_enough() -> None:
    found = loading("500/s")
    assert (found.answer, found.margin) == ("yes", 2.0)
    assert found.text == (
        "Yes, loading is fast enough: loading alone reaches 1,000 samples/s with 2 building threads and 1 GB "
        "of memory a rank, 2 times the 500 that are needed."
    )
    assert "(25 MB/s, at 100 kB a sample)" in loading("25MB/s").text


CACHED = [rank(by_quarter=(40, 40, 40, 40), from_disk=0)]


@pytest.mark.parametrize(
    ("values", "answer", "said", "advised"),
    [
        ({"rates": {"decode": 1100}}, "no", "decoding from memory alone reaches 1,100", "more cores"),
        (
            {"rates": {"decode": 1100, "cores_used": 0.4}},
            "no",
            "decoding",
            "num_workers=), or cheaper samples: 40%",
        ),
        ({"rates": {"storage": 1100, "decode": 1100}}, "no", "alone reaches 1,100 and", "and more cores"),
        ({"rates": {"loader": 400, "decode": 400}, "ranks": [rank(9)]}, "no", "decoding", "more cores"),
        ({"rates": {"storage": 1100}}, "no", "reading the blocks alone reaches 1,100", "a faster store"),
        (
            {"rates": {"more_memory": 3000}},
            "no",
            "four times the memory limit it reaches 3,000",
            "memory_limit=",
        ),
        ({}, "no", "reading alone reaches 5,000, decoding from memory 5,000", "more cores"),
        (
            {"bottleneck": {"bound": "epochs", "reason": ""}},
            "unknown",
            "borders of short epochs",
            "more data",
        ),
        ({"ranks": [rank(count=9)]}, "unknown", "5 s and 9 batches a rank were measured", "Measure longer"),
        ({"ranks": [rank(by_quarter=(5, 5, 25, 5))]}, "unknown", "gave from 500 to 2,500", "Measure longer"),
        (
            {"rates": {"loader": 4000}, "ranks": CACHED},
            "yes",
            "from this machine's memory",
            "Keep 1 GB of memory",
        ),
        (
            {"rates": {"loader": 4000}, "ranks": CACHED, "stored_bytes": 1e12},
            "unknown",
            "from this machine's memory",
            "dropping the page cache",
        ),
        (
            {"rates": {"compute": 500}},
            "no",
            "0.5 times",
            "steps of 10 ms allow only 500 samples/s, as the needed rate leaves 50 ms",
        ),
    ],
)
def test_a_loader_is_judged_by_what_holds_it_up_and_not_beyond_what_was_measured(
    values: dict[str, Any], answer: str, said: str, advised: str
) -> None:
    found = loading("2000/s", **values)
    assert (found.answer, said in found.text, advised in found.advice) == (answer, True, True), found


@pytest.mark.parametrize(
    ("values", "said", "advised"),
    [
        ({}, "2.00x faster with a perfect loader; decode-bound: decoding reaches", "more cores"),
        (
            {"ranks": [rank(count=3)]},
            "Too short to tell what holds this training up: 5 s and 3 batches",
            "longer",
        ),
        ({"ranks": CACHED}, "the data came from this machine's memory, not from its disk", "more cores"),
        (
            {
                "headspace": {"gain": 1.01, "live": {"usual": 10}, "replayed": {"slowest": 9}},
                "bottleneck": {"bound": "compute", "reason": "computing allows 1,000 samples/s"},
            },
            "Nothing is to be gained by a faster loader: 1.01x with a perfect one; compute-bound",
            "Leave the loader as it is",
        ),
        (
            {"headspace": {"gain": 1.2, "live": {"usual": 10}, "replayed": {"slowest": 9}}},
            "Rounds of steps differ by more than a perfect loader would gain (1.20x)",
            "on an idle machine",
        ),
    ],
)
def test_what_holds_a_training_up_is_the_verdict_where_nothing_is_asked(
    values: dict[str, Any], said: str, advised: str
) -> None:
    found = loading(**values)
    assert (found.answer, said in found.text, advised in found.advice) == (None, True, True), found


# ---- compare --------------------------------------------------------------------------------------------


def compared(
    ours: list[float], theirs: list[float], workers: int | None = 2, seconds: float = 3.0
) -> ReportSummary:
    contestants = [
        {
            "name": whose,
            "whose": whose,
            "workers": workers if whose == "dataflow" else 4,
            "median_samples_per_s": float(np.median(rates)),
            "runs": [{"samples_per_s": rate} for rate in rates],
        }
        for whose, rates in (("dataflow", ours), ("torch", theirs))
    ]
    asked = {"repeats": len(ours), "seconds": seconds}
    return comparison_verdict({"asked": asked, "contestants": contestants})


@pytest.mark.parametrize(
    ("found", "said", "advised"),
    [
        (
            compared([200, 210], [100, 90]),
            "dataflow is faster here, 2.16 x",
            "DataLoader(..., num_workers=2)",
        ),
        (compared([200, 210], [100, 90], None), "dataflow is faster", "leave num_workers out"),
        (compared([100, 90], [200, 210]), "torch is faster here, 2.16 x", "Keep torch's loader"),
        (compared([100, 101], [100, 102]), "no difference beyond 5%", "speed does not decide"),
        (compared([100, 160], [110, 120]), "Too close to tell, as the ranges", "on an idle machine"),
        (compared([200], [100]), "By one run each, dataflow is faster", "--repeats 3"),
        (compared([200, 210], [100, 90], seconds=0.1), "Too short to tell (0.1 s a run)", "--seconds 3"),
    ],
)
def test_the_faster_loader_is_named_if_the_runs_tell(found: ReportSummary, said: str, advised: str) -> None:
    assert (said in found.text, advised in found.advice) == (True, True), found


# ---- inspect and plan -----------------------------------------------------------------------------------


def inspected(kind: str = "window", **plan: Any) -> ReportSummary:
    sides = {
        "blocks_per_batch": 60.0,
        "label_dispersion": None,
        "amplification": 1.0,
        "hot_spots": {"prefix": {"ratio": 1.0, "most": 10, "ahead": 10, "name": "data"}},
        "cache_bytes": 1e9,
        "requests_per_1000_samples": 3.0,
    }
    figures = {
        "asked": {
            "batch_size": 64,
            "kind": kind,
            "window_blocks": None,
            "canonical_nodes": None,
            "exchange": 1.0,
        },
        "dataset": {"blocks": 1000},
        "topology": {"world_size": 1, "num_nodes": 2},
        "shuffle": {"kind": kind},
        "measured_batches": [10, 20, 20],
        "plan": {**sides, **plan},
        "full": {**sides, "blocks_per_batch": 62.0, "requests_per_1000_samples": 1000.0},
    }
    return inspection_verdict(figures)


HOT = {"prefix": {"ratio": 4.0, "most": 40, "ahead": 100, "name": "bucket/a"}}


@pytest.mark.parametrize(
    ("found", "said", "advised"),
    [
        (
            inspected(),
            "mixes about as a full shuffle does, in 10 of 20 batches: a batch has 60.0 blocks, a full "
            "shuffle's 62.0; 1,000 samples take 3 reads and 1.00 times the data, in a full shuffle 1,000.",
            "DataLoader(dataset, 64, shuffle=True)",
        ),
        (inspected("full"), "mixes about", "if the store keeps up with a read a sample"),
        (inspected("blocks"), "mixes about", "DataLoader(dataset, 64, Shuffle('blocks'))"),
        (inspected(blocks_per_batch=8.0), "mixes less than a full shuffle", "--label COLUMN"),
        (inspected("blocks", blocks_per_batch=8.0), "mixes less than a full shuffle", "--shuffle window"),
        (
            inspected("none", label_dispersion=0.1),
            "Every epoch has the same order",
            "Train with shuffle=True",
        ),
        (
            inspected(blocks_per_batch=8.0, label_dispersion=1.1),
            "Labels are mixed about as by",
            "shuffle=True",
        ),
        (inspected(label_dispersion=20.0), "Labels come in runs", "--window-blocks"),
        (inspected(amplification=1.5), "and 1.50 times the data", "--canonical-nodes 2"),
        (inspected("full", amplification=30.0), "and 30.00 times the data", "a cache of 1 GB"),
        (inspected(hot_spots=HOT), "mixes about", "bucket/a gets 4.0 times its share"),
    ],
)
def test_an_order_is_judged_by_its_mixing_and_then_by_its_reads(
    found: ReportSummary, said: str, advised: str
) -> None:
    assert (said in found.text, advised in found.advice) == (True, True), found


def planned(doubts: tuple[str, ...] = (), **best: Any) -> ReportSummary:
    step = {
        "algorithm": "ring",
        "accumulate": 3,
        "window_s": 1.0,
        "compute_s": 0.95,
        "exposed_s": 0.05,
        "data_wait_s": 0.0,
        "data_bytes_per_s": 1e9,
        "samples_per_s": 1257.0,
        "batch": 768,
    }
    figures = {
        "asked": {"nodes": 4, "ranks_per_node": 8},
        "plan": {"best": {**step, **best}, "doubts": doubts},
    }
    return plan_verdict(figures)


@pytest.mark.parametrize(
    ("found", "said", "advised"),
    [
        (
            planned(),
            "Predicted, not measured: 32 ranks take 1,257 samples/s and compute 95% of the time",
            "Accumulate 3 microbatches (a batch of 768) and reduce by 'ring'.",
        ),
        (planned(exposed_s=0.4), "40% is waiting for gradients", "--gradient-bits"),
        (planned(data_wait_s=0.3), "30% is waiting for data", "1 GB/s a node"),
        (
            planned(("Unusable: it has too many. Fewer ranks help.",)),
            "with a batch that is of no use: it has too many.",
            "Fewer ranks help.",
        ),
    ],
)
def test_a_plan_says_that_it_is_a_prediction(found: ReportSummary, said: str, advised: str) -> None:
    assert (said in found.text, advised in found.advice) == (True, True), found


# ---- the commands ---------------------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Files of 256 KiB, and their catalog of 2,048 samples of 128 bytes."""
    for name in "ab":
        np.arange(1 << 16, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    monkeypatch.chdir(tmp_path)
    made = ("index", "a.bin", "b.bin", "--dtype", "uint16", "--length", 64, "--output", "t.catalog")
    assert run_command(*made)[0] == 0
    return tmp_path


QUICK = ("--read", "buffered", "--in-flight", 1, "--seconds", 0.02)
STORAGE = ("bench", "storage", "t.catalog", *QUICK)
COMPARE = ("bench", "compare", "t.catalog", "--workers", 0, "--repeats", 1, "--seconds", 0.02)
PLAN = ("plan", "--nodes", 4, "--parameters", "25M", "--microbatch-ms", 10, "--accumulate", "1,2")


@pytest.mark.usefixtures("own_cache")
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("judge", "arguments", "columns", "rows"),
    [
        (storage_verdict, (*STORAGE, "--need", "16000/s"), "pattern,block_bytes,in_flight,seconds", 4),
        (comparison_verdict, COMPARE, "loader,workers,run,samples_per_s", 2),
        (inspection_verdict, ("inspect", "t.catalog"), "order,blocks_per_batch", 2),
        (plan_verdict, PLAN, "kind,name,window_s", 9),
    ],
)
def test_each_report_begins_with_its_verdict_and_is_written_as_json_csv_and_picture(
    tokens: Any, judge: Any, arguments: Any, columns: str, rows: int
) -> None:
    code, text = run_command(*arguments, "--json", "r.json", "--csv", "r.csv", "--plot", "r.png")
    assert code == 0, text
    figures = json.loads((tokens / "r.json").read_text())
    found = judge(figures)
    assert found.to_json().items() <= figures.items()
    assert " ".join(text.split()).startswith(f"{found.text} Next: {found.advice}")
    lines = (tokens / "r.csv").read_text().splitlines()
    assert (lines[0].startswith(columns), len(lines)) == (True, rows + 1)
    assert {line.count(",") for line in lines if '"' not in line} == {lines[0].count(",")}
    assert (tokens / "r.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("a.bin", "--need", "100/s"), 1, "counts samples, and what one takes is not known"),
        (("a.bin", "--need", "100/s"), 1, "Give --sample-bytes, a catalog as SOURCE, or the need in bytes"),
        (("t.catalog", "--need", "100/s", "--columns", "y"), 1, "column 'y' does not exist"),
        (("a.bin", "--need", "100/min"), 2, "a rate for each 'min'"),
        (("a.bin", "--sample-bytes", "1kB"), 2, "give it, such as --need 16000/s"),
        (("a.bin", "--strict"), 2, "give a rate, such as --need 16000/s"),
        (("a.bin", "--json", "-", "--csv", "-"), 2, "cannot share standard output"),
        (
            ("a.bin", "--need", "9/s", "--sample-bytes", "1kB", "--strict", "--pattern", "random", *QUICK),
            1,
            "cannot be said",
        ),
    ],
)
def test_a_question_that_cannot_be_answered_says_what_to_give(
    tokens: Any, arguments: Any, code: int, said: str
) -> None:
    found, text = run_command("bench", "storage", *arguments)
    assert found == code
    assert said in " ".join(text.split())
