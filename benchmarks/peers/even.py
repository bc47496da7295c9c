"""Planners that even something out: layers, parameters, or profiled time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lightning_autopipe.planner import min_max_partition

from .known import Cuts, Known


def uniform(known: Known, num_stages: int) -> Cuts:
    """Equally many layers on each stage, as Megatron and DeepSpeed's ``uniform``."""
    return min_max_partition([1] * known.num_layers, num_stages).cut_points


def by_parameters(known: Known, num_stages: int) -> Cuts:
    """The largest stage with as few parameters as possible, as DeepSpeed's ``parameters``."""
    return min_max_partition(np.diff(known.param_bytes).tolist(), num_stages).cut_points


def min_max(known: Known, num_stages: int) -> Cuts:
    """The slowest stage as quick as possible, as torchgpipe's block partition of profiled times."""
    return min_max_partition(np.maximum(np.diff(known.work_s), 0).tolist(), num_stages).cut_points


EVEN: dict[str, Callable[[Known, int], Cuts]] = {
    "uniform": uniform,
    "parameters": by_parameters,
    "min-max": min_max,
}
