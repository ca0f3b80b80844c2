"""The data path of the convergence experiment: what each order delivers, and what is concluded from runs."""

import numpy as np
import pytest

from benchmarks.order.convergence import ARMS, Setup, batches, make_task, summary, table, train

SETUP = Setup(samples_per_block=4, blocks_per_shard=3, window_blocks=5, batch_size=8, epochs=2)


def tiny_digits():
    """120 images that carry their number, of 10 labels in turn."""
    images = np.zeros((120, 64), np.uint8)
    images[:, 0] = np.arange(120)
    labels = np.arange(120) % 10
    return images, labels, images[:20], labels[:20]


@pytest.fixture
def task(tmp_path):
    return make_task(tmp_path / "data", SETUP, tiny_digits)


def epochs_of(task, arm, seed=0):
    """The images' numbers, epoch by epoch."""
    numbers = [x[:, 0].tolist() for x, _ in batches(task, arm, seed)]
    half = len(numbers) // 2
    return [[n for batch in part for n in batch] for part in (numbers[:half], numbers[half:])]


def test_shards_are_sorted_by_label_and_cut_into_blocks(task):
    assert task.by_block.catalog.num_shards == task.by_shard.catalog.num_blocks == 10
    assert task.by_block.catalog.num_blocks == 30
    labels = [int(task.by_block[i]["cls"]) for i in range(120)]
    assert labels == sorted(labels)


@pytest.mark.parametrize("arm", ARMS)
def test_every_order_delivers_every_image_once_an_epoch_in_equal_steps(task, arm):
    first, second = epochs_of(task, arm)
    assert sorted(first) == sorted(second) == list(range(120))
    assert first != second
    assert first != epochs_of(task, arm, seed=1)[0]
    assert first == epochs_of(task, arm)[0]


def test_orders_are_what_they_are_called(task):
    def shards_open(arm):
        """Most shards between whose first and last sample a position lies."""
        shards = np.array(epochs_of(task, arm)[0]) % 10
        places = [np.flatnonzero(shards == shard) for shard in range(10)]
        return max(sum(p[0] <= at <= p[-1] for p in places) for at in range(120))

    assert shards_open("shard") == 1
    assert shards_open("full") == 10
    assert 2 <= shards_open("buffer 2") < 10
    assert shards_open("default") >= 2


@pytest.mark.full
def test_a_run_trains_and_says_how_it_ended(task):
    run = train(task, "default", 0)
    assert run["steps"] == 30
    assert np.isfinite(run["loss"])
    assert 0 <= run["accuracy"] <= 1
    assert run == train(task, "default", 0)


def test_arms_are_compared_seed_by_seed():
    pytest.importorskip("scipy")
    runs = []
    for seed in range(8):
        noise = seed / 10
        for arm, off in (("full", 0.0), ("default", (-1) ** seed * 0.01), ("shard", 1.0 + noise / 100)):
            runs.append({"arm": arm, "seed": seed, "loss": noise + off, "accuracy": 0.5})
    found = {row["arm"]: row for row in summary(runs)}
    assert found["default"]["loss"]["within_noise"]
    assert found["default"]["loss"]["half_interval"] == pytest.approx(
        0.01 * 1.069 * 2.3646 / 8**0.5, rel=1e-3
    )
    assert not found["shard"]["loss"]["within_noise"]
    assert found["shard"]["loss"]["difference"] == pytest.approx(1.0035)
    assert "| shard | 1.3535 | +1.0035" in table(list(found.values()))
