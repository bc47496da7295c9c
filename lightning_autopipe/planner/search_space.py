"""What a search is given, and what it may choose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.planner.cost import CostModel, Work
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.partition_rules import partition_by_rule
from lightning_autopipe.planner.replica import Cuts
from lightning_autopipe.planner.schedule_choice import OTHER_KINDS
from lightning_autopipe.schedules.gpipe import NAME as GPIPE
from lightning_autopipe.schedules.one_f_one_b import NAME as ONE_F_ONE_B

Auto = Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """What is given, and what may be chosen.

    Raises:
        ConfigurationError: numbers contradict each other or the number of devices.
    """

    cost: CostModel
    network: LinkNetwork
    """All its devices run something."""
    batch_size: float
    """Samples."""
    batch_of: Literal["replica", "step"] = "replica"
    """Whether each replica has such a batch, as under Lightning's loaders, or all share one."""
    num_stages: int | Auto = "auto"
    num_replicas: int | Auto = "auto"
    possible_replicas: tuple[int, ...] | None = None
    """Numbers of replicas that the data can be shared by; None: any."""
    num_microbatches: int | Auto = "auto"
    """Of each replica."""
    schedule: str = "auto"
    """``"auto"``: 1F1B with any depths, or one of `kinds`; ``"1f1b"``, ``"gpipe"``: that one as it is; another one with
    the numbers that suit it."""
    partition: str = "auto"
    """A rule of `PARTITION_RULES`: ``"auto"`` for the shortest step."""
    cuts: Cuts | None = None
    """Of the layers, where they are given; they decide the number of stages."""
    min_samples: float = 1.0
    """Of a micro-batch."""
    kinds: tuple[str, ...] = OTHER_KINDS
    """Schedules beside 1F1B that ``schedule="auto"`` may mean."""
    equal_shares: bool = True
    """Whether replicas take equal numbers of micro-batches; the data of others must be dealt in unlike shares."""
    equal_counts: bool = True
    """Whether all stages have equally many replicas, which the runtime needs; else all share one batch of the step."""
    memory_share: float = 0.9
    """Of each device's memory, what plans may fill: the rest is for the device's context and for fragmentation."""
    exchange_s: float = 0.0
    optimizer_state_ratio: float = 2.0
    shards_optimizer: bool = False
    """Whether the replicas of a stage share its optimizer state."""

    def __post_init__(self) -> None:
        if not any(any(self.cost.layers_s(work)) for work in (Work.FORWARD, Work.BACKWARD)):
            raise ConfigurationError("all layers of the profile take 0 seconds: nothing can be compared; measure again")
        known = ("auto", ONE_F_ONE_B, GPIPE, *OTHER_KINDS)
        if self.schedule not in known:
            raise ConfigurationError(f"schedule={self.schedule!r} is not known; set one of {', '.join(known)}")
        if self.cuts is not None and self.num_stages not in ("auto", len(self.cuts) + 1):
            raise ConfigurationError(
                f"{len(self.cuts)} cuts make {len(self.cuts) + 1} stages, but num_stages is {self.num_stages}"
            )
        if not self.equal_counts and self.batch_of != "step":
            raise ConfigurationError(
                "stages with unlike numbers of replicas share one batch: give that of the step, not that of a replica"
            )
        if not 0 < self.memory_share <= 1:
            raise ConfigurationError(f"memory_share must be above 0 and at most 1, got {self.memory_share}")
        most = min(self.topology.world_size, self.cost.num_layers)
        is_unlike = not self.equal_counts and self.num_stages != "auto" and self.num_stages <= most
        if not self.layouts() and not is_unlike:
            wanted = f"num_stages={self.num_stages} x num_replicas={self.num_replicas}"
            if self.possible_replicas is not None:
                wanted += f" (the data can be shared by {', '.join(map(str, self.possible_replicas))})"
            raise ConfigurationError(
                f"{wanted} does not use the {self.topology.world_size} devices with at most one stage for each of the "
                f"{self.cost.num_layers} layers; set numbers whose product is {self.topology.world_size}"
            )

    def optimizer_shares(self, num_replicas: int) -> int:
        """How many replicas share a stage's optimizer state."""
        return num_replicas if self.shards_optimizer else 1

    def planned_network(self) -> LinkNetwork:
        """The same devices and links, with the memory that plans may fill."""
        devices = (
            replace(device, memory_bytes=max(1, int(self.memory_share * device.memory_bytes)))
            for device in self.topology.devices
        )
        return LinkNetwork(replace(self.topology, devices=tuple(devices)))

    def cuts_of(self, num_stages: int) -> Cuts | None:
        """The cuts that are given or that the rule says; None: they are searched."""
        if self.cuts is not None:
            return self.cuts
        found = partition_by_rule(self.partition, self.cost, num_stages)
        return None if found is None else found.cut_points

    @property
    def topology(self) -> ClusterTopology:
        """Devices and links."""
        return self.network.topology

    def layouts(self) -> list[tuple[int, int]]:
        """Numbers of stages and replicas that use all devices."""
        world_size = self.topology.world_size
        num_stages = self.num_stages if self.cuts is None else len(self.cuts) + 1
        return [
            (stages, world_size // stages)
            for stages in range(1, min(world_size, self.cost.num_layers) + 1)
            if not world_size % stages
            and num_stages in ("auto", stages)
            and self.num_replicas in ("auto", world_size // stages)
            and (self.possible_replicas is None or world_size // stages in self.possible_replicas)
        ]
