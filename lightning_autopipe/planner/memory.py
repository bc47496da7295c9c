"""What a stage holds: fixed bytes, and bytes for each micro-batch in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_autopipe.core.profile import LayerBytes, LayerProfile
from lightning_autopipe.planner.cost import CostModel

_MESSAGES_AHEAD = 2
"""What the runtime's transport may have posted receives for, each way, before they are needed."""
_MESSAGES_BEHIND = 4
"""How many gradients that a stage sends back may be under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one stage; those for micro-batches are of one whole one."""

    parameter_bytes: int
    """Of all parameters on the stage, copies of tied ones included."""
    gradient_bytes: int
    optimizer_bytes: int
    stash_bytes: int
    """What a micro-batch keeps between its forward and its backward."""
    working_bytes: int
    """The most that is alive for the micro-batch that runs: activations so far, gradients, results in between."""
    buffer_bytes: int
    """Values that wait to be received or sent."""

    @property
    def fixed_bytes(self) -> int:
        """What is there whatever the schedule."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.buffer_bytes

    def peak_bytes(self, num_alive: float) -> int:
        """The most in use with ``num_alive`` micro-batches in flight, of which one runs."""
        return self.fixed_bytes + round(max(0.0, num_alive - 1) * self.stash_bytes) + self.working_bytes


def stage_memory(
    cost: CostModel,
    owned: range,
    *,
    num_microbatches: int,
    microbatch_size: float | None = None,
    optimizer_state_ratio: float,
    optimizer_shares: int = 1,
) -> StageMemory:
    """Bytes of a stage that owns a range of layers.

    A stage holds parameters, as many bytes of gradients as of trainable ones, the optimizer's state, and what the
    micro-batches in flight keep. The last of them runs: it is at its fullest in one of the layers, with the activations
    of the layers before it. Where layers were not measured, activations count nothing.

    Args:
        cost: of the module's layers.
        owned: indices of the stage's.
        num_microbatches: of a step.
        microbatch_size: samples; None: as profiled.
        optimizer_state_ratio: bytes of optimizer state for each byte of trainable parameters, where not measured.
        optimizer_shares: replicas that share the stage's optimizer state, parameter by parameter.
    """
    own = cost.profile.layers[owned.start : owned.stop]
    parameter_bytes, trainable_bytes = _parameter_bytes(own)
    every = cost.layer_bytes(microbatch_size)
    measured = every[owned.start : owned.stop]
    before = every[owned.start - 1] if measured and owned.start else None
    stash_bytes = working_bytes = buffer_bytes = 0
    if measured:
        received_bytes = before.sent_bytes if before else 0
        # The executor holds what a stage has received and what it sends, whether autograd needs it or not.
        sent_apart = measured[-1].sent_bytes - measured[-1].sent_kept_bytes
        kept = _kept_bytes(measured)
        stash_bytes = received_bytes + sum(kept) + sent_apart
        kept_so_far = received_bytes
        for index, layer in enumerate(measured):
            is_last = index == len(measured) - 1
            working_bytes = max(working_bytes, kept_so_far + layer.peak_bytes + (0 if is_last else sent_apart))
            kept_so_far += kept[index]
        buffer_bytes = _MESSAGES_AHEAD * (received_bytes + measured[-1].gradient_bytes)
        buffer_bytes += min(num_microbatches, _MESSAGES_BEHIND) * (before.gradient_bytes if before else 0)
    return StageMemory(
        parameter_bytes=parameter_bytes,
        gradient_bytes=trainable_bytes,
        optimizer_bytes=math.ceil(_optimizer_bytes(own, trainable_bytes, optimizer_state_ratio) / optimizer_shares),
        stash_bytes=stash_bytes,
        working_bytes=working_bytes,
        buffer_bytes=buffer_bytes,
    )


def _kept_bytes(measured: Sequence[LayerBytes]) -> list[int]:
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
    counted_here = {name for layer in layers for name in set(layer.parameters) - {tie.name for tie in layer.tied}}
    copies = [parameter for name, parameter in tied.items() if name not in counted_here]
    return (
        sum(layer.param_bytes for layer in layers) + sum(copy.num_bytes for copy in copies),
        sum(layer.trainable_bytes for layer in layers) + sum(copy.num_bytes for copy in copies if copy.is_trainable),
    )


def _optimizer_bytes(layers: Sequence[LayerProfile], trainable_bytes: int, ratio: float) -> int:
    """What the optimizer remembers: as measured, and by the ratio for all other trainable bytes (copies of ties)."""
    measured = [layer for layer in layers if layer.optimizer_bytes is not None]
    others = trainable_bytes - sum(layer.trainable_bytes for layer in measured)
    return sum(layer.optimizer_bytes or 0 for layer in measured) + round(ratio * others)
