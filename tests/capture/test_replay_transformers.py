"""Every cut of unmodified `transformers` models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.capture.models import token_ids
from tests.capture.support import assert_same_at_every_cut

transformers.logging.set_verbosity_error()
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


class Wrapped(nn.Module):
    """Any of these models as a user's module: the loss is made inside the model."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.network(**batch).loss

    validation_step = training_step


def gpt2(**options: Any) -> transformers.GPT2LMHeadModel:
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=11, n_positions=16, **options)
    return transformers.GPT2LMHeadModel(config)


def checkpointed_gpt2(use_reentrant: bool) -> nn.Module:
    model = gpt2()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return model.train()


def text() -> dict[str, Tensor]:
    return {"input_ids": token_ids(), "labels": token_ids()}


def padded() -> dict[str, Tensor]:
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[1, 3:] = 0
    return {**text(), "attention_mask": mask}


def images() -> dict[str, Tensor]:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.tensor([1, 0])}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "GPT-2": (lambda: gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), text),
    "GPT-2, dropout": (gpt2, padded),
    "GPT-2, eager attention": (lambda: gpt2(attn_implementation="eager"), padded),
    "GPT-2, checkpoints": (lambda: checkpointed_gpt2(False), text),
    "GPT-2, reentrant checkpoints": (lambda: checkpointed_gpt2(True), text),
    "BERT": (
        lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(vocab_size=11, **{**SMALL, "num_hidden_layers": 1})
        ),
        padded,
    ),
    "ResNet": (
        lambda: transformers.ResNetForImageClassification(
            transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 2], num_labels=2)
        ),
        images,
    ),
    "ViT": (
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(image_size=16, patch_size=8, hidden_dropout_prob=0.0, **SMALL)
        ),
        images,
    ),
    "T5": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=11,
                d_model=16,
                d_kv=8,
                d_ff=24,
                num_layers=1,
                num_heads=2,
                dropout_rate=0.0,
                decoder_start_token_id=0,
            )
        ),
        text,
    ),
    "Llama": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=11, num_key_value_heads=1, **SMALL)),
        padded,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_cut(name: str) -> None:
    torch.manual_seed(0)
    build, batch = MODELS[name]
    # T5's embedding is used at three places: cut apart, its gradients are summed in another order.
    found = assert_same_at_every_cut(Wrapped(build().double()), (batch(), 0), tolerance=1e-12 if name == "T5" else 0.0)
    assert len(found.layer_cuts) >= 3
    if name == "Llama":  # its rotary buffers are no activations: cuts are where the hidden states alone cross
        one_value = [p for p in found.layer_cuts if len(found.table.crossing[p]) == 1]
        assert len(one_value) >= 4


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_every_cut_in_evaluation(guard: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    module = Wrapped(gpt2().double()).eval()
    found = assert_same_at_every_cut(module, (padded(), 0), step_name="validation_step", context=guard)
    assert len(found.layer_cuts) >= 3
