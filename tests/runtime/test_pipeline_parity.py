"""The parity matrix: a pipeline of any shape gives the loss, gradients and parameters of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.pipelines import (
    assert_close,
    assert_identical,
    fresh,
    halves,
    make_pipeline,
    run_once,
    run_pipelines,
    run_plain,
)
from tests.runtime.step_models import CausalLanguageModel, ImageClassifier, MaskedLanguageModel, OwnPython, Unet

NUM_SAMPLES = 7
TIED = {"GPT-2": "network.transformer.wte.weight", "BERT": "network.bert.embeddings.word_embeddings.weight"}
MODELS: dict[str, Callable[[], Any]] = {
    "GPT-2": CausalLanguageModel,
    "BERT": MaskedLanguageModel,
    "ResNet": ImageClassifier,
    "U-Net": Unet,
    "own Python": OwnPython,
}


def build(name: str) -> tuple[Any, Any]:
    """A module in float64 (normalisation by fixed statistics: those of a micro-batch are no one-device numbers)."""
    torch.manual_seed(0)
    module = MODELS[name]().double()
    for sub in module.modules():
        if isinstance(sub, nn.BatchNorm2d):
            sub.eval()
    return module, module.batch(NUM_SAMPLES)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_any_number_of_stages(name: str, num_microbatches: int) -> None:
    module, batch = build(name)
    plain = run_plain(module, batch)
    first = None
    for num_stages in (1, 2, 3, 4):
        run = run_once(module, batch, num_stages=num_stages, num_microbatches=num_microbatches)
        assert len(run.outcomes[0].sizes) == num_microbatches
        assert_close(run, plain)
        first = first or run
        assert_identical(run, first, tied=TIED.get(name))


@pytest.mark.parametrize("name", MODELS)
def test_two_replicas_with_uneven_batches(name: str) -> None:
    module, batch = build(name)
    plain = run_plain(module, batch)
    for num_stages, num_microbatches in ((1, 2), (2, 1), (3, 4)):
        batches = halves(batch, NUM_SAMPLES, 4)
        pipelines = [
            make_pipeline(
                module,
                (batches[0], 0),
                num_stages=num_stages,
                num_microbatches=num_microbatches,
                num_replicas=2,
                replica_index=index,
            )
            for index in range(2)
        ]
        assert_close(run_pipelines(pipelines, batches), plain)


@pytest.mark.parametrize("name", MODELS)
def test_three_steps_of_adamw(name: str) -> None:
    module, _ = build(name)
    batches = [module.batch(size) for size in (7, 6, 7)]
    plain = fresh(module)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (module, plain)]
    pipeline = make_pipeline(module, (batches[0], 0), num_stages=3, num_microbatches=2)
    start = [parameter.detach().clone() for parameter in module.parameters()]
    for step, batch in enumerate(batches):
        run_pipelines([pipeline], [batch], step=step)
        run_plain(plain, batch)
        for optimizer in optimizers:
            optimizer.step()
    for (parameter_name, parameter), before in zip(module.named_parameters(), start, strict=True):
        expected = plain.get_parameter(parameter_name)
        assert torch.equal(parameter, before) == torch.equal(expected, before), parameter_name
        # AdamW divides by the size of the gradient: one that is zero but for rounding moves at random.
        if parameter.grad is not None and float(parameter.grad.abs().max()) > 1e-12:
            torch.testing.assert_close(parameter, expected, rtol=1e-8, atol=1e-12, msg=parameter_name)


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_dropout_does_not_depend_on_the_number_of_stages(num_microbatches: int) -> None:
    torch.manual_seed(0)
    module = CausalLanguageModel(dropout=0.5).double()
    batch = module.batch(NUM_SAMPLES)
    runs = [
        run_once(module, batch, num_stages=num_stages, num_microbatches=num_microbatches) for num_stages in (1, 2, 3, 4)
    ]
    runs.append(run_once(module, batch, num_stages=3, num_microbatches=num_microbatches, schedule="gpipe"))
    for run in runs[1:]:
        assert_identical(run, runs[0], tied=TIED["GPT-2"])


def test_random_masks_do_not_depend_on_the_number_of_stages() -> None:
    torch.manual_seed(0)
    module = OwnPython(masking=0.4).double()
    batch = module.batch(NUM_SAMPLES)
    runs = [run_once(module, batch, num_stages=num_stages, num_microbatches=2) for num_stages in (1, 2, 4)]
    for run in runs[1:]:
        assert_identical(run, runs[0])
    pipeline = make_pipeline(module, (batch, 0), num_stages=2, num_microbatches=2)
    other_step = run_pipelines([pipeline], [batch], step=1)
    assert not torch.equal(other_step.loss, runs[0].loss)
    assert_identical(run_pipelines([pipeline], [batch], step=0), runs[0])


@pytest.mark.parametrize("name", ["ResNet", "U-Net"])
def test_batch_norm_is_updated_once_a_micro_batch(name: str) -> None:
    torch.manual_seed(0)
    module = MODELS[name]().double()
    batch = module.batch(8)
    looped = fresh(module)
    for part in halves(batch, 8, 4):
        for quarter in halves(part, 4, 2):
            looped.training_step(quarter, 0)
    runs = []
    for num_stages in (1, 2, 4):
        staged = fresh(module)
        runs.append(run_once(staged, batch, num_stages=num_stages, num_microbatches=4))
        for buffer_name, buffer in looped.named_buffers():
            assert torch.equal(staged.get_buffer(buffer_name), buffer), buffer_name
    for run in runs[1:]:
        assert_identical(run, runs[0])
