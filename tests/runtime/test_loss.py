"""The loss of a step is the weighted mean over micro-batches, whatever the weight is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autopipe.core.errors import BatchError
from lightning_autopipe.runtime.loss import weighted_loss
from tests.runtime.pipelines import assert_close, make_pipeline, run_once, run_pipelines, run_plain
from tests.runtime.step_models import Chain

WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=torch.float64)


def rows(num_samples: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    label = torch.tensor([0, 1, -100, 3, 1, -100, -100, 2])[:num_samples]
    return {"x": x, "label": label, "kept": torch.arange(num_samples * 4).view(num_samples, 4) % 5 > 1}


def soft(h: Tensor) -> Tensor:
    return h.detach().exp() / h.detach().exp().sum(1, keepdim=True)


# Each is a mean over a number of terms that depends on the data, in a form whose number of terms is known.
DERIVED: dict[str, Callable[[Tensor, Mapping[str, Tensor]], Any]] = {
    "ignored targets": lambda h, b: F.cross_entropy(h, b["label"]),
    "class weights": lambda h, b: F.cross_entropy(h, b["label"], WEIGHTS),
    "label smoothing": lambda h, b: F.cross_entropy(h, b["label"], WEIGHTS, label_smoothing=0.1),
    "another ignored index": lambda h, b: F.cross_entropy(h, b["label"].clamp(min=0), ignore_index=1),
    "log likelihood": lambda h, b: F.nll_loss(h.log_softmax(1), b["label"], ignore_index=-100),
    "module": lambda h, b: torch.nn.CrossEntropyLoss(WEIGHTS)(h, b["label"]),
    "probabilities": lambda h, b: F.cross_entropy(h, soft(b["x"])),
    "squares of chosen elements": lambda h, b: F.mse_loss(h[b["kept"]], b["x"][b["kept"]]),
    "squares": lambda h, b: F.mse_loss(h, b["x"]),
    "scaled": lambda h, b: -(F.cross_entropy(h, b["label"]) * -2 / 3).to(torch.float64).mean(),
    "in a mapping": lambda h, b: {"loss": F.cross_entropy(h, b["label"]), "other": h},
    "weight given": lambda h, b: {
        "loss": (F.cross_entropy(h, b["label"], reduction="none").sum() / (b["label"] >= 0).sum()),
        "loss_weight": (b["label"] >= 0).sum(),
    },
    "number given": lambda h, b: {
        "loss": (h * b["kept"]).sum() / b["kept"].sum(),
        "loss_weight": float(b["kept"].sum()),
    },
    "samples": lambda h, b: h.pow(2).mean() + h.sum(1).exp().mean(),
}


@pytest.mark.parametrize("name", DERIVED)
def test_weights(name: str) -> None:
    torch.manual_seed(0)
    module = Chain(DERIVED[name]).double()
    plain = run_plain(module, rows())
    for num_stages, num_microbatches in ((1, 3), (2, 4)):
        assert_close(run_once(module, rows(), num_stages=num_stages, num_microbatches=num_microbatches), plain)


def test_a_micro_batch_without_terms_gives_zero_not_nan() -> None:
    torch.manual_seed(0)
    module = Chain(DERIVED["ignored targets"]).double()
    batch = rows(8)
    batch["label"][:4] = -100
    plain = run_plain(module, batch)
    run = run_once(module, batch, num_stages=2, num_microbatches=4)
    assert_close(run, plain)
    assert run.outcomes[0].weights[0] == 0
    assert all(bool(loss.isfinite()) for loss in run.outcomes[0].losses)


def test_a_given_weight_of_zero_hides_a_loss_of_nan() -> None:
    def loss(h: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        number = batch["kept"][:, 0].sum()
        return {"loss": (h[:, 0] * batch["kept"][:, 0]).sum() / number, "loss_weight": number}

    torch.manual_seed(0)
    module = Chain(loss).double()
    batch = rows()
    batch["kept"][:3] = False
    batch["kept"][5, 0] = True
    plain = run_plain(module, batch)
    run = run_once(module, batch, num_stages=3, num_microbatches=3)
    assert_close(run, plain)


def test_all_weights_zero_give_zero_gradients() -> None:
    module = Chain(DERIVED["ignored targets"]).double()
    batch = rows()
    batch["label"][:] = -100
    pipeline = make_pipeline(module, (batch, 0), num_stages=2, num_microbatches=2)
    module.zero_grad()
    outcome = pipeline.run("training_step", (batch, 0), {}, training=True, step=0)
    assert [float(weight) for weight in outcome.weights] == [0.0, 0.0]
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "returned no loss"),
        ({"other": 1}, "returned no loss"),
        (torch.ones(2), r"a loss of shape \(2,\)"),
        ({"loss": torch.ones(()), "loss_weight": -1}, "loss_weight=-1"),
        ({"loss": torch.ones(()), "loss_weight": float("inf")}, "loss_weight=inf"),
        ({"loss": torch.ones(()), "loss_weight": torch.ones(3)}, r"loss_weight of shape \(3,\)"),
    ],
)
def test_errors(result: Any, message: str) -> None:
    with pytest.raises(BatchError, match=f"^training_step returned .*{message}|^training_step {message}"):
        weighted_loss(result, 4, training=True, connect_to=[], step_name="training_step")


def test_evaluation_needs_no_loss() -> None:
    found = weighted_loss({"prediction": torch.ones(3)}, 3, training=False, connect_to=[], step_name="predict_step")
    assert found.loss is None
    assert found.weight == 3


def test_two_replicas_weigh_by_tokens() -> None:
    """cases.md row 1: valid tokens 1, 7, 3, 0 in replica 0 and 5, 0, 2, 4 in replica 1."""
    torch.manual_seed(0)

    def loss(h: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(h.transpose(1, 2), batch["label"], ignore_index=-100)

    module = Chain(loss).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 7, 4, generator=generator, dtype=torch.float64)
    valid = torch.tensor([1, 7, 3, 0, 5, 0, 2, 4])
    label = torch.where(torch.arange(7) < valid[:, None], torch.randint(0, 4, (8, 7), generator=generator), -100)
    plain = run_plain(module, {"x": x, "label": label})
    batches = [{"x": x[part], "label": label[part]} for part in (slice(0, 4), slice(4, 8))]
    pipelines = [
        make_pipeline(module, (batches[0], 0), num_stages=2, num_microbatches=4, num_replicas=2, replica_index=index)
        for index in range(2)
    ]
    run = run_pipelines(pipelines, batches)
    assert [[int(w) for w in outcome.weights] for outcome in run.outcomes] == [[1, 7, 3, 0], [5, 0, 2, 4]]
    assert_close(run, plain)


@pytest.mark.parametrize(
    ("loss", "is_known"),
    [
        (lambda h, b: F.cross_entropy(h, b["label"]), True),
        (lambda h, b: F.cross_entropy(h, b["label"]) * 0.5, True),
        (lambda h, b: {"loss": F.cross_entropy(h, b["label"]) + h.mean(), "loss_weight": 4}, True),
        (lambda h, b: F.cross_entropy(h, b["label"].clamp(min=0)) + h.mean(), True),  # ignores nothing
        (lambda h, b: F.cross_entropy(h, b["label"]) + h.pow(2).mean(), False),
        (lambda h, b: F.cross_entropy(h, b["label"]).mul_(0.5), True),
        (lambda h, b: F.cross_entropy(h, b["label"]).add_(h.pow(2).mean()), False),
        (lambda h, b: {"loss": F.mse_loss(h, h.detach() * 2) + F.cross_entropy(h, b["label"])}, False),
    ],
)
def test_a_loss_that_hides_ignored_targets_is_noticed(loss: Callable[..., Any], is_known: bool) -> None:
    module = Chain(loss).double()
    pipeline = make_pipeline(module, (rows(), 0), num_stages=2, num_microbatches=2)
    assert (pipeline.planned_step.unweighted_loss is None) == is_known
    if pipeline.planned_step.unweighted_loss is not None:
        assert pipeline.planned_step.unweighted_loss.name == "cross_entropy"


def logs_its_value(loss: Tensor) -> Tensor:
    """What users write for the progress bar: it ends the trace."""
    float(loss.detach())
    return loss


def gains_a_term(h: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    loss = F.cross_entropy(h, batch["label"])
    loss += h.pow(2).mean()
    return loss


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(
    "loss",
    [
        lambda h, b: logs_its_value(F.mse_loss(h, torch.zeros_like(h))),
        lambda h, b: logs_its_value(F.cross_entropy(h, b["label"])) * 0.5,
        lambda h, b: logs_its_value(h.pow(2).mean()) + h.abs().mean() - F.l1_loss(h, torch.ones_like(h)).item() * 0,
        lambda h, b: F.cross_entropy(h, b["label"].clamp(min=0)) + logs_its_value(h.pow(2).mean()),
    ],
)
def test_a_loss_whose_value_the_step_reads(loss: Callable[..., Any], num_stages: int) -> None:
    module = Chain(loss).double()
    assert_close(run_once(module, rows(), num_stages=num_stages, num_microbatches=3), run_plain(module, rows()))


def test_a_loss_that_is_written_in_place_loses_its_number_of_terms() -> None:
    module = Chain(gains_a_term).double()
    run = run_once(module, rows(), num_stages=2, num_microbatches=2)
    assert [float(weight) for weight in run.outcomes[0].weights] == [4.0, 3.0]


class Clamped(torch.autograd.Function):
    """The identity, whose gradient is not linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.01, 0.01)


class ClampedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = Clamped.apply(layer(batch))
        return F.mse_loss(batch, torch.ones_like(batch))


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_one_microbatch_back_propagates_the_loss_itself(num_stages: int) -> None:
    module, batch = ClampedModule(), torch.randn(12, 4)
    run, plain = run_once(module, batch, num_stages=num_stages, num_microbatches=1), run_plain(module, batch)
    for name, gradient in plain.gradients.items():
        assert torch.equal(run.gradients[name], gradient), name


def test_scaled_losses_give_gradients_as_large_as_on_one_device() -> None:
    module, batch = ClampedModule().double(), torch.randn(16, 4).double()
    plain = run_plain(module, batch)
    for loss_scale, is_close in ((1.0, False), (2.0**-6, True)):  # 64 elements: the loss's weight
        pipeline = make_pipeline(module, (batch, 0), num_stages=2, num_microbatches=4)
        run = run_pipelines([pipeline], [batch], loss_scale=loss_scale)
        same = torch.allclose(run.gradients["layers.0.weight"], plain.gradients["layers.0.weight"], rtol=1e-10)
        assert same == is_close
