"""What pipelines must get right, row by row of the cases that went wrong elsewhere."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_autopipe.core.errors import CaptureError, ConfigurationError, PlanError
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.runtime import memory_transport, stage_step
from lightning_autopipe.runtime.errors import StageError
from lightning_autopipe.runtime.pipeline import Pipeline
from lightning_autopipe.schedules import get_schedule
from lightning_autopipe.schedules.stash import peak_stash
from tests.runtime.pipelines import (
    apart,
    assert_close,
    assert_identical,
    fresh,
    gradients,
    make_pipeline,
    run_apart,
    run_once,
    run_pipelines,
    run_plain,
)
from tests.runtime.step_models import CausalLanguageModel, Chain, MaskedLanguageModel, Unet


def squares(h: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.mse_loss(h, batch["x"])


def rows(num_samples: int, width: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(num_samples)
    return {"x": torch.randn(num_samples, width, generator=generator, dtype=torch.float64)}


def chain(**options: Any) -> Chain:
    torch.manual_seed(0)
    return Chain(squares, **options).double()


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
def test_gradients_do_not_depend_on_micro_batches_or_accumulation(num_microbatches: int) -> None:
    """Row 2: batch 8 as M micro-batches; then two windows of M=2, averaged as Lightning does."""
    module = chain()
    batch = rows(8)
    plain = run_plain(module, batch)
    assert_close(run_once(module, batch, num_stages=2, num_microbatches=num_microbatches), plain)
    if num_microbatches == 2:
        windows = [{"x": batch["x"][:4]}, {"x": batch["x"][4:]}]
        pipeline = make_pipeline(module, (windows[0], 0), num_stages=2, num_microbatches=2)
        runs = [run_pipelines([pipeline], [window]) for window in windows]
        for name, gradient in plain.gradients.items():
            mean = (runs[0].gradients[name] + runs[1].gradients[name]) / 2
            torch.testing.assert_close(mean, gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_draws_the_same_masks(use_reentrant: bool) -> None:
    """Row 4: dropout 0.5, the user's own checkpoints on and off, any number of stages."""

    class Checkpointed(Chain):
        recompute = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            h = batch["x"]
            h = self.layers[0](h)  # a reentrant checkpoint needs an input with a gradient
            for layer in self.layers[1:]:
                block = nn.Sequential(layer, nn.Tanh(), self.dropout)
                h = checkpoint(block, h, use_reentrant=use_reentrant) if self.recompute else block(h)
            return self.loss(h, batch)

    torch.manual_seed(0)
    module = Checkpointed(squares, dropout=0.5).double()
    batch = rows(6)
    runs = {}
    for recompute in (False, True):
        module.recompute = recompute
        runs[recompute] = [
            run_once(module, batch, num_stages=num_stages, num_microbatches=2) for num_stages in (1, 2, 3)
        ]
        for run in runs[recompute][1:]:
            assert_identical(run, runs[recompute][0])
    assert_identical(runs[True][0], runs[False][0])


def test_planning_changes_nothing() -> None:
    """Row 6: parameters, buffers, modes, random states, and no gradient appears."""
    torch.manual_seed(0)
    module = Unet().double()
    module.down[1].eval()
    batch = module.batch(6)

    def state() -> list[Any]:
        return [
            *(tensor.clone() for tensor in module.state_dict().values()),
            *(batch[key].clone() for key in batch),
            torch.get_rng_state(),
            [sub.training for sub in module.modules()],
            [sorted(vars(sub)) for sub in module.modules()],
            random.getstate(),
            [p.grad is None for p in module.parameters()],
        ]

    before = state()
    pipeline = make_pipeline(module, (batch, 0), num_stages=3, num_microbatches=2)
    assert pipeline.splitter.batch_size("training_step", (batch, 0), {}) == 6
    after = state()
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new
    pipeline.run("training_step", (batch, 0), {}, training=True, step=0)
    assert torch.equal(torch.get_rng_state(), before[-5])
    assert random.getstate() == before[-2]
    assert [sorted(vars(sub)) for sub in module.modules()] == before[-3]


