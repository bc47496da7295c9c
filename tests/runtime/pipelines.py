"""Running a module as a pipeline in one process, with replicas one after another, and as it is."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_autopipe.capture import tree
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.planner import make_plan
from lightning_autopipe.runtime.memory_transport import MemoryNetwork
from lightning_autopipe.runtime.pipeline import Pipeline
from lightning_autopipe.runtime.stage_step import StepOutcome
from lightning_autopipe.schedules import get_schedule

TOLERANCE = 1e-10


@dataclass
class Run:
    """Loss and gradients of one step over all replicas, divided by the total weight."""

    loss: Tensor
    gradients: dict[str, Tensor]
    outcomes: list[StepOutcome]


def make_pipeline(
    module: nn.Module,
    args: tuple[Any, ...],
    *,
    num_stages: int,
    num_microbatches: int,
    num_replicas: int = 1,
    replica_index: int = 0,
    schedule: str | ScheduleSpec = "1f1b",
    step_name: str = "training_step",
    partition: Any = "auto",
    **options: Any,
) -> Pipeline:
    """A planned pipeline without transport: all stages run here."""
    layout = ParallelLayout(num_stages=num_stages, num_replicas=num_replicas)
    pipeline = Pipeline(
        module,
        layout=layout,
        global_rank=layout.global_rank(0, replica_index),
        transport=None,
        num_microbatches=num_microbatches,
        make_schedule=get_schedule,
        schedule=schedule,
        seed=3,
        **options,
    )
    plan = make_plan(
        pipeline.profile(step_name, args, {}),
        num_stages=num_stages,
        num_replicas=num_replicas,
        num_microbatches=num_microbatches,
        schedule=schedule if isinstance(schedule, str) else "1f1b",
        module_fingerprint=pipeline.module_fingerprint,
        partition=partition,
    )
    pipeline.set_plan(plan)
    pipeline.schedule.spec = schedule  # also those that no strategy sets yet
    return pipeline


def run_pipelines(pipelines: list[Pipeline], batches: list[Any], *, step: int = 0, loss_scale: float = 1.0) -> Run:
    """One training step of all replicas of one module; the gradients stay in its parameters."""
    module = pipelines[0].module
    module.zero_grad(set_to_none=True)
    outcomes = [
        pipeline.run("training_step", (batch, 0), {}, training=True, step=step, loss_scale=loss_scale)
        for pipeline, batch in zip(pipelines, batches, strict=True)
    ]
    weights = torch.stack([weight for outcome in outcomes for weight in outcome.weights])
    losses = torch.stack([loss for outcome in outcomes for loss in outcome.losses])
    total = weights.sum()
    divisor = outcomes[0].gradient_divisor(float(total))
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad /= divisor
    kept = weights > 0
    return Run((weights * losses)[kept].sum() / total, gradients(module), outcomes)


def run_once(module: nn.Module, batch: Any, **options: Any) -> Run:
    """Plan and run one step of one replica."""
    return run_pipelines([make_pipeline(module, (batch, 0), **options)], [batch])


def run_plain(module: nn.Module, batch: Any) -> Run:
    """The step as the user wrote it, on the whole batch."""
    module.zero_grad(set_to_none=True)
    result = module.training_step(batch, 0)
    loss = result["loss"] if isinstance(result, dict) else result
    loss.backward()
    return Run(loss.detach(), gradients(module), [])


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def halves(batch: Any, num_samples: int, at: int) -> list[Any]:
    """The batches of two replicas: the first `at` samples and the rest."""

    def part(of: slice) -> Any:
        def cut(path: tree.LeafPath, leaf: Any) -> Any:
            return leaf[of] if isinstance(leaf, Tensor) and leaf.shape[0] == num_samples else leaf

        cut_batch = tree.map_leaves(cut, batch)
        if isinstance(batch, dict) and "names" in batch:
            cut_batch["names"] = batch["names"][of]
        return cut_batch

    return [part(slice(0, at)), part(slice(at, None))]


def assert_close(run: Run, reference: Run) -> None:
    """Equal within 1e-10 relative to the largest gradient of each parameter."""
    torch.testing.assert_close(run.loss, reference.loss, rtol=TOLERANCE, atol=0.0)
    assert run.gradients.keys() == reference.gradients.keys()
    scale = max(float(gradient.abs().max()) for gradient in reference.gradients.values())
    for name, gradient in reference.gradients.items():
        # Gradients that are zero but for rounding (a bias before a normalisation) are measured by the others.
        size = max(float(gradient.abs().max()), 1e-6 * scale)
        assert float((run.gradients[name] - gradient).abs().max()) <= TOLERANCE * size, name


def assert_identical(run: Run, reference: Run, *, tied: str | None = None) -> None:
    """Equal to the bit; a tied parameter's gradients are summed in another order when its places are apart."""
    assert torch.equal(run.loss, reference.loss)
    assert run.gradients.keys() == reference.gradients.keys()
    for name, gradient in reference.gradients.items():
        if name == tied:
            torch.testing.assert_close(run.gradients[name], gradient, rtol=1e-12, atol=1e-14)
        else:
            assert torch.equal(run.gradients[name], gradient), name


def fresh(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def apart(
    module: nn.Module, args: tuple[Any, ...], *, num_stages: int, num_microbatches: int, schedule: str = "1f1b"
) -> list[Pipeline]:
    """Every rank on a module of its own that holds only its own parameters, as in processes of their own."""
    network = MemoryNetwork()
    layout = ParallelLayout(num_stages=num_stages)
    pipelines = []
    for stage_index in range(num_stages):
        pipeline = Pipeline(
            copy.deepcopy(module),
            layout=layout,
            global_rank=layout.global_rank(stage_index, 0),
            transport=network.transport(stage_index),
            num_microbatches=num_microbatches,
            make_schedule=get_schedule,
            seed=3,
        )
        plan = make_plan(
            pipeline.profile("training_step", args, {}),
            num_stages=num_stages,
            num_replicas=1,
            num_microbatches=num_microbatches,
            schedule=schedule,
            module_fingerprint=pipeline.module_fingerprint,
        )
        pipeline.set_plan(plan)
        pipeline.place()
        pipelines.append(pipeline)
    return pipelines


def run_apart(pipelines: list[Pipeline], batch: Any, *, step: int = 0, training: bool = True) -> Run:
    """One training step of stages that live apart, in turns; gradients of tied parameters are summed."""
    waiting = []
    outcomes = []
    for pipeline in pipelines:
        pipeline.module.zero_grad(set_to_none=True)
        with mock.patch.object(pipeline.runner.executors[0], "run") as start:
            outcomes.append(pipeline.run("training_step", (batch, 0), {}, training=training, step=step))
        waiting.append(pipeline.runner.executors[0].advance(*start.call_args.args))
    for _ in range(1000):
        waiting = [stage for stage in waiting if next(stage, None) is not None]
        if not waiting:
            break
    assert not waiting
    last = outcomes[-1]
    weights, losses = torch.stack(last.weights), torch.stack(last.losses)
    summed: dict[str, Tensor] = {}
    for pipeline in pipelines:
        for name, gradient in gradients(pipeline.module).items():
            summed[name] = summed[name] + gradient if name in summed else gradient
    total = weights.sum()
    return Run((weights * losses)[weights > 0].sum() / total, {n: g / total for n, g in summed.items()}, outcomes)
