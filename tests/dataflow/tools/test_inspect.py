"""`dataflow inspect`, run in this process by click's runner."""

import json
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from programs_kit import run_command

from dataflow import DataLoader, ShardedDataset, ShardWriter, Shuffle
from dataflow.tools.inspect.command import inspect_dataset
from dataflow.tools.inspect.settings import InspectSettings

pytestmark = pytest.mark.usefixtures("own_cache")


run = partial(run_command, "inspect")


def figures(*arguments):
    code, text = run(*arguments, "--json", "-")
    assert code == 0, text
    return json.loads(text)


@pytest.fixture
def parquet(tmp_path):
    """4 shards of 8 row groups of 10 rows, sorted by label; values that would not survive being read."""
    folder = tmp_path / "parquet"
    folder.mkdir()
    for shard in range(4):
        rows = np.arange(80) + 80 * shard
        table = pa.table({"x": rows.astype(np.float32), "label": rows // 32, "name": [f"n{r}" for r in rows]})
        pq.write_table(table, folder / f"{shard}.parquet", row_group_size=10)
    return folder


@pytest.fixture
def tar(tmp_path):
    with ShardWriter(str(tmp_path / "tar-%02d.tar"), max_count=20) as writer:
        for i in range(80):
            writer.write({"__key__": f"{i:03d}", "bin": bytes(64), "cls": i // 20})
    return tmp_path / "tar-*.tar"


def test_figures_are_those_of_the_batches_that_a_loader_delivers(parquet):
    dataset = ShardedDataset(parquet)
    found = figures(parquet, "--batch-size", 16, "--window-blocks", 4, "--label", "label", "--seed", 3)
    with DataLoader(dataset, 16, Shuffle(window_blocks=4), seed=3) as loader:
        delivered = [(batch["x"].numpy().astype(int), batch["label"].numpy()) for batch in loader]
    blocks = [len(set((x // 10).tolist())) for x, _ in delivered]
    labels = [len(set(label.tolist())) for _, label in delivered]
    assert found["plan"]["blocks_per_batch"] == pytest.approx(np.mean(blocks))
    assert found["plan"]["labels_per_batch"] == pytest.approx(np.mean(labels))
    samples = np.concatenate([x for x, _ in delivered])
    distance = np.abs(np.diff(samples)) / 320
    assert found["plan"]["neighbour_distance_median"] == pytest.approx(np.median(distance))


def test_the_loader_reads_what_inspect_says(tar):
    """Whole blocks, once: amplification 1."""
    found = figures(tar, "--batch-size", 8)
    assert found["plan"]["amplification"] == pytest.approx(1)
    dataset = ShardedDataset(tar)
    assert found["plan"]["cache_bytes"] == int(dataset.catalog.blocks.length.sum())
    assert found["plan"]["first_batch_bytes"] == found["plan"]["cache_bytes"]


def test_no_data_is_read_without_a_label(parquet):
    """Only the catalog: the shards may be gone once it is there."""
    dataset = ShardedDataset(parquet)
    for shard in parquet.iterdir():
        shard.unlink()
    found = inspect_dataset(dataset, InspectSettings(batch_size=16))
    assert found.labels_from == "not read; --label label reads them"
    assert found.plan.figures.label_correlation is None


def test_labels_of_a_tar_are_read_when_asked_for(tar):
    found = figures(tar, "--shuffle", "none", "--batch-size", 20, "--label", "cls")
    assert found["plan"]["label_dispersion"] == pytest.approx(20)
    assert found["plan"]["labels_per_batch"] == 1
    assert "not read; --label cls reads them" in run(tar)[1]


@pytest.mark.parametrize("column", ["x", "name"])
def test_labels_may_be_numbers_or_text(parquet, column):
    found = figures(parquet, "--shuffle", "none", "--label", column)["plan"]
    assert (found["label_dispersion"] is None) == (column == "x")
    assert found["label_correlation"] > 0.9 if column == "x" else found["label_correlation"] < 0.1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--label", "nothing"), "there is no column 'nothing'; there are x, label, name"),
        (("--ranks", "4", "--nodes", "3"), "num_nodes must be >= 1 and divide world_size=4, got 3"),
        (("--shuffle", "full", "--window-blocks", "3"), "a full shuffle has no windows"),
        (("--plot", "plan.gif"), "a picture must end in .png or .svg or .html, got 'plan.gif'"),
        (("--plot", "-"), "a picture must end in .png or .svg or .html, got '-'"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(parquet, arguments, says):
    code, text = run(parquet, *arguments)
    assert code == 1
    assert says in " ".join(text.split())


def test_labels_must_be_one_value_a_sample(tar):
    code, text = run(tar, "--label", "bin")
    assert code == 1
    assert "labels must be one number or text a sample" in text


def test_a_node_reads_the_blocks_of_its_ranks_once(parquet):
    one = figures(parquet, "--ranks", 4, "--nodes", 1, "--batch-size", 4, "--window-blocks", 8)
    four = figures(parquet, "--ranks", 4, "--nodes", 4, "--batch-size", 4, "--window-blocks", 8)
    assert one["plan"]["amplification"] == pytest.approx(1)
    assert four["plan"]["amplification"] == pytest.approx(1)  # four lanes each for two, and eight at most
    none = figures(parquet, "--nodes", 4, "--batch-size", 4, "--canonical-nodes", 1)
    assert 2 < none["plan"]["amplification"] <= 4
    assert four["plan"]["hot_spots"]["host"]["name"] == "this machine"


def test_eight_nodes_read_each_block_once_by_default(tmp_path):
    table = pa.table({"x": np.arange(20_000)})
    pq.write_table(table, tmp_path / "even.parquet", row_group_size=50)
    for options, says in (
        ((), "1.00"),
        (("--ranks", 64), "1.00"),
        (("--canonical-nodes", 1), "8.00"),
        (("--exchange", 0.1), "1.00"),
    ):
        code, text = run(tmp_path / "even.parquet", "--nodes", 8, "--batch-size", 8, *options)
        assert code == 0
        assert f"amplification of reads {says} " in text
    assert "8 lanes; 10% of the blocks dealt anew each epoch" in text
    assert "topology 8 equal nodes of 1 ranks, numbered node by node (assumed)" in text


def test_ranks_that_share_a_lane_each_read_it(parquet):
    found = figures(parquet, "--nodes", 2, "--ranks", 8, "--batch-size", 4, "--canonical-nodes", 2)["plan"]
    assert found["amplification"] == 1
    assert found["rank_amplification"] == 4


def test_a_long_epoch_is_sampled_and_that_is_said(parquet):
    code, text = run(parquet, "--batch-size", 16, "--max-samples", 64)
    assert code == 0
    assert "a sample: batches 8 to 12 of 20" in text


def test_the_window_chosen_is_the_loaders_and_tells_why(parquet):
    found = figures(parquet, "--memory-limit", "8KiB")
    with DataLoader(ShardedDataset(parquet), 1, True, memory_limit=8 << 10) as loader:
        assert found["shuffle"]["window_blocks"] == loader.shuffle.window_blocks
        assert found["shuffle"]["reason"] == loader.window_reason == loader.stats().window_reason
    assert "a quarter of memory_limit (8.0 KiB)" in found["shuffle"]["reason"]
    everything = figures(parquet)["shuffle"]
    assert everything["window_blocks"] == 32
    assert "the whole dataset fits into one window" in everything["reason"]


def test_json_goes_to_a_file_beside_the_table(parquet, tmp_path):
    code, text = run(parquet, "--json", tmp_path / "out.json")
    assert code == 0
    assert "full shuffle" in text
    found = json.loads((tmp_path / "out.json").read_text())
    figures = {"dataset", "asked", "topology", "shuffle", "measured_batches", "plan", "full"}
    assert set(found) == {"verdict", "advice", *figures}
    assert found["plan"]["hot_spots"]["shard"]["name"].endswith(".parquet")


def test_pictures_are_a_png_or_one_page_without_links(parquet, tmp_path):
    pytest.importorskip("matplotlib")
    assert run(parquet, "--plot", tmp_path / "plan.png")[0] == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert run(parquet, "--plot", tmp_path / "plan.html")[0] == 0
    page = (tmp_path / "plan.html").read_text()
    assert "<svg" in page
    assert "distinct shards a batch" in page
    assert not [tag for tag in ("<script", "<link", "<img", "@import") if tag in page]


def test_without_matplotlib_the_error_names_the_extra(parquet, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    code, text = run(parquet, "--plot", "plan.png")
    assert code == 1
    assert "pip install 'dataflow-loader[plot]'" in text


def test_help_teaches_by_examples():
    code, text = run("--help")
    assert code == 0
    assert "dataflow inspect train.catalog --shuffle blocks --label cls" in text


def test_small_windows_are_told_and_drawn_where_they_are_and_nowhere_else(parquet):
    asked = ("--memory-limit", 4 * 16 * 560, "--batch-size", 8)
    ramped, later, whole = (figures(parquet, *more) for more in (asked, (*asked, "--epoch", 1), ()))
    for found in (ramped, later):
        assert found["shuffle"]["reason"].endswith("; epoch 0 begins with 8, 16")
    assert ramped["plan"]["first_batch_bytes"] < later["plan"]["first_batch_bytes"]
    assert whole["shuffle"]["reason"].endswith("the whole dataset fits into one window")
    assert whole["plan"]["first_batch_bytes"] > 1.5 * later["plan"]["first_batch_bytes"]
