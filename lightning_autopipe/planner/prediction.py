"""Predicts time and memory of each stage from what was measured of its layers."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.prediction import StagePrediction
from lightning_autopipe.core.profile import LayerMeasurement, LayerProfile
from lightning_autopipe.planner.cost import measurements
from lightning_autopipe.schedules.catalog import get_schedule
from lightning_autopipe.schedules.stash import peak_stash

_MESSAGES_AHEAD = 2
"""What the runtime's transport may have posted receives for, each way, before they are needed."""
_MESSAGES_BEHIND = 4
"""How many gradients that a stage sends back may be under way."""


def predict_stages(
    layers: Sequence[LayerProfile],
    partition: Partition,
    *,
    schedule_name: str,
    num_microbatches: int,
    optimizer_state_ratio: float,
) -> tuple[StagePrediction, ...]:
    """Time of one micro-batch and peak memory on each stage; empty where layers were not measured.

    A stage holds parameters, as many bytes of gradients as of trainable ones, the optimizer's state, and what the
    micro-batches in flight keep (as many as the schedule has between forward and backward). The last of them runs: it
    is at its fullest in one of the layers, with the activations of the layers before it.

    Args:
        layers: of the module.
        partition: of the layers.
        schedule_name: whose stash counts.
        num_microbatches: of a step.
        optimizer_state_ratio: bytes of optimizer state for each byte of trainable parameters.
    """
    if not measurements(layers):
        return ()
    schedule = get_schedule(schedule_name, partition.num_stages, num_microbatches)
    return tuple(
        _predict(
            layers, partition.stage_layers(index), peak_stash(schedule, index), num_microbatches, optimizer_state_ratio
        )
        for index in range(partition.num_stages)
    )


def _predict(
    layers: Sequence[LayerProfile], owned: range, num_alive: int, num_microbatches: int, optimizer_state_ratio: float
) -> StagePrediction:
    own = layers[owned.start : owned.stop]
    measured = measurements(layers)[owned.start : owned.stop]
    before = measurements(layers)[owned.start - 1] if owned.start else None
    received_bytes = before.sent_bytes if before else 0
    sent_bytes = measured[-1].sent_bytes
    parameter_bytes, trainable_bytes = _parameter_bytes(own)
    kept = _kept_bytes(measured)
    # The executor holds what a stage has received and what it sends, whether autograd needs it or not.
    held = received_bytes + sum(kept) + sent_bytes - measured[-1].sent_kept_bytes
    fullest = max(
        received_bytes
        + sum(kept[:index])
        + layer.peak_bytes
        + (sent_bytes - measured[-1].sent_kept_bytes if index < len(measured) - 1 else 0)
        for index, layer in enumerate(measured)
    )
    return StagePrediction(
        forward_s=sum(layer.forward_s for layer in measured),
        backward_s=sum(layer.backward_s for layer in measured),
        parameter_bytes=parameter_bytes,
        gradient_bytes=trainable_bytes,
        optimizer_bytes=round(optimizer_state_ratio * trainable_bytes),
        activation_bytes=(num_alive - 1) * held,
        working_bytes=fullest,
        buffer_bytes=_MESSAGES_AHEAD * (received_bytes + measured[-1].gradient_bytes)
        + min(num_microbatches, _MESSAGES_BEHIND) * (before.gradient_bytes if before else 0),
    )


def _kept_bytes(measured: Sequence[LayerMeasurement]) -> list[int]:
    """What each layer of a stage adds to the stage's activations.

    What the first one received is counted apart; what two neighbours keep is counted once.
    """
    kept: list[int] = []
    for index, layer in enumerate(measured):
        counted = layer.received_kept_bytes
        if index > 0:
            counted = min(counted, measured[index - 1].sent_kept_bytes)
        kept.append(layer.activation_bytes - counted)
    return kept


def _parameter_bytes(layers: Sequence[LayerProfile]) -> tuple[int, int]:
    """Bytes of all and of the trainable parameters that a stage holds, copies of those counted elsewhere included."""
    tied = {parameter.name: parameter for layer in layers for parameter in layer.tied}
    copies = [parameter for name, parameter in tied.items() if not _is_counted_in(name, layers)]
    return (
        sum(layer.param_bytes for layer in layers) + sum(copy.num_bytes for copy in copies),
        sum(layer.trainable_bytes for layer in layers) + sum(copy.num_bytes for copy in copies if copy.is_trainable),
    )


def _is_counted_in(name: str, layers: Sequence[LayerProfile]) -> bool:
    return any(
        name in layer.parameters and name not in {parameter.name for parameter in layer.tied} for layer in layers
    )
