"""After a step: what each rank of a pipeline, and each replica, tells the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_autopipe.runtime.stage_step import StepOutcome
from lightning_autopipe.strategy.aggregate import Aggregate
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.outputs import for_other_stages, join_outputs
from lightning_autopipe.strategy.step_log import LoggedCall, LogKey, aggregate_microbatches, merge_replicas


@dataclass(slots=True, kw_only=True)
class StepResult:
    """One step over all micro-batches and replicas; the same on every rank, but for `output`."""

    output: Any
    """What Lightning gets as the step's return value."""
    calls: list[LoggedCall]
    """What the step logged."""
    total_weight: float
    """Sum of the loss's weights."""
    weights_are_samples: bool = False
    """Whether that is the number of samples, for want of anything else."""
    notes: list[list[Any]] = field(default_factory=list)
    """Of each rank."""


@dataclass(slots=True, kw_only=True)
class _RankReport:
    calls: dict[LogKey, LoggedCall]
    loss_weights: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights_are_samples: bool = False
    loss_dtype: torch.dtype | None = None
    output: Any = None
    notes: list[Any] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _ReplicaReport:
    calls: dict[LogKey, LoggedCall]
    loss: Aggregate
    total_weight: float
    weights_are_samples: bool
    notes: list[list[Any]]


def exchange_step(
    outcome: StepOutcome,
    calls: dict[LogKey, LoggedCall],
    communicator: Communicator,
    *,
    training: bool,
    notes: Sequence[Any] = (),
) -> StepResult:
    """Aggregates a training or evaluation step over micro-batches and replicas. Collective over all ranks.

    Args:
        outcome: What the pipeline gave on this rank.
        calls: What this rank recorded.
        communicator: This rank's groups.
        training: Whether a missing loss is impossible.
        notes: What this rank tells all others of something else.
    """
    weights = _to_host(outcome.weights)
    losses = _to_host(outcome.losses)
    output = None
    if communicator.is_last_stage:
        output = join_outputs(outcome.outputs, sizes=outcome.output_sizes, weights=weights)
    own = _RankReport(
        calls=calls,
        loss_weights=weights,
        losses=losses,
        weights_are_samples=outcome.weights_are_samples,
        loss_dtype=outcome.losses[0].dtype if outcome.losses else None,
        output=for_other_stages(output),
        notes=list(notes),
    )
    reports: list[_RankReport] = communicator.gather_in_pipeline(own)
    last = reports[-1]
    merged: dict[LogKey, LoggedCall] = {}
    for report in reports:
        merged.update(report.calls)
    aggregate_microbatches(
        merged, sizes=outcome.sizes_by_index, loss_weights=outcome.weights_by_index(last.loss_weights)
    )
    loss = Aggregate()
    if len(last.losses) == len(last.loss_weights):
        for value, weight in zip(last.losses, last.loss_weights, strict=True):
            loss.add(value, weight)
    replica = _ReplicaReport(
        calls=merged,
        loss=loss,
        total_weight=sum(last.loss_weights),
        weights_are_samples=last.weights_are_samples,
        notes=[report.notes for report in reports],
    )
    replicas: list[_ReplicaReport] = communicator.gather_over_replicas(replica)
    whole_loss = Aggregate()
    for one in replicas:
        whole_loss.merge(one.loss)
    if not communicator.is_last_stage:
        output = _to_device(last.output, communicator.device)
    if whole_loss.num_entries and last.loss_dtype is not None:
        output = _with_loss(output, _loss_value(whole_loss, training), last.loss_dtype, communicator.device)
    return StepResult(
        output=output,
        calls=merge_replicas([one.calls for one in replicas]),
        total_weight=sum(one.total_weight for one in replicas),
        weights_are_samples=all(one.weights_are_samples for one in replicas),
        notes=[of_rank for one in replicas for of_rank in one.notes],
    )


def exchange_prediction(outcome: StepOutcome, communicator: Communicator, *, whole: bool) -> Any:
    """The output of a ``predict_step`` for this rank. Collective over a pipeline; replicas go their own ways.

    Args:
        outcome: What the pipeline gave on this rank.
        communicator: This rank's groups.
        whole: Whether every rank of the pipeline gets all of it, as ``trainer.predict`` returns it on each.
    """
    output = None
    if communicator.is_last_stage:
        sizes = outcome.output_sizes
        output = join_outputs(outcome.outputs, sizes=sizes, weights=[float(size) for size in sizes])
    shared = output if whole or not communicator.is_last_stage else for_other_stages(output)
    shared = communicator.broadcast_in_pipeline(shared, stage_index=communicator.layout.num_stages - 1)
    return output if communicator.is_last_stage else _to_device(shared, communicator.device)


def _loss_value(loss: Aggregate, training: bool) -> float:
    if training and not loss.num_weighted_entries:
        return 0.0  # what was back-propagated: a mean over nothing is NaN
    return loss.value("mean")


def _with_loss(output: Any, value: float, dtype: torch.dtype, device: torch.device) -> Any:
    loss = torch.tensor(value, dtype=dtype, device=device)
    if isinstance(output, Tensor):
        return loss if output.ndim == 0 else output
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        return {**output, "loss": loss}
    return output


def _to_host(tensors: list[Tensor]) -> list[float]:
    """The numbers of 0-dim tensors: one wait for the device."""
    if not tensors:
        return []
    numbers: list[float] = torch.stack([tensor.detach().to(torch.float64) for tensor in tensors]).tolist()
    return numbers


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to_device(member, device) for key, member in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_to_device(member, device) for member in value)
    return value
