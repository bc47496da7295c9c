"""What one step of a pipeline has to do, priced: the input of the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.schedule import Schedule
from lightning_autopipe.planner.links import LinkNetwork, Route
from lightning_autopipe.planner.reduction import Reduction, step_end_reductions


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWork:
    """What one micro-batch, or one slice of it, takes on a stage."""

    forward_s: float
    backward_s: float
    """Of the whole backward."""
    backward_weight_s: float = 0.0
    """What of that its weight part takes, where a schedule splits it; the input part takes the rest."""
    sent_bytes: float = 0
    """To the next stage."""
    gradient_bytes: float = 0
    """Back to the stage before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """What one stage of one replica has to do on its device, and holds."""

    units: tuple[UnitWork, ...]
    """``units[k - 1]``: one of k slices of a micro-batch; ``units[0]`` is a whole one."""
    optimizer_s: float = 0.0
    reduced_bytes: float = 0
    """Bytes of the gradients that its replicas sum."""
    fixed_bytes: int = 0
    """Memory in use whatever is in flight."""
    stash_bytes: int = 0
    """What a micro-batch keeps between its forward and its backward; a slice its share of that."""
    working_bytes: int = 0
    """The most that the one that runs has alive, in place of what it keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """One step: replicas of a pipeline, each with its own devices and number of micro-batches.

    A schedule has a list for each rank of a pipeline, which runs a stage, or several that go round the ranks. Or stages
    have unlike numbers of ranks: then there is one pipeline, and ``stage_indices`` tells of which stage each list is; a
    value goes to the rank that has its micro-batch on the next stage.
    """

    stages: tuple[tuple[StageWork, ...], ...]
    """``stages[r][s]``: what stage s of replica r takes, run by list ``s % num_ranks`` of the schedule; where stages
    have several ranks, ``stages[r][i]`` is what list i takes."""
    schedules: tuple[Schedule, ...]
    """Of each replica; all of equally many ranks and stages."""
    ranks: tuple[tuple[int, ...], ...] = ()
    """``ranks[r][i]``: the global rank that runs list i of replica r; empty: as `ParallelLayout` has it."""
    stage_indices: tuple[int, ...] = ()
    """The stage of each list of a replica, where stages have several; empty: ``stages`` are those of one replica."""
    network: LinkNetwork | None = None
    """Links between the ranks; None: whatever is sent is there at once."""
    tied_bytes: tuple[tuple[tuple[int, ...], float], ...] = ()
    """Stages that share parameters, and the bytes of their gradients: summed over these stages of all replicas."""
    exchange_s: float = 0.0
    """What it takes all ranks, once all have come so far, to agree on the loss's weight and the gradients' norm."""

    def __post_init__(self) -> None:
        if not self.schedules or len(self.schedules) != len(self.stages):
            raise PlanError(f"StepWork: {len(self.schedules)} schedules for {len(self.stages)} replicas; give one each")
        sizes = {len(stages) for stages in self.stages} | {schedule.num_stages for schedule in self.schedules}
        if len(sizes) > 1:
            raise PlanError(f"StepWork: replicas and their schedules have unlike numbers of stages: {sorted(sizes)}")
        counts = {schedule.num_ranks for schedule in self.schedules}
        if len(counts) > 1:
            raise PlanError(f"StepWork: the schedules of replicas have unlike numbers of ranks: {sorted(counts)}")
        if self.ranks:
            used = [rank for ranks in self.ranks for rank in ranks]
            if [len(ranks) for ranks in self.ranks] != [schedule.num_ranks for schedule in self.schedules]:
                raise PlanError(
                    f"StepWork: ranks must name one rank for each list of each replica's schedule, got {self.ranks}"
                )
            if len(set(used)) < len(used):
                raise PlanError(f"StepWork: a rank runs one list of one replica, but ranks are {self.ranks}")
        if self.stage_indices:
            num_lists, found = len(self.stages[0]), set(self.stage_indices)
            if len(self.stage_indices) != num_lists or found != set(range(len(found))):
                raise PlanError(
                    f"StepWork: stage_indices must name the stage of each of {num_lists} lists and leave none out, got "
                    f"{self.stage_indices}"
                )

    @property
    def num_stages(self) -> int:
        """Stages of each replica."""
        return len(self.lists_by_stage)

    @property
    def num_lists(self) -> int:
        """Ranks of each replica, each with a list of its own."""
        return self.schedules[0].num_ranks

    @property
    def lists_by_stage(self) -> tuple[tuple[int, ...], ...]:
        """For each stage its positions in ``stages[r]``: one, or one for each of its ranks."""
        stage_indices = self.stage_indices or range(len(self.stages[0]))
        return tuple(
            tuple(index for index, stage_index in enumerate(stage_indices) if stage_index == stage)
            for stage in range(max(stage_indices) + 1)
        )

    @property
    def list_ranks(self) -> tuple[tuple[int, ...], ...]:
        """``list_ranks[r][i]``: the global rank that runs ``stages[r][i]``."""
        ranks = self.ranks
        if not ranks:
            layout = ParallelLayout(num_stages=self.num_lists, num_replicas=len(self.stages))
            ranks = tuple(layout.pipeline_ranks(replica_index) for replica_index in range(len(self.stages)))
        return tuple(of_replica * self.schedules[0].stages_per_rank for of_replica in ranks)

    @property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """``stage_ranks[s]``: all ranks of stage s, in the order of the ring that sums their gradients."""
        return tuple(tuple(ranks[index] for ranks in self.list_ranks for index in of) for of in self.lists_by_stage)

    def route(self, sender: int, receiver: int) -> Route:
        """The way between two ranks."""
        return Route() if self.network is None else self.network.route(sender, receiver)

    def reductions(self) -> list[Reduction]:
        """The sums of gradients at the step's end, in the order in which a rank goes through its own."""
        reduced_bytes = [self.stages[0][first].reduced_bytes for first, *_ in self.lists_by_stage]
        return step_end_reductions(self.stage_ranks, self.tied_bytes, reduced_bytes)
