"""Piper: the time per sample of the slowest stage, within the memory; startup, ending and placement do not count.

Without tensor parallelism and recomputation, and with stages that are contiguous in topological order: its own downsets
of a graph also allow others, which the runtime that plans are scored for has not.
"""

from __future__ import annotations

import math

import numpy as np

from .known import Known, Matrix, between
from .slowest_stage import StagesPlan, quickest_slowest_stage

FIXED_BYTES = 4
"""For each byte of parameters: itself, its gradient, and two numbers of the optimizer."""


def stage_s(known: Known, num_replicas: int, num_to_end: int, num_microbatches: int) -> Matrix:
    """``(p + 2 c / B) / d + 4 (d - 1) w / (d N B)``, infinite where ``a ceil(s / d) + b`` exceeds the memory.

    Args:
        known: p seconds of a micro-batch, c bytes that come in and go out, w bytes of parameters, a bytes kept for a
            micro-batch and b fixed ones, B the bandwidth.
        num_replicas: d.
        num_to_end: s, devices of this stage and all later ones.
        num_microbatches: N, of a batch.

    Source:
        Tarnawski et al., *Piper*, NeurIPS 2021.
    """
    crossing = known.crossing_bytes[:, None] + known.crossing_bytes[None, :]
    bandwidth, params = known.bandwidth_bytes_per_s, between(known.param_bytes)
    seconds = (between(known.work_s) + 2 * crossing / bandwidth) / num_replicas
    seconds += 4 * (num_replicas - 1) * params / (num_replicas * num_microbatches * bandwidth)
    in_flight = math.ceil(num_to_end / num_replicas)
    memory = in_flight * between(known.kept_bytes) + FIXED_BYTES * params
    result: Matrix = np.where(memory <= known.memory_bytes, seconds, np.inf)
    return result


def plan(
    known: Known, *, num_devices: int, num_microbatches: int, num_replicas: int | None = None
) -> StagesPlan | None:
    """The least time per sample, of stages of ``num_replicas`` devices each; None: of any numbers.

    None where no plan fits the memory, as it counts it.
    """
    return quickest_slowest_stage(
        lambda count, num_to_end: stage_s(known, count, num_to_end, num_microbatches),
        np.zeros(known.num_layers + 1),
        num_devices=num_devices,
        counts=range(1, num_devices + 1) if num_replicas is None else [num_replicas],
        uses_all=num_replicas is not None,
    )
