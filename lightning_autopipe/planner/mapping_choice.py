"""What is known of a mapping that was chosen."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_autopipe.core.mapping import DeviceMapping
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.planner.contention import LinkLoad, link_loads
from lightning_autopipe.planner.objective import Objective, PipelineSetting
from lightning_autopipe.planner.replica import Depths
from lightning_autopipe.planner.simulator import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingChoice:
    """Devices for stages, layers for stages, and micro-batches for replicas."""

    mapping: DeviceMapping
    partition: Partition
    depths: Depths
    """Warm-up of each stage."""
    setting: PipelineSetting
    """With the devices in their places, and the micro-batches of each replica."""
    step_s: float
    """Seconds of a step, simulated."""
    free_step_s: float
    """Of the best mapping that was found where rank 0 may run any stage, or none."""
    lower_bound_s: float
    """What no mapping of these devices can be below."""
    is_exact: bool
    """Whether no other mapping with any other partition is better, each with the shares that `share_microbatches`
    gives it by the time that replicas take for one micro-batch; of few micro-batches other shares can be better."""
    is_simulated: bool
    """Whether `step_s` counts that transfers share links; it does but for very many devices."""
    num_scored: int
    """Mappings that were looked at."""
    idle_ranks: tuple[int, ...]
    """Ranks that run nothing."""

    @property
    def num_microbatches(self) -> tuple[int, ...]:
        """Of each replica."""
        return self.setting.num_microbatches

    def link_loads(self) -> tuple[LinkLoad, ...]:
        """What each link carries, how busy it is, and which flows meet on it, the busiest one first."""
        work = Objective(self.setting).step_work(self.partition.cut_points, self.depths)
        return link_loads(work, simulate(work))

    @property
    def rank_0_costs(self) -> float:
        """By what share the step is longer because rank 0 runs the last stage of replica 0; 0.1 is a tenth."""
        return self.step_s / self.free_step_s - 1 if self.free_step_s else 0.0
