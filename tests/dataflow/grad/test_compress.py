"""Lossy codes as pure functions: they lose less than they are given, and error feedback loses nothing."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from dataflow.grad.strategies.lossy import LossyStrategy, TopK, dequantized, quantized, top_k

floats = st.floats(-1e6, 1e6, width=32)
vectors = st.lists(floats, min_size=1, max_size=64).map(lambda v: torch.tensor(v, dtype=torch.float64))
whole_vectors = st.lists(
    st.lists(st.integers(-(2**20), 2**20), min_size=12, max_size=12), min_size=1, max_size=8
)


def energy(x):
    return float(x.square().sum())


@given(vectors, st.data())
def test_the_largest_entries_hold_at_least_their_share(x, data):
    k = data.draw(st.integers(1, len(x)))
    indices, values = top_k(x, k)
    rest = x.index_fill(0, indices.long(), 0)
    assert len(set(indices.tolist())) == k
    assert torch.equal(values, x[indices.long()])
    assert energy(rest) <= (1 - k / len(x)) * energy(x) * (1 + 1e-12)


@given(vectors)
def test_eight_bits_lose_less_than_a_254th_of_the_largest_entry(x):
    blocks = torch.nn.functional.pad(x, (0, -len(x) % 8)).view(-1, 8)
    lost = blocks - dequantized(quantized(blocks), torch.float64)
    largest = blocks.abs().amax(1, keepdim=True)
    # Scales are float32: below its normal range they are coarse.
    assert bool((lost.abs() <= largest / 254 * (1 + 1e-5) + 1e-38).all())
    assert energy(lost) <= 8 / 254**2 * 1.001 * energy(blocks) + 1e-70


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_any_number_of_rows_is_coded(rows):
    x = torch.arange(rows * 4.0).view(rows, 4)
    assert torch.allclose(dequantized(quantized(x), torch.float32), x, atol=0.1)


def test_eight_bits_take_a_known_number_of_bytes_and_keep_zeros():
    rows = quantized(torch.zeros(3, 16))
    assert rows.shape == (3, 20)
    assert rows.dtype == torch.uint8
    assert torch.equal(dequantized(rows, torch.float32), torch.zeros(3, 16))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_not_hidden(bad):
    x = torch.zeros(2, 8)
    x[0, 3] = bad
    found = dequantized(quantized(x), torch.float32).isfinite()
    assert found.all(1).tolist() == [False, True]
    assert not top_k(x[0], 1)[1].isfinite().any()


def owes(*, error_feedback=True):
    return LossyStrategy("lossy", error_feedback=error_feedback)


@given(whole_vectors, st.integers(1, 12))
def test_what_was_sent_and_what_is_owed_are_all_gradients_exactly(rows, k):
    """Whole numbers, so that no sum is rounded."""
    gradients = torch.tensor(rows, dtype=torch.float64)
    feedback, sent = owes(), torch.zeros(12, dtype=torch.float64)
    for gradient in gradients:
        owed = feedback.compensated("w", gradient)
        indices, values = top_k(owed, k)
        sent[indices.long()] += values
        feedback.keep("w", owed.index_fill_(0, indices.long(), 0))
        feedback.after_step(0, skipped=False)
    assert torch.equal(sent + feedback.residuals["w"], gradients.sum(0))


def owing(value, **settings):
    feedback = owes(**settings)
    feedback.keep("w", torch.tensor([value]))
    feedback.after_step(0, skipped=False)
    return feedback


def test_a_skipped_step_leaves_what_was_owed_before():
    feedback = owing(2.0)
    feedback.keep("w", torch.tensor([math.nan]))
    feedback.after_step(0, skipped=True)
    assert feedback.residuals["w"].item() == 2.0


def test_two_reductions_in_one_step_owe_one_after_the_other():
    feedback = owing(2.0)
    feedback.keep("w", feedback.compensated("w", torch.tensor([1.0])))
    assert feedback.compensated("w", torch.tensor([1.0])).item() == 4.0


@pytest.mark.parametrize(
    ("ratio", "owed"), [(0.5, 4.0), (2.0, 1.0), (0.0, 2.0), (math.inf, 2.0), (math.nan, 2.0)]
)
def test_what_is_owed_moves_the_parameters_as_far_under_another_learning_rate(ratio, owed):
    feedback = owing(2.0)
    feedback.lr_changed(ratio)
    assert feedback.residuals["w"].item() == owed


def test_without_error_feedback_nothing_is_owed():
    assert owing(2.0, error_feedback=False).residuals == {}


def test_residuals_of_half_precision_gradients_are_kept_in_float32():
    owed = owing(2.0**-20).compensated("w", torch.tensor([1.0], dtype=torch.bfloat16))
    assert owed.dtype == torch.float32
    assert owed.item() == 1 + 2.0**-20


def test_the_share_falls_from_everything_by_the_same_factor_each_step():
    ratios = [TopK(1e-4, warmup_steps=4).ratio_at(step) for step in range(6)]
    assert ratios == pytest.approx([1, 1e-1, 1e-2, 1e-3, 1e-4, 1e-4])
