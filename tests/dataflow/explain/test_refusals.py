"""What cannot be told of a step is refused, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets_kit import Made, edited, make_ints_tar, make_parquet, make_tokens_bin, rank

from dataflow import DataLoader, Mixture, Packed, ShardedDataset, Shuffle, provenance
from dataflow.explain.provenance import notes_of
from dataflow.state_checksum import checked_fields, with_checksum


@pytest.fixture(scope="module")
def ints(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_ints_tar(tmp_path_factory.mktemp("ints"))


def state_after(dataset: Any, steps: int, **options: Any) -> dict[str, Any]:
    with DataLoader(dataset, 4, num_workers=0, **options) as loader:
        for _, _ in zip(range(steps), loader, strict=False):
            pass
        return loader.state_dict()


def of_before(state: dict[str, Any]) -> dict[str, Any]:
    """The same state, of a release that did not tell where steps were."""
    return with_checksum({k: v for k, v in checked_fields(state).items() if k != "history"})


def test_a_step_that_was_not_taken_is_not_known(ints: Made) -> None:
    state, dataset = state_after(ints.open(), 3), ints.open()
    with pytest.raises(IndexError, match="step 3 is not known: of 3 steps, steps 0 to 2 are"):
        provenance(state, dataset, 3)
    with pytest.raises(IndexError, match=r"rank must be in \[0, 1\) in step 2, got 1"):
        provenance(state, dataset, 2, rank=1)
    with pytest.raises(ValueError, match="steps must be numbers >= 0"):
        provenance(state, dataset, [-1])
    with pytest.raises(TypeError, match="float"):
        provenance(state, dataset, 1.5)  # type: ignore[arg-type]


def test_a_state_of_before_answers_for_a_position(ints: Made) -> None:
    dataset = ints.open()
    state = state_after(dataset, 3, shuffle=Shuffle("window", 2), seed=7)
    old, step = of_before(state), provenance(state, dataset, 2)
    with pytest.raises(ValueError, match=r"before states told .* epoch=, position= and global_batch="):
        provenance(old, dataset, 2)
    told = provenance(old, dataset, epoch=0, position=8, global_batch=4)
    assert told.drop_columns("step").equals(step.drop_columns("step"))
    with pytest.raises(ValueError, match=r"has no complete batch of 4: .* say tail="):
        provenance(old, dataset, epoch=0, position=44, global_batch=4)
    assert provenance(old, dataset, epoch=0, position=44, global_batch=4, tail="uneven").num_rows == 3
    assert provenance(old, dataset, epoch=0, position=44, global_batch=4, tail="pad").num_rows == 4
    with pytest.raises(ValueError, match="not both"):
        provenance(old, dataset, 1, epoch=0, position=0, global_batch=4)
    with pytest.raises(ValueError, match="all of epoch="):
        provenance(old, dataset, epoch=0)
    with pytest.raises(ValueError, match="multiple of world_size"):
        provenance(old, dataset, epoch=0, position=0, global_batch=4, world_size=3)
    with DataLoader(dataset, 4) as loader:
        loader.load_state_dict(old)
        assert loader.state_dict()["history"] is None
        with pytest.raises(ValueError, match="before states told"):
            loader.provenance(0)


def test_a_state_of_other_data_is_refused(ints: Made, tmp_path: Path) -> None:
    other = make_parquet(tmp_path).open()
    inside, between = state_after(ints.open(), 3), state_after(ints.open(), 100)
    with pytest.raises(ValueError, match="of epoch 0 are other ones here"):
        provenance(inside, other, 0)
    with pytest.raises(ValueError, match="the state is of other data"):
        provenance(between, other, 0)
    with pytest.raises(ValueError, match="checksum"):
        provenance({**inside, "seed": 9}, ints.open(), 0)
    with pytest.raises(ValueError, match="history must be the text"):
        provenance(edited(inside, history="[[1],2]"), ints.open(), 0)


def test_steps_before_data_changed_are_not_known_behind_it(ints: Made, tmp_path: Path) -> None:
    other = make_parquet(tmp_path).open()
    with DataLoader(other, 4, num_workers=0) as loader:
        loader.load_state_dict(state_after(ints.open(), 100))
        next(iter(loader))
        assert loader.provenance(12).num_rows == 4
        with pytest.raises(IndexError, match="step 11 is not known: of 13 steps, steps 12 to 12 are"):
            loader.provenance(11)


def test_loaders_over_other_datasets_are_not_explained() -> None:
    with DataLoader([1, 2, 3], 2) as loader:
        with pytest.raises(TypeError, match="only loaders over a ShardedDataset or a Mixture are explained"):
            loader.provenance(0)
        with pytest.raises(TypeError, match="only loaders over a ShardedDataset or a Mixture are explained"):
            loader.batch_at(0)
        with pytest.raises(TypeError, match="this is a list"):
            provenance(loader.state_dict(), [1, 2, 3], 0)  # type: ignore[arg-type]


def test_lengths_that_only_the_run_has_measured_are_refused(tmp_path: Path) -> None:
    def doubled(sample: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": sample["tokens"].repeat(2)}

    def noisy(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
        return {"tokens": sample["tokens"][: rng.integers(1, 4)]}

    made = make_tokens_bin(tmp_path)
    for transform, words in (
        (doubled, "not known here: they were measured"),
        (noisy, "measured .* with rng"),
    ):
        batching = Packed(16, "tokens", window=8)
        dataset = made.open(transform=transform)
        with DataLoader(dataset, 2, batching=batching, num_workers=0) as loader:
            next(iter(loader))
            with pytest.raises(ValueError, match=words):
                loader.provenance(0)
            with pytest.raises(ValueError, match=words):
                loader.batch_at(0)
            state = loader.state_dict()
        with pytest.raises(ValueError, match=words):
            provenance(state, dataset, 0, batching=batching)
        with pytest.raises(ValueError, match="give the same, batching="):
            provenance(state, dataset, 0)
    with pytest.raises(ValueError, match="without batching=: leave it out"):
        provenance(state_after(made.open(), 1), made.open(), 0, batching=batching)


def test_a_mixture_that_another_one_went_over_into_is_told_from_there_on(ints: Made) -> None:
    a, b = ints.open().take(20), ints.open().skip(20)
    before = state_after(Mixture({a: 1, b: 3}), 100, seed=3)
    with DataLoader(Mixture({a: 3, b: 1}), 4, num_workers=0, seed=3) as loader:
        loader.load_state_dict(before)
        known = loader._stream.taken[1].num_steps  # type: ignore[union-attr]
        for _ in range(2):
            for _ in loader:
                pass
        state = loader.state_dict()
    with DataLoader(Mixture({a: 3, b: 1}), 4, num_workers=0) as again:
        again.load_state_dict(state)
        with pytest.raises(IndexError, match=f"step {known - 1} is not known"):
            again.provenance(known - 1)
        with pytest.raises(ValueError, match="went on as this one in an epoch before"):
            again.provenance(known)
        next(iter(again))
        assert again.provenance(again._stream.taken[1].num_steps - 1).num_rows == 4  # type: ignore[union-attr]


def test_samples_that_on_error_may_leave_out_are_said_to_be_listed(ints: Made) -> None:
    dataset = ints.open(on_error="skip")
    with DataLoader(dataset, 4, num_workers=0) as loader:
        next(iter(loader))
        assert "on_error= may have left samples out" in notes_of(loader.provenance(0))[0]
    with DataLoader(ints.open(), 4, num_workers=0) as loader:
        next(iter(loader))
        assert notes_of(loader.provenance(0)) == []


def test_a_shard_that_is_gone_leaves_positions_and_says_so(tmp_path: Path) -> None:
    made = make_ints_tar(tmp_path)
    dataset = made.open()
    state = state_after(dataset, 3)
    whole = provenance(state, dataset, range(3))
    made.shards[0].unlink()
    table = provenance(state, dataset, range(3))
    assert table.drop_columns("key").equals(whole.drop_columns("key"))
    assert None in table["key"].to_pylist()
    assert "keys that could not be read" in notes_of(table)[0]
    assert "no such file" in notes_of(table)[0]


def test_a_batch_again_is_for_a_rank_that_there_was(ints: Made) -> None:
    with DataLoader(ints.open(), 2, topology=rank(1, 2), tail="uneven", num_workers=0) as loader:
        batches = [*loader]
        last = len(batches) - 1
        assert loader.batch_at(0)["cls"].tolist() == batches[0]["cls"].tolist()
        assert len(loader.batch_at(0, rank=0, world_size=1)["cls"]) == 4
        with pytest.raises(IndexError, match=r"rank must be in \[0, 2\)"):
            loader.batch_at(0, rank=2)
        with pytest.raises(ValueError, match="not shared out evenly by world_size=3"):
            loader.batch_at(0, rank=0, world_size=3)
        with pytest.raises(ValueError, match="4 ranks share out step 0, and here are 2: say which, rank="):
            loader.batch_at(0, world_size=4)
        assert loader.batch_at(last)["cls"].tolist() == batches[-1]["cls"].tolist()


def test_a_dataset_is_opened_again_for_a_table(tmp_path: Path) -> None:
    made = make_parquet(tmp_path)
    state = state_after(made.open(), 5, shuffle=True, seed=11)
    again = ShardedDataset(**made.kwargs)
    assert provenance(state, again, range(5), rank=0)["step"].to_pylist() == [n // 4 for n in range(20)]
