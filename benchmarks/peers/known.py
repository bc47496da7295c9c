"""What the planners of other papers know of model and cluster."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, permutations

import numpy as np
from numpy.typing import NDArray

from lightning_autopipe.planner import CostModel, Work
from lightning_autopipe.planner.links import LinkNetwork

Matrix = NDArray[np.float64]
Cuts = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Layers on the one kind of device that peers know, prefix sums with one entry more than layers."""

    forward_s: Matrix
    backward_s: Matrix
    param_bytes: Matrix
    kept_bytes: Matrix
    """What a micro-batch keeps between forward and backward."""
    crossing_bytes: Matrix
    """Of the values that cross the cut before each layer, one way; 0 at both ends."""
    bandwidth_bytes_per_s: float
    """The one that they take for all links."""
    memory_bytes: float
    """Of a device."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.forward_s) - 1

    @property
    def work_s(self) -> Matrix:
        """Forward and backward together, prefix sums."""
        return self.forward_s + self.backward_s


def known(cost: CostModel, network: LinkNetwork) -> Known:
    """Times on a device of mean speed, the bandwidth of the slowest way between two devices, the least memory."""
    topology = network.topology
    speed = sum(device.relative_speed for device in topology.devices) / topology.world_size
    layers = cost.profile.layers
    ranks = range(topology.world_size)
    return Known(
        forward_s=np.array(cost.prefix_s(Work.FORWARD)) / speed,
        backward_s=np.array(cost.prefix_s(Work.BACKWARD)) / speed,
        param_bytes=_sums([layer.param_bytes for layer in layers]),
        kept_bytes=_sums([layer.measured.activation_bytes if layer.measured else 0 for layer in layers]),
        crossing_bytes=np.array([float(cost.sent_bytes(cut)) for cut in range(len(layers) + 1)]),
        bandwidth_bytes_per_s=min(network.route(a, b).bandwidth_bytes_per_s for a, b in permutations(ranks, 2)),
        memory_bytes=min(device.memory_bytes for device in topology.devices),
    )


def between(prefix: Matrix) -> Matrix:
    """``[i][j]``: what layers i to j - 1 sum to, where j is above i."""
    sums: Matrix = prefix[None, :] - prefix[:, None]
    return sums


def _sums(values: list[int]) -> Matrix:
    return np.array(list(accumulate(values, initial=0)), dtype=np.float64)
