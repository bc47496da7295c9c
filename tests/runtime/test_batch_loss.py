"""`loss_over="batch"`: a loss that compares samples with one another is that of the whole batch, for any M and S."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autopipe.core.errors import CaptureError, ConfigurationError
from tests.runtime.pipelines import Run, assert_close, make_pipeline, run_once, run_pipelines, run_plain

WIDTH = 6


def tower() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
    )


class TwoTowers(nn.Module):
    """Pairs of samples: each must be the most alike among all of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = tower(), tower()
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        scale = self.scale.exp()
        a, b = F.normalize(self.a(batch["a"]), dim=-1), F.normalize(self.b(batch["b"]), dim=-1)
        logits = scale * a @ b.t()
        loss = F.cross_entropy(logits, torch.arange(len(a)))
        return {"loss": loss, "alike": (a * b).sum(-1), "share": (logits.argmax(-1) == torch.arange(len(a))).sum()}

    validation_step = training_step


class Spread(nn.Module):
    """One tower; the samples are pushed apart, and a frozen head is used at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = tower()
        self.double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch.mul_(0.5)  # a micro-batch must be a copy
        h = self.tower(batch)
        return (h - h.mean(0)).square().mean().sqrt() + torch.cdist(h, h).mean()


class Views(nn.Module):
    """Two views of each sample in one pass: by views, or by samples."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = tower()
        self.apart = apart
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        views = [batch["a"], batch["b"]]
        x = torch.cat(views) if self.apart else torch.stack(views, 1).flatten(0, 1)
        z = F.normalize(self.tower(x), dim=-1)
        a, b = z.chunk(2) if self.apart else (z[::2], z[1::2])
        return F.cross_entropy(4 * a @ b.t(), torch.arange(len(a))) + F.mse_loss(z @ z.t(), torch.eye(len(z)).double())


class Shuffled(Views):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = torch.cat([batch["a"].flip(0), batch["b"]])
        z = self.tower(x)
        return F.mse_loss(z @ z.t(), torch.eye(len(z)).double())


def pairs(num_samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(num_samples, WIDTH, dtype=torch.float64, generator=generator) for name in ("a", "b")}


def clone(batch: Any) -> Any:
    return batch.clone() if isinstance(batch, Tensor) else {name: t.clone() for name, t in batch.items()}


@pytest.mark.parametrize("num_samples", [8, 7])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("kind", [TwoTowers, Spread])
def test_the_loss_is_that_of_the_whole_batch(
    kind: type[nn.Module], num_stages: int, num_microbatches: int, num_samples: int
) -> None:
    module = kind()
    batch: Any = pairs(num_samples) if kind is TwoTowers else pairs(num_samples)["a"]
    reference = run_plain(module, clone(batch))
    run = run_once(
        module,
        clone(batch),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        schedule="gpipe",
        loss_over="batch",
    )
    assert_close(run, reference)
    (outcome,) = run.outcomes
    assert outcome.output_sizes == (num_samples,)
    if kind is TwoTowers:
        module.zero_grad(set_to_none=True)
        whole = module.training_step(batch, 0)
        torch.testing.assert_close(outcome.outputs[0]["alike"], whole["alike"].detach(), rtol=0, atol=1e-12)
        assert outcome.outputs[0]["share"] == whole["share"]


def test_without_it_the_loss_depends_on_the_number_of_microbatches() -> None:
    module, batch = TwoTowers(), pairs(8)
    whole, parts = (run_once(module, batch, num_stages=2, num_microbatches=m).loss for m in (1, 4))
    assert abs(float(whole - parts)) > 0.1


def test_an_evaluation() -> None:
    module, batch = TwoTowers().eval(), pairs(6)
    pipeline = make_pipeline(module, (batch, 0), num_stages=2, num_microbatches=3, schedule="gpipe", loss_over="batch")
    with torch.no_grad():
        outcome = pipeline.run("validation_step", (batch, 0), {}, training=False, step=0)
        reference = module.validation_step(batch, 0)
    assert [float(loss) for loss in outcome.losses] == [pytest.approx(float(reference["loss"]), rel=1e-12)]
    assert [float(weight) for weight in outcome.weights] == [6]


def test_replicas_have_a_batch_each() -> None:
    module = TwoTowers()
    batches = [pairs(8), {name: tensor.flip(1) for name, tensor in pairs(8).items()}]
    references = [run_plain(module, batch) for batch in batches]
    pipelines = [
        make_pipeline(
            module,
            (batches[0], 0),
            num_stages=2,
            num_replicas=2,
            replica_index=index,
            num_microbatches=4,
            schedule="gpipe",
            loss_over="batch",
        )
        for index in range(2)
    ]
    mean = Run(
        (references[0].loss + references[1].loss) / 2,
        {n: (references[0].gradients[n] + references[1].gradients[n]) / 2 for n in references[0].gradients},
        [],
    )
    assert_close(run_pipelines(pipelines, batches), mean)


class Mixed(TwoTowers):
    """Samples are mixed in the middle of the layers: all that is behind runs on the whole batch."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        a = self.a(batch["a"])
        alike = a @ a.t()
        return self.b(alike[:, :1].expand(-1, WIDTH) + alike.sum()).square().mean() + alike.mean()


class Draws(TwoTowers):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        mask = torch.rand(len(batch["a"]), 1, dtype=torch.float64)
        return super().training_step({"a": batch["a"] * mask, "b": batch["b"]}, batch_idx)


@pytest.mark.parametrize(("kind", "reason"), [(Draws, "draws random numbers")])
def test_what_cannot_be_joined_is_refused(kind: type[nn.Module], reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        run_once(kind(), pairs(8), num_stages=2, num_microbatches=4, schedule="gpipe", loss_over="batch")


def test_layers_end_before_the_samples_are_mixed() -> None:
    module, batch = Mixed(), pairs(8)
    options = {"num_microbatches": 4, "schedule": "gpipe", "loss_over": "batch"}
    assert_close(run_once(module, batch, num_stages=3, **options), run_plain(module, batch))
    with pytest.raises(ConfigurationError, match="num_stages=6"):
        run_once(module, batch, num_stages=6, **options)


@pytest.mark.parametrize("num_samples", [8, 7])
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("apart", [True, False])
def test_views_of_each_sample_in_one_pass(apart: bool, num_stages: int, num_samples: int) -> None:
    module, batch = Views(apart=apart), pairs(num_samples)
    options = {"num_microbatches": 3, "schedule": "gpipe", "loss_over": "batch"}
    assert_close(run_once(module, batch, num_stages=num_stages, **options), run_plain(module, batch))


def test_views_in_another_order_are_refused() -> None:
    with pytest.raises(CaptureError, match="2 rows for each sample, in an order that is neither"):
        run_once(Shuffled(apart=True), pairs(8), num_stages=2, num_microbatches=2, schedule="gpipe", loss_over="batch")


class Embeds(TwoTowers):
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        a, b = self.a(batch["a"]), self.b(batch["b"])
        return {"alike": a @ b.t(), "a": a}


def test_a_prediction_is_that_of_the_whole_batch() -> None:
    module, batch = Embeds().eval(), pairs(6)
    pipeline = make_pipeline(module, (batch, 0), num_stages=2, num_microbatches=3, schedule="gpipe", loss_over="batch")
    with torch.no_grad():
        outcome = pipeline.run("predict_step", (batch, 0), {}, training=False, step=0)
        reference = module.predict_step(batch, 0)
    assert outcome.output_sizes == (6,)
    for name, value in reference.items():
        torch.testing.assert_close(outcome.outputs[0][name], value, rtol=1e-12, atol=1e-12)
