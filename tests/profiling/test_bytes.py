"""Saved activations, boundaries and peaks of layers that are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.profiling.models import SAMPLES, WIDTH, Crossings, Scale, ScaledRelu, Stack, features
from tests.profiling.support import profiled

VALUE = SAMPLES * WIDTH * 4
"""Bytes of what crosses between the blocks."""


@pytest.mark.parametrize(
    ("block", "received", "sent", "inside"),
    [
        (nn.Linear(WIDTH, WIDTH), VALUE, 0, 0),
        (Scale(), VALUE, 0, 0),
        (ScaledRelu(), VALUE, VALUE, 0),
        (nn.LayerNorm(WIDTH), VALUE, 0, 2 * SAMPLES * 4),  # mean and reciprocal deviation
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), VALUE, VALUE, 0),
        (nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)), VALUE, 0, 8 * VALUE),
    ],
    ids=["Linear", "product", "ReLU", "LayerNorm", "Tanh", "feed-forward"],
)
def test_saved_activations_are_exact(block: nn.Module, received: int, sent: int, inside: int) -> None:
    first, own, last = profiled(Stack(block), features(), cuts=["blocks.0", "last"])[1]
    assert own.received_kept_bytes == received
    assert own.sent_kept_bytes == sent
    assert own.activation_bytes == received + sent + inside
    assert (own.sent_bytes, own.gradient_bytes) == (VALUE, VALUE)
    assert own.peak_bytes >= own.activation_bytes - own.received_kept_bytes + own.gradient_bytes
    assert first.activation_bytes == 0  # the batch is there anyway
    assert last.received_kept_bytes == VALUE
    assert last.sent_bytes == last.gradient_bytes == 0


def test_a_peak_is_exact() -> None:
    _, own, _ = profiled(Stack(Scale()), features(), cuts=["blocks.0", "last"])[1]
    # Result, its gradient, the input's, the weight's for each sample, and summed over samples.
    assert own.peak_bytes == 4 * VALUE + WIDTH * 4


def test_without_gradients_nothing_is_kept() -> None:
    with torch.no_grad():
        _, measured = profiled(Stack(Scale()), features(), cuts=["blocks.0", "last"])
    assert all(one.activation_bytes == one.gradient_bytes == 0 and one.backward_s == 0 for one in measured)
    assert [one.sent_bytes for one in measured] == [VALUE, VALUE, 0]


def test_a_frozen_layer_has_no_backward() -> None:
    module = Stack(Scale(), Scale())
    module.first.requires_grad_(False)
    module.blocks[0].requires_grad_(False)
    first, frozen, trained, _ = profiled(module, features(), cuts=["blocks.0", "blocks.1", "last"])[1]
    for layer in (first, frozen):
        assert (layer.backward_s, layer.activation_bytes, layer.gradient_bytes) == (0, 0, 0)
        assert layer.sent_bytes == VALUE
    assert trained.backward_s > 0
    assert trained.gradient_bytes == VALUE
    assert not any(p.requires_grad for p in module.blocks[0].parameters())


def test_a_frozen_layer_behind_a_trained_one_hands_gradients_through() -> None:
    module = Stack(Scale())
    module.blocks[0].requires_grad_(False)
    _, frozen, _ = profiled(module, features(), cuts=["blocks.0", "last"])[1]
    assert frozen.backward_s > 0
    assert frozen.activation_bytes == 0  # only the weight is needed


def test_whole_numbers_and_masks_may_cross() -> None:
    first, middle, _ = profiled(Crossings(), features(), cuts=["middle", "last"])[1]
    assert first.sent_bytes == VALUE + SAMPLES * 8 + SAMPLES * WIDTH
    assert first.gradient_bytes == VALUE  # neither indices nor masks have gradients
    assert (middle.sent_bytes, middle.gradient_bytes) == (VALUE, VALUE)


def test_inside_a_checkpointed_region_nothing_is_kept() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, hidden: Tensor) -> Tensor:
            return checkpoint(super().forward, hidden, use_reentrant=False)

    def block(kind: type[nn.Sequential]) -> nn.Module:
        return kind(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    _, own, _ = profiled(Stack(block(Checkpointed)), features(), cuts=["blocks.0", "last"])[1]
    _, kept, _ = profiled(Stack(block(nn.Sequential)), features(), cuts=["blocks.0", "last"])[1]
    assert own.activation_bytes - own.received_kept_bytes < VALUE < kept.activation_bytes
    assert own.peak_bytes > 8 * VALUE
