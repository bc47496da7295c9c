"""What a plan is worth: by the one simulator, whoever made it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_autopipe.core import ClusterTopology
from lightning_autopipe.planner import simulate
from lightning_autopipe.planner.workload import StageWork, StepWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A plan's simulated step."""

    planner: str
    plan: str
    """Devices of each stage: ``8 x 2`` stages x replicas, ``15-1`` where their numbers are unlike."""
    step_s: float
    fits: bool
    """Whether every device has the memory for it, as the simulator counts it."""
    max_over_mean: float
    """Of the seconds for which devices compute in a step."""
    spread: float
    """The most minus the least of those, by their mean."""
    search_s: float

    def ratio_to(self, other: Scored) -> float:
        """How many times as long the step is."""
        return self.step_s / other.step_s


def score(planner: str, step: StepWork, topology: ClusterTopology, *, plan: str, search_s: float) -> Scored:
    """Simulates a step."""
    timeline = simulate(step)
    busy = [
        _busy_s(work, step, replica, index)
        for replica, works in enumerate(step.stages)
        for index, work in enumerate(works)
    ]
    mean = sum(busy) / len(busy)
    peaks = zip(timeline.peak_bytes, topology.devices, strict=False)
    return Scored(
        planner=planner,
        plan=plan,
        step_s=timeline.step_s,
        fits=all(peak <= device.memory_bytes for peak, device in peaks),
        max_over_mean=max(busy) / mean,
        spread=(max(busy) - min(busy)) / mean,
        search_s=search_s,
    )


def _busy_s(work: StageWork, step: StepWork, replica: int, index: int) -> float:
    seconds = 0.0
    for action in step.schedules[replica].actions_by_rank[index]:
        unit = work.units[0] if action.slice_index is None else work.units[1]
        seconds += unit.forward_s if action.type.value == "F" else unit.backward_s
    return seconds


def counts_text(counts: Iterable[int]) -> str:
    """Devices of each stage."""
    counts = tuple(counts)
    return f"{len(counts)} x {counts[0]}" if len(set(counts)) == 1 else "-".join(map(str, counts))


def geometric_mean(values: Iterable[float]) -> float:
    """Of numbers above 0; NaN where there are none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
