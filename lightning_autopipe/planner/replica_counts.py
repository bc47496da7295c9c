"""How many ranks each stage gets, where stages may have unlike numbers of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.mapping import DeviceMapping
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.planner.cost import CostModel
from lightning_autopipe.planner.count_search import SHORTER, CountedStages, CountSearch
from lightning_autopipe.planner.count_table import Counts
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.mapping_choice import MappingChoice
from lightning_autopipe.planner.objective import Objective
from lightning_autopipe.planner.unequal import Windows, default_windows
from lightning_autopipe.planner.workload import StepWork

EFFORT = 150_000
"""Forwards and backwards that a search may simulate."""
_MOST_STAGES = 8
"""Numbers of stages that ``"auto"`` tries with unlike counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCountChoice:
    """Layers and ranks of each stage, and what they are worth."""

    partition: Partition
    mapping: DeviceMapping
    windows: Windows
    """By stage, how many micro-batches a forward may be ahead; see `windowed_lists`."""
    step_work: StepWork
    """The step for `simulate`, with the micro-batches dealt."""
    step_s: float
    """Seconds of a step, simulated."""
    equal_step_s: float
    """Of the best choice with equal counts."""
    num_simulated: int
    """Choices that were simulated."""

    @property
    def counts(self) -> Counts:
        """Ranks of each stage."""
        return tuple(len(ranks) for ranks in self.mapping.stage_ranks)


def choose_replica_counts(
    cost: CostModel,
    network: LinkNetwork,
    *,
    num_microbatches: int,
    num_stages: int | Literal["auto"] = "auto",
    equal: Iterable[MappingChoice] | None = None,
    microbatch_size: float | None = None,
    exchange_s: float = 0.0,
    optimizer_state_ratio: float = 2.0,
    effort: int = EFFORT,
) -> ReplicaCountChoice:
    """The partition, counts and devices with the shortest simulated step; never longer than with equal counts.

    Candidates come from `CountTable`, for several orders of the devices, and from the mapper, with equal counts. All
    are simulated; from the best ones cuts and devices are moved between stages, and windows widened, while that helps.

    Args:
        cost: of the layers.
        network: devices and links; `alike_devices` where nothing is known of them.
        num_microbatches: of a step, over all ranks of a stage together.
        num_stages: a number, or ``"auto"``.
        equal: mappings with equal counts that are known already, for as many micro-batches; None: they are searched.
        microbatch_size: samples; None: as profiled.
        exchange_s: what all ranks take to agree on one number at the step's end.
        optimizer_state_ratio: bytes of optimizer state for each byte of trainable parameters.
        effort: forwards and backwards that may be simulated, beyond those of the first candidates.

    Raises:
        ConfigurationError: there are more stages than layers or devices, or nothing was found that fits the memory.
    """
    search = CountSearch(cost, network, num_microbatches, microbatch_size, exchange_s, optimizer_state_ratio)
    num_devices = network.topology.world_size
    most = min(cost.num_layers, num_devices)
    if num_stages == "auto":
        equal_numbers = [number for number in range(1, most + 1) if num_devices % number == 0]
        numbers: Sequence[int] = range(1, min(most, _MOST_STAGES) + 1)
    elif 1 <= num_stages <= most:
        equal_numbers = numbers = [num_stages]
    else:
        raise ConfigurationError(
            f"num_stages={num_stages} for {cost.num_layers} layers and {num_devices} devices: each stage has at least "
            f'one of both; set 1 to {most}, or "auto"'
        )
    mappings = search.equal(equal_numbers) if equal is None else list(equal)
    starts = [CountedStages(one.partition.cut_points, one.mapping.stage_ranks, ()) for one in mappings]
    best_equal = min(mappings, key=lambda one: one.step_s, default=None)
    found = search.improved([*starts, *search.from_tables(numbers)], effort)
    equal_step_s = best_equal.step_s if best_equal else math.inf
    if best_equal is not None and not search.step_s(found) < equal_step_s * SHORTER:
        return ReplicaCountChoice(
            partition=best_equal.partition,
            mapping=best_equal.mapping,
            windows=default_windows([len(ranks) for ranks in best_equal.mapping.stage_ranks]),
            step_work=Objective(best_equal.setting).step_work(best_equal.partition.cut_points, best_equal.depths),
            step_s=equal_step_s,
            equal_step_s=equal_step_s,
            num_simulated=search.num_simulated,
        )
    return ReplicaCountChoice(
        partition=Partition(cut_points=found.cuts, num_layers=cost.num_layers),
        mapping=DeviceMapping(stage_ranks=found.stage_ranks),
        windows=found.windows or default_windows(found.counts),
        step_work=search.step_work(found),
        step_s=search.step_s(found),
        equal_step_s=equal_step_s,
        num_simulated=search.num_simulated,
    )
