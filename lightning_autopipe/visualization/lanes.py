"""A timeline sorted for showing: a lane for each rank, its bars, and the messages between lanes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.schedule import Action, ActionType
from lightning_autopipe.core.timeline import StepEnd, Timeline, TimelineEvent

Ranks = Sequence[Sequence[int]]
"""``ranks[r][s]``: the global rank that runs stage s of replica r."""


class BarKind(Enum):
    """What a rank is busy with; the value is its name in legends."""

    FORWARD = "forward"
    FORWARD_SLICE = "forward of a slice"
    BACKWARD = "backward"
    BACKWARD_SLICE = "backward of a slice"
    BACKWARD_INPUT = "backward, inputs"
    BACKWARD_WEIGHT = "backward, weights"
    TIED_GRADIENTS = "sum of tied gradients"
    GRADIENTS = "sum of gradients"
    EXCHANGE = "exchange"
    OPTIMIZER = "optimizer"


COMPUTE = (
    BarKind.FORWARD,
    BarKind.FORWARD_SLICE,
    BarKind.BACKWARD,
    BarKind.BACKWARD_SLICE,
    BarKind.BACKWARD_INPUT,
    BarKind.BACKWARD_WEIGHT,
)
"""Forwards and backwards."""

_OF_STEP_END = {
    StepEnd.TIED_GRADIENTS: BarKind.TIED_GRADIENTS,
    StepEnd.GRADIENTS: BarKind.GRADIENTS,
    StepEnd.EXCHANGE: BarKind.EXCHANGE,
    StepEnd.OPTIMIZER: BarKind.OPTIMIZER,
}
_OF_PART = {ActionType.BACKWARD_INPUT: BarKind.BACKWARD_INPUT, ActionType.BACKWARD_WEIGHT: BarKind.BACKWARD_WEIGHT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What a rank does for some time."""

    kind: BarKind
    event: TimelineEvent

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.event.end_s - self.event.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One rank and all that it does, in the order of time."""

    global_rank: int
    stage_indices: tuple[int, ...]
    """The stages that it runs, ascending."""
    replica_index: int
    bars: tuple[Bar, ...]

    @property
    def stage_index(self) -> int:
        """The first stage that it runs."""
        return self.stage_indices[0]

    @property
    def stages_text(self) -> str:
        """All of them."""
        return ", ".join(map(str, self.stage_indices))

    @property
    def label(self) -> str:
        """What a lane is called."""
        return f"stage{'s' if len(self.stage_indices) > 1 else ''} {self.stages_text} · rank {self.global_rank}"

    @property
    def busy_s(self) -> float:
        """Seconds in which the rank computes or sums gradients; an exchange is waiting."""
        return sum(bar.seconds for bar in self.bars if bar.kind is not BarKind.EXCHANGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A value on its way from one rank to another."""

    action: Action
    event: TimelineEvent
    sender: int
    receiver: int
    num_bytes: float | None
    """None where unknown."""

    @property
    def is_activation(self) -> bool:
        """Whether it goes to the next stage; else it is a gradient for the stage before."""
        return self.action.type is ActionType.SEND_ACTIVATION


def make_lanes(timeline: Timeline, ranks: Ranks = ()) -> tuple[Lane, ...]:
    """The lanes of a timeline: replica by replica, in each the stages from first to last.

    Where stages have unlike numbers of ranks there are no replicas: all ranks of each stage, stage by stage.

    Args:
        timeline: to be shown.
        ranks: which rank runs what; empty: as the timeline itself tells.

    Raises:
        PlanError: the timeline does not tell, or has events of a rank that is not in ``ranks``.
    """
    bars: dict[int, list[Bar]] = defaultdict(list)
    for event in timeline.events:
        kind = _kind(event.action)
        if kind is not None:
            bars[event.global_rank].append(Bar(kind=kind, event=event))
    by_stage = () if ranks else stage_ranks(timeline)
    places: list[tuple[int, tuple[int, ...], int]]
    if len(set(map(len, by_stage))) > 1:
        places = [(rank, (stage_index,), 0) for stage_index, of_stage in enumerate(by_stage) for rank in of_stage]
    else:
        places = [
            (rank, stages, replica_index)
            for replica_index, pipeline in enumerate(ranks or pipeline_ranks(timeline))
            for rank, stages in _stages_of_ranks(pipeline).items()
        ]
    lanes = []
    for global_rank, stages, replica_index in places:
        own = sorted(bars.pop(global_rank, ()), key=lambda bar: (bar.event.start_s, bar.event.end_s))
        lanes.append(Lane(global_rank=global_rank, stage_indices=stages, replica_index=replica_index, bars=tuple(own)))
    if bars:
        raise PlanError(f"the timeline has events of ranks {sorted(bars)}, which run no stage of a replica")
    return tuple(lanes)