class Rotary(nn.Module):
    """Row 13: hidden states with gradient, a rotary cache without one, an integer mask, on all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.register_buffer("frequencies", torch.linspace(0.1, 1, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = self.embedding(batch)
        rotary = (h.detach() * self.frequencies).cos()
        mask = (h > 0).long()
        for layer in self.layers:
            h = h + layer(h) * rotary * mask
        return h.pow(2).mean()


def test_values_without_gradient_cross() -> None:
    torch.manual_seed(0)
    module = Rotary().double()
    batch = torch.arange(12).view(4, 3) % 7
    plain = run_plain(module, batch)
    for num_stages in (3, 4):
        assert_close(run_once(module, batch, num_stages=num_stages, num_microbatches=2), plain)


def test_real_padding_and_none() -> None:
    """Row 16, and a mask whose values change the path inside the model while its shape stays."""
    torch.manual_seed(0)
    module = MaskedLanguageModel().double()
    batches = [module.batch(4), module.batch(4)]
    batches[1]["attention_mask"][:] = 1
    pipeline = make_pipeline(module, (batches[0], 0), num_stages=4, num_microbatches=2)
    for batch in (*batches, *batches):
        assert_close(run_pipelines([pipeline], [batch]), run_plain(module, batch))


def test_a_long_skip() -> None:
    """Row 18: block 0's output is added in block 3."""

    class Skipping(Chain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            h = first = self.layers[0](batch["x"]).relu()
            for layer in self.layers[1:3]:
                h = layer(h).relu()
            return self.loss(self.layers[3](h + first), batch)

    torch.manual_seed(0)
    module = Skipping(squares).double()
    assert_close(run_once(module, rows(8), num_stages=4, num_microbatches=4), run_plain(module, rows(8)))


@pytest.mark.parametrize(
    ("num_samples", "num_stages", "num_microbatches"),
    [(8, 2, 3), (2, 2, 4), (1, 2, 4), (2, 4, 4), (3, 4, 1), (3, 4, 2), (3, 4, 3)],
)
def test_any_sizes(num_samples: int, num_stages: int, num_microbatches: int) -> None:
    """Rows 22 and 26: batches that do not divide, fewer samples than micro-batches, fewer of these than stages."""
    module = chain()
    batch = rows(num_samples)
    run = run_once(module, batch, num_stages=num_stages, num_microbatches=num_microbatches)
    assert_close(run, run_plain(module, batch))


def test_one_pipeline_takes_all_steps_and_sizes_in_any_order() -> None:
    """Rows 22 and 24: short last batches; train, validate and predict, each with its own size."""
    module = chain(dropout=0.5)
    pipeline = make_pipeline(module, (rows(8), 0), num_stages=3, num_microbatches=4)
    module.eval()
    plain = fresh(module)
    for _ in range(2):
        for num_samples in (3, 8, 2):
            batch = rows(num_samples)
            with torch.no_grad():
                outcome = pipeline.run("validation_step", (batch, 0), {}, training=False, step=0)
                expected = plain.validation_step(batch, 0)
            weights, losses = torch.stack(outcome.weights), torch.stack(outcome.losses)
            torch.testing.assert_close((weights * losses).sum() / weights.sum(), expected, rtol=1e-12, atol=0)
            module.train()
            assert run_pipelines([pipeline], [batch]).gradients.keys() == dict(module.named_parameters()).keys()
            module.eval()
            assert_close(run_pipelines([pipeline], [batch]), run_plain(plain, batch))


@pytest.mark.parametrize("late", [False, True])
def test_a_buffer_that_training_writes_is_read_where_it_lives(late: bool) -> None:
    """The other stages' copies are stale: a validation step that needs them there must not run."""

    class Averaging(Chain):
        def __init__(self, loss: Any) -> None:
            super().__init__(loss)
            self.register_buffer("average", torch.zeros(4))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            h = self.layers[0](batch["x"])
            self.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            return self.loss(self.layers[3](self.layers[2](self.layers[1](h))), batch)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            h = self.layers[0](batch["x"])
            h = h if late else h - self.average
            h = self.layers[3](self.layers[2](self.layers[1](h)))
            return self.loss(h - self.average if late else h, batch)

    torch.manual_seed(0)
    module = Averaging(squares).double()
    pipelines = apart(module, (rows(4), 0), num_stages=3, num_microbatches=2)
    run_apart(pipelines, rows(4))
    assert [pipeline.ownership.owned_buffers(index) for index, pipeline in enumerate(pipelines)] == [
        set(),
        {"average"},
        set(),
    ]
    assert not pipelines[2].module.average.any()
    for pipeline in pipelines:
        with torch.no_grad(), mock.patch.object(pipeline.runner.executors[0], "run") as start:
            if late:
                with pytest.raises(PlanError, match="validation_step"):
                    pipeline.run("validation_step", (rows(4), 0), {}, training=False, step=0)
            else:
                pipeline.run("validation_step", (rows(4), 0), {}, training=False, step=0)
                assert start.called


def test_a_buffer_that_crosses_is_sent_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next micro-batch writes it in place, while the message may still be under way."""

    class Averaging(Chain):
        def __init__(self) -> None:
            super().__init__(squares)
            self.register_buffer("average", torch.zeros(4))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            h = self.layers[0](batch["x"])
            self.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            crossing = self.average.detach()
            h = self.layers[1](h)
            return self.loss(self.layers[3](self.layers[2](h) + crossing), batch)

    losses = []
    for copies in (True, False):
        if not copies:
            monkeypatch.setattr(memory_transport, "_copy", Tensor.detach)
        torch.manual_seed(0)
        module = Averaging().double()
        partition = [2]
        pipeline = make_pipeline(module, (rows(8), 0), num_stages=2, num_microbatches=4, partition=partition)
        losses.append(run_pipelines([pipeline], [rows(8)]).loss)
    assert torch.equal(*losses)


def test_predictions_keep_their_samples() -> None:
    torch.manual_seed(0)
    module = Chain(lambda h, batch: {"prediction": h, "first": batch["names"][0]}).double()
    batch = {**rows(5), "names": list("abcde")}
    module.training_step = lambda batch, batch_idx: module.predict_step(batch, batch_idx)["prediction"].mean()
    pipeline = make_pipeline(module, (batch, 0), num_stages=2, num_microbatches=2)
    with torch.inference_mode():
        outcome = pipeline.run("predict_step", (batch, 0), {}, training=False, step=0)
        expected = module.predict_step(batch, 0)["prediction"]
    assert outcome.sizes == (3, 2)
    assert outcome.losses == []
    assert [output["first"] for output in outcome.outputs] == ["a", "d"]
    joined = torch.cat([output["prediction"] for output in outcome.outputs])
    torch.testing.assert_close(joined, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("trained", ["first", "last", "adapter"])
def test_frozen_parts(trained: str) -> None:
    """Row 11, as far as the pipeline goes."""
    torch.manual_seed(0)
    module = CausalLanguageModel().double().requires_grad_(False)
    chosen = {"first": "h.0.", "last": "ln_f", "adapter": "c_attn.bias"}[trained]
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(chosen in name)
    batch = module.batch(5)
    plain = run_plain(module, batch)
    assert plain.gradients
    assert_close(run_once(module, batch, num_stages=3, num_microbatches=2), plain)
    pipelines = apart(module, (batch, 0), num_stages=3, num_microbatches=2)
    assert_close(run_apart(pipelines, batch), plain)


def test_every_stage_trains() -> None:
    """Row 29: three steps of SGD on four stages change every parameter as on one device."""
    module = chain(depth=4)
    plain = fresh(module)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, plain)]
    pipeline = make_pipeline(module, (rows(8), 0), num_stages=4, num_microbatches=4)
    start = [parameter.detach().clone() for parameter in module.parameters()]
    for step in range(3):
        run_pipelines([pipeline], [rows(8)], step=step)
        run_plain(plain, rows(8))
        for optimizer in optimizers:
            optimizer.step()
    for parameter, expected, before in zip(module.parameters(), plain.parameters(), start, strict=True):
        assert not torch.equal(parameter, before)
        torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-14)


def test_more_stages_than_layers() -> None:
    """Row 36."""
    with pytest.raises(ConfigurationError, match=r"5.*stages|stages.*5"):
        make_pipeline(chain(depth=4), (rows(8), 0), num_stages=5, num_microbatches=2)


@pytest.mark.parametrize("schedule_name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("num_microbatches", [4, 32])
def test_live_boundary_values(num_microbatches: int, schedule_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 39: no stage keeps more micro-batches' received and sent values than the schedule's peak stash."""
    num_stages = 4
    module = chain()
    batch = rows(num_microbatches)
    pipeline = make_pipeline(
        module,
        (batch, 0),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        schedule=schedule_name,
    )
    live: dict[int, list[weakref.ref[Tensor]]] = {stage_index: [] for stage_index in range(num_stages)}
    peak = dict.fromkeys(live, 0)
    forward = stage_step.StageStep.forward

    def counted(self: Any, microbatch_index: int, received: tuple[Tensor, ...]) -> Any:
        output = forward(self, microbatch_index, received)
        boundary = live[self._stage_index]
        boundary.append(weakref.ref((*received, *output.sent, output.loss)[0]))
        peak[self._stage_index] = max(peak[self._stage_index], sum(ref() is not None for ref in boundary))
        return output

    monkeypatch.setattr(stage_step.StageStep, "forward", counted)
    gc.collect()
    gc.disable()
    try:
        run_pipelines([pipeline], [batch])
    finally:
        gc.enable()
    schedule = get_schedule(schedule_name, num_stages, num_microbatches)
    for stage_index in range(num_stages):
        assert peak[stage_index] <= peak_stash(schedule, stage_index), (stage_index, peak)
    assert not any(ref() is not None for refs in live.values() for ref in refs)


def test_dropout_of_new_shapes_does_not_depend_on_the_number_of_stages() -> None:
    """Another length is traced anew; its layers, which key the draws, must be the planned ones."""
    torch.manual_seed(0)
    module = CausalLanguageModel(dropout=0.5).double()
    runs = []
    for num_stages in (1, 2, 3, 4):
        pipeline = make_pipeline(module, (module.batch(6, length=3), 0), num_stages=num_stages, num_microbatches=2)
        runs.append(run_pipelines([pipeline], [module.batch(5, length=16)]))
    for run in runs[1:]:
        assert_identical(run, runs[0], tied="network.transformer.wte.weight")


def test_values_are_logged_where_they_are_made() -> None:
    logged: list[tuple[str, int, float]] = []

    class Logging(Chain):
        def log(self, name: str, value: Any) -> None:
            pipeline.owned_call(
                lambda tensor: logged.append((name, pipeline.microbatch_index, float(tensor))),
                torch.as_tensor(value).detach(),
            )

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            h = batch["x"]
            if not pipeline.tracing:
                self.log("input", h.mean())
            for layer in self.layers:
                h = layer(h)
                self.log("norm", h.norm())
            loss = self.loss(h, batch)
            self.log("loss", loss)
            self.log("number", 3.0)
            return loss

    torch.manual_seed(0)
    module = Logging(squares).double()
    layout = ParallelLayout(num_stages=3)
    pipeline = Pipeline(
        module, layout=layout, global_rank=0, transport=None, num_microbatches=2, make_schedule=get_schedule, seed=3
    )
    from lightning_autopipe.planner import make_plan

    batch = rows(4)
    profile = pipeline.profile("training_step", (batch, 0), {})
    pipeline.set_plan(
        make_plan(
            profile,
            num_stages=3,
            num_replicas=1,
            num_microbatches=2,
            module_fingerprint=pipeline.module_fingerprint,
        )
    )
    logged.clear()
    run = run_pipelines([pipeline], [batch])
    names = [name for name, _, _ in logged]
    assert names.count("norm") == 2 * 4
    assert names.count("loss") == 2
    assert names.count("number") == 2
    assert names.count("input") == 2
    assert {value for name, _, value in logged if name == "loss"} == {float(loss) for loss in run.outcomes[0].losses}


def test_an_error_in_the_step_names_stage_and_micro_batch() -> None:
    class Failing(Chain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            h = batch["x"]
            for index, layer in enumerate(self.layers):
                if index == 2 and batch["x"][0, 0] > 0.5:
                    raise ArithmeticError("of the user's")
                h = layer(h)
            return self.loss(h, batch)

    torch.manual_seed(0)
    module = Failing(squares).double()
    batch = {"x": torch.zeros(4, 4, dtype=torch.float64)}
    pipeline = make_pipeline(module, (batch, 0), num_stages=4, num_microbatches=4)
    batch = {"x": batch["x"].clone()}
    batch["x"][2, 0] = 1
    with pytest.raises(StageError, match="ArithmeticError: of the user's") as caught:
        pipeline.run("training_step", (batch, 0), {}, training=True, step=0)
    assert caught.value.stage_index == 2
    assert caught.value.microbatch_index == 2
    assert all("forward" not in vars(sub) for sub in module.modules())
    pipeline.run("training_step", ({"x": torch.zeros(4, 4).double()}, 0), {}, training=True, step=0)


def test_a_plan_for_another_module_or_layout_is_refused() -> None:
    module = chain()
    pipeline = make_pipeline(module, (rows(8), 0), num_stages=2, num_microbatches=2)
    other = chain(depth=5)
    plan = _plan(other, num_stages=2)
    pipeline.profile("training_step", (rows(8), 0), {})
    with pytest.raises(PlanError, match="module"):
        pipeline.set_plan(plan)
    with pytest.raises(PlanError, match=r"layout|processes|world"):
        pipeline.set_plan(_plan(module, num_stages=4))


def _plan(module: nn.Module, num_stages: int) -> Any:
    from lightning_autopipe.planner import make_plan

    pipeline = make_pipeline(module, (rows(8), 0), num_stages=num_stages, num_microbatches=2)
    return make_plan(
        pipeline.profile("training_step", (rows(8), 0), {}),
        num_stages=num_stages,
        num_replicas=1,
        num_microbatches=2,
        module_fingerprint=pipeline.module_fingerprint,
    )


def test_gradients_add_to_what_is_there() -> None:
    module = chain()
    pipeline = make_pipeline(module, (rows(4), 0), num_stages=2, num_microbatches=2)
    for _ in range(2):
        pipeline.run("training_step", (rows(4), 0), {}, training=True, step=0)
    twice = gradients(module)
    module.zero_grad()
    pipeline.run("training_step", (rows(4), 0), {}, training=True, step=0)
    for name, gradient in gradients(module).items():
        torch.testing.assert_close(twice[name], 2 * gradient, rtol=1e-12, atol=1e-14)


def test_a_step_without_parameters_is_an_error() -> None:
    class NoParameters(nn.Module):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return batch.mean()

    with pytest.raises(CaptureError, match="training_step uses no parameter"):
        run_once(NoParameters(), torch.randn(4, 3), num_stages=2, num_microbatches=2)
