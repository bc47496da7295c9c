"""Which devices run which stage."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_autopipe.core._checks import check_index
from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.layout import ParallelLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMapping:
    """For each stage the global ranks that run it, one a replica; stages may have unlike numbers of them.

    Global rank 0 is the first one of the last stage, where the loss is logged.

    Raises:
        PlanError: a stage has no rank, a rank is named twice, or rank 0 is elsewhere.
    """

    stage_ranks: tuple[tuple[int, ...], ...]
    """``stage_ranks[s]``: of stage s, in the order of the replicas, which is that of the ring that sums gradients."""

    def __post_init__(self) -> None:
        if not isinstance(self.stage_ranks, tuple) or not all(isinstance(ranks, tuple) for ranks in self.stage_ranks):
            raise PlanError(f"DeviceMapping: stage_ranks must be a tuple of tuples of ranks, got {self.stage_ranks!r}")
        if not self.stage_ranks:
            raise PlanError("DeviceMapping: stage_ranks is empty; there is at least one stage")
        stage_of: dict[int, int] = {}
        for stage_index, ranks in enumerate(self.stage_ranks):
            if not ranks:
                raise PlanError(f"DeviceMapping: stage {stage_index} has no rank; give each stage at least one device")
            for rank in ranks:
                if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
                    raise PlanError(f"DeviceMapping: stage {stage_index} names {rank!r}; ranks are integers from 0 on")
                if rank in stage_of:
                    raise PlanError(
                        f"DeviceMapping: rank {rank} is on stage {stage_of[rank]} and on stage {stage_index}; a rank "
                        "runs one stage of one replica"
                    )
                stage_of[rank] = stage_index
        if self.stage_ranks[-1][0] != 0:
            raise PlanError(
                "DeviceMapping: global rank 0 must be the first one of the last stage, where the loss is logged; "
                f"there is rank {self.stage_ranks[-1][0]}"
            )

    @classmethod
    def of_layout(cls, layout: ParallelLayout) -> DeviceMapping:
        """The ranks of a layout."""
        return cls(stage_ranks=tuple(layout.stage_ranks(stage_index) for stage_index in range(layout.num_stages)))

    def layout(self) -> ParallelLayout:
        """The same as pipelines side by side, which is what the runtime runs.

        Raises:
            PlanError: stages have unlike numbers of ranks, or some ranks run nothing.
        """
        counts = [len(ranks) for ranks in self.stage_ranks]
        if self.num_replicas is None:
            raise PlanError(
                f"stages have unlike numbers of replicas ({counts}), which can be planned and simulated but not run "
                "yet; set num_replicas, or num_stages, to a number that divides the processes (autopipe plan "
                "--equal-replicas)"
            )
        if self.ranks != tuple(range(len(self.ranks))):
            raise PlanError(
                f"the mapping uses ranks {self.ranks} and leaves others idle, which can be planned but not run: start "
                f"{len(self.ranks)} processes, or plan with num_stages x num_replicas = the number of processes"
            )
        return ParallelLayout(num_stages=self.num_stages, num_replicas=self.num_replicas, ranks=self.stage_ranks)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stage_ranks)

    @property
    def num_replicas(self) -> int | None:
        """Devices of each stage; None where stages have unlike numbers of them."""
        counts = {len(ranks) for ranks in self.stage_ranks}
        return counts.pop() if len(counts) == 1 else None

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that run a stage, ascending."""
        return tuple(sorted(rank for ranks in self.stage_ranks for rank in ranks))

    def pipeline_ranks(self, replica_index: int) -> tuple[int, ...]:
        """The ranks of one replica's pipeline, stage by stage.

        Raises:
            PlanError: stages have unlike numbers of ranks, so that there are no pipelines of their own.
        """
        if self.num_replicas is None:
            counts = [len(ranks) for ranks in self.stage_ranks]
            raise PlanError(f"DeviceMapping: stages have {counts} ranks; with unlike numbers there is no replica's own")
        check_index("DeviceMapping", "replica_index", replica_index, self.num_replicas)
        return tuple(ranks[replica_index] for ranks in self.stage_ranks)

    def idle_ranks(self, world_size: int) -> tuple[int, ...]:
        """Ranks of a world that run nothing."""
        used = set(self.ranks)
        return tuple(rank for rank in range(world_size) if rank not in used)
