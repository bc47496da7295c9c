"""Every cut of unmodified `transformers` models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.architectures.architecture import Wrapped, without_draws
from tests.architectures.batches import causal, causal_padded, images, masked, sequence_pairs
from tests.architectures.language import bert, gpt2, llama, t5
from tests.architectures.perception import resnet, vit
from tests.capture.support import assert_same_at_every_cut


def checkpointed_gpt2(use_reentrant: bool) -> nn.Module:
    model = gpt2()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return model.train()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "GPT-2": (lambda: without_draws(gpt2()), causal),
    "GPT-2, dropout": (gpt2, causal_padded),
    "GPT-2, eager attention": (lambda: gpt2(attn_implementation="eager"), causal_padded),
    "GPT-2, checkpoints": (lambda: checkpointed_gpt2(False), causal),
    "GPT-2, reentrant checkpoints": (lambda: checkpointed_gpt2(True), causal),
    "BERT": (lambda: bert(num_layers=1), masked),
    "ResNet": (resnet, images),
    "ViT": (lambda: without_draws(vit()), images),
    "T5": (lambda: without_draws(t5(num_layers=1)), sequence_pairs),
    "Llama": (llama, causal_padded),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_cut(name: str) -> None:
    torch.manual_seed(0)
    build, batch = MODELS[name]
    # T5's embedding is used at three places: cut apart, its gradients are summed in another order.
    found = assert_same_at_every_cut(Wrapped(build()).double(), (batch(), 0), tolerance=1e-12 if name == "T5" else 0.0)
    assert len(found.layer_cuts) >= 3
    if name == "Llama":  # its rotary buffers are no activations: cuts are where the hidden states alone cross
        one_value = [p for p in found.layer_cuts if len(found.table.crossing[p]) == 1]
        assert len(one_value) >= 4


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_every_cut_in_evaluation(guard: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    module = Wrapped(gpt2()).double().eval()
    found = assert_same_at_every_cut(module, (causal_padded(), 0), step_name="validation_step", context=guard)
    assert len(found.layer_cuts) >= 3