def make_messages(
    timeline: Timeline, ranks: Ranks = (), boundary_bytes: Sequence[tuple[float, float]] = ()
) -> tuple[Message, ...]:
    """The messages between stages, in the order in which they are handed over.

    Args:
        timeline: to be shown.
        ranks: as for `make_lanes`.
        boundary_bytes: ``boundary_bytes[s]``: bytes of the activations from stage s to s + 1, and of the gradients
            back, for a whole micro-batch; empty where unknown.
    """
    receiver_of = _receivers(timeline, ranks)
    num_slices = _slice_counts(event.action for event in timeline.events)
    messages = []
    for event in timeline.events:
        action = event.action
        if not isinstance(action, Action) or not action.type.is_send:
            continue
        is_activation = action.type is ActionType.SEND_ACTIVATION
        num_bytes = None
        if boundary_bytes:
            cut = action.stage_index if is_activation else action.stage_index - 1
            whole = boundary_bytes[cut][0 if is_activation else 1]
            num_bytes = whole / num_slices.get(action.microbatch_index, 1)
        messages.append(
            Message(
                action=action,
                event=event,
                sender=event.global_rank,
                receiver=receiver_of(event.global_rank, action),
                num_bytes=num_bytes,
            )
        )
    return tuple(sorted(messages, key=lambda message: (message.event.start_s, message.event.end_s)))


def stage_ranks(timeline: Timeline) -> tuple[tuple[int, ...], ...]:
    """Which ranks run each stage, ascending, as a timeline's own actions tell.

    Raises:
        PlanError: a rank computes nothing.
    """
    ranks_of: dict[int, set[int]] = defaultdict(set)
    for event in timeline.events:
        if isinstance(event.action, Action):
            ranks_of[event.action.stage_index].add(event.global_rank)
    silent = sorted({event.global_rank for event in timeline.events}.difference(*ranks_of.values()))
    if silent or not ranks_of:
        raise PlanError(f"the timeline does not tell which stages ranks {silent or 'all'} run; give ranks=")
    return tuple(tuple(sorted(ranks_of[index])) for index in range(1 + max(ranks_of)))


def pipeline_ranks(timeline: Timeline) -> Ranks:
    """Which rank runs which stage of which replica, as a timeline's own actions tell.

    As `ParallelLayout` has it where that fits; else the ranks of each stage belong to the replicas in their order.

    Raises:
        PlanError: a rank computes nothing, or stages have unlike numbers of ranks.
    """
    by_stage = stage_ranks(timeline)
    counts = [len(ranks) for ranks in by_stage]
    if len(set(counts)) > 1:
        raise PlanError(f"the timeline has stages of {counts} ranks, so there are no replicas")
    layout = ParallelLayout(num_stages=len(by_stage), num_replicas=counts[0])
    if all(layout.stage_ranks(index) == tuple(ranks) for index, ranks in enumerate(by_stage)):
        return tuple(layout.pipeline_ranks(replica_index) for replica_index in range(layout.num_replicas))
    return tuple(zip(*by_stage, strict=True))


def _receivers(timeline: Timeline, ranks: Ranks) -> Callable[[int, Action], int]:
    """Who gets what a rank sends: the next stage of its replica, or whoever has the micro-batch there."""
    if not ranks and len(set(map(len, stage_ranks(timeline)))) > 1:
        owners = {
            (event.action.stage_index, event.action.microbatch_index): event.global_rank
            for event in timeline.events
            if isinstance(event.action, Action) and event.action.type.is_compute
        }
        return lambda _, action: owners[action.peer_stage_index, action.microbatch_index]
    pipeline_of = {rank: pipeline for pipeline in ranks or pipeline_ranks(timeline) for rank in pipeline}
    return lambda sender, action: pipeline_of[sender][action.peer_stage_index]


def _stages_of_ranks(pipeline: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The stages that each rank of a pipeline runs, in the order of the first ones."""
    return {rank: tuple(stage for stage, other in enumerate(pipeline) if other == rank) for rank in pipeline}


def _kind(action: Action | StepEnd) -> BarKind | None:
    """None for a message."""
    if isinstance(action, StepEnd):
        return _OF_STEP_END[action]
    if not action.type.is_compute:
        return None
    if action.type in _OF_PART:
        return _OF_PART[action.type]
    if action.type is ActionType.FORWARD:
        return BarKind.FORWARD if action.slice_index is None else BarKind.FORWARD_SLICE
    return BarKind.BACKWARD if action.slice_index is None else BarKind.BACKWARD_SLICE


def _slice_counts(actions: Iterable[Action | StepEnd]) -> Counter[int]:
    slices = {
        (action.microbatch_index, action.slice_index)
        for action in actions
        if isinstance(action, Action) and action.slice_index is not None
    }
    return Counter(microbatch_index for microbatch_index, _ in slices)
