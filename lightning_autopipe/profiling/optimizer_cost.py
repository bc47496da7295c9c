"""What an optimizer's step takes, layer by layer."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_autopipe.capture.preserve import preserved_random_state
from lightning_autopipe.profiling.findings import OptimizerCost
from lightning_autopipe.profiling.optimizer_state import TrialOptimizer
from lightning_autopipe.profiling.stopwatch import Stopwatch

_STEPS = 3

_log = logging.getLogger(__name__)


def optimizer_costs(
    optimizers: Sequence[Optimizer], parameters: Mapping[int, Sequence[nn.Parameter]], *, device: torch.device
) -> dict[int, OptimizerCost] | None:
    """Measure steps on copies of each layer's parameters; the optimizers' own parameters and state stay as they are.

    What a step takes whatever its parameters (Python around a loop) is left out: a stage takes it once, not once a
    layer. Layers with the same shapes and settings are measured once.

    Args:
        optimizers: the user's, on the whole module.
        parameters: by layer.
        device: where they are.

    Returns:
        None where there is no optimizer, or it cannot be tried: a user's may need anything.
    """
    if not optimizers:
        return None
    try:
        with preserved_random_state():
            return _measured(optimizers, parameters, device)
    except Exception as error:
        _log.info("the optimizer's step is not measured: %s: %s", type(error).__name__, error)
        return None


def _measured(
    optimizers: Sequence[Optimizer], parameters: Mapping[int, Sequence[nn.Parameter]], device: torch.device
) -> dict[int, OptimizerCost]:
    places = {
        id(parameter): (optimizer_index, group_index)
        for optimizer_index, optimizer in enumerate(optimizers)
        for group_index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    known: dict[Hashable, OptimizerCost] = {}
    found: dict[int, OptimizerCost] = {}
    base_s = _cost(optimizers[0], [(0, nn.Parameter(torch.zeros(1, device=device)))], device).seconds
    for index, own in parameters.items():
        stepped = [(*places[id(p)], p) for p in own if p.requires_grad and id(p) in places]
        key = tuple((o, g, tuple(p.shape), p.dtype, p.stride()) for o, g, p in stepped)
        if key not in known:
            seconds, num_bytes = 0.0, 0
            for position, optimizer in enumerate(optimizers):
                members = [(group_index, p) for o, group_index, p in stepped if o == position]
                if members:
                    cost = _cost(optimizer, members, device)
                    seconds += max(0.0, cost.seconds - base_s)
                    num_bytes += cost.num_bytes
            known[key] = OptimizerCost(seconds=seconds, num_bytes=num_bytes)
        found[index] = known[key]
    return found


def _cost(optimizer: Optimizer, members: Sequence[tuple[int, nn.Parameter]], device: torch.device) -> OptimizerCost:
    copies = []
    for group_index, parameter in members:
        # What they hold does not matter, and placeholders hold nothing.
        memory = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device=device)
        twin = nn.Parameter(memory.zero_())
        twin.grad = torch.randn_like(twin)
        copies.append((group_index, twin))
    trial = TrialOptimizer(optimizer, copies)
    trial.step()  # makes the state
    taken = []
    for _ in range(_STEPS):
        stopwatch = Stopwatch(device)
        stopwatch.start()
        trial.step()
        stopwatch.stop()
        taken.append(stopwatch.elapsed_s())
    return OptimizerCost(seconds=statistics.median(taken), num_bytes=trial.state_bytes)
