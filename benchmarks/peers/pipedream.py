"""PipeDream: the steady state of stages that are replicated in turn; startup, ending and memory do not count."""

from __future__ import annotations

from .known import Known, Matrix, between
from .slowest_stage import StagesPlan, quickest_slowest_stage


def stage_s(known: Known, num_replicas: int) -> Matrix:
    """``A(i, j, m) = (C + 4 (m - 1) W / (B m)) / m``: a micro-batch's share of the time of m replicas.

    Args:
        known: layers and bandwidth; C are seconds of forward and backward, W bytes of parameters.
        num_replicas: m.

    Source:
        Narayanan et al., *PipeDream*, SOSP 2019.
    """
    reduction = 4 * (num_replicas - 1) / (known.bandwidth_bytes_per_s * num_replicas)
    return (between(known.work_s) + reduction * between(known.param_bytes)) / num_replicas


def plan(known: Known, *, num_devices: int, num_replicas: int | None = None) -> StagesPlan:
    """The quickest slowest stage or crossing, of stages of ``num_replicas`` devices each; None: of any numbers."""
    counts = range(1, num_devices + 1) if num_replicas is None else [num_replicas]
    prices = {count: stage_s(known, count) for count in counts}
    found = quickest_slowest_stage(
        lambda count, _: prices[count],
        2 * known.crossing_bytes / known.bandwidth_bytes_per_s,
        num_devices=num_devices,
        counts=counts,
        uses_all=num_replicas is not None,
    )
    assert found is not None, "there are at least as many layers as stages"
    return found
