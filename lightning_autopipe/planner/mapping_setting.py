"""What is given when devices are chosen for stages."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.planner.cost import CostModel
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.objective import PipelineSetting
from lightning_autopipe.planner.placements import Grid
from lightning_autopipe.planner.replica import Cuts, Depths
from lightning_autopipe.schedules.one_f_one_b import default_depths


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingSetting:
    """Layers, a cluster, and into how many stages and replicas they are put.

    Raises:
        ConfigurationError: there are fewer devices than stages times replicas.
    """

    cost: CostModel
    network: LinkNetwork
    """With the topology whose devices are chosen from."""
    num_stages: int
    num_replicas: int = 1
    num_microbatches: int
    """Of all replicas together."""
    equal_shares: bool = False
    """Whether replicas take equal numbers of micro-batches even where they are unlike, as the runtime needs it."""
    depths: Depths = ()
    """Warm-up of each stage; empty: as many micro-batches as stages follow."""
    microbatch_size: float | None = None
    """Samples; None: as profiled."""
    exchange_s: float = 0.0
    """What all ranks take to agree on one number at the step's end."""
    optimizer_state_ratio: float = 2.0
    """Bytes of optimizer state for each byte of trainable parameters."""
    optimizer_shares: int = 1
    """Replicas that share a stage's optimizer state."""
    cuts: Cuts | None = None
    """Of the layers, where they are given; None: they are chosen."""

    def __post_init__(self) -> None:
        needed = self.num_stages * self.num_replicas
        if self.num_stages < 1 or self.num_replicas < 1 or needed > self.topology.world_size:
            raise ConfigurationError(
                f"{self.num_stages} stages x {self.num_replicas} replicas need {needed} devices, at least 1 each; the "
                f"cluster has {self.topology.world_size}: set fewer stages (num_stages) or replicas (num_replicas)"
            )
        if self.num_microbatches < self.num_replicas:
            raise ConfigurationError(
                f"{self.num_microbatches} micro-batches for {self.num_replicas} replicas: each takes at least one; set "
                "more micro-batches (num_microbatches) or fewer replicas (num_replicas)"
            )
        if not self.depths:
            object.__setattr__(self, "depths", default_depths(self.num_stages))

    @property
    def topology(self) -> ClusterTopology:
        """Devices and links."""
        return self.network.topology

    def pipelines(self, grid: Grid, num_microbatches: tuple[int, ...]) -> PipelineSetting:
        """The same with devices chosen, and the micro-batches of each replica."""
        devices = self.topology.devices
        return PipelineSetting(
            cost=self.cost,
            num_stages=self.num_stages,
            num_microbatches=num_microbatches,
            devices=tuple(tuple(devices[rank] for rank in ranks) for ranks in grid),
            network=self.network,
            microbatch_size=self.microbatch_size,
            exchange_s=self.exchange_s,
            optimizer_state_ratio=self.optimizer_state_ratio,
            optimizer_shares=self.optimizer_shares,
            cuts=self.cuts,
        )
