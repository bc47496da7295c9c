"""The ranks of a step while it is simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat

from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.schedule import Action, ActionType, Schedule
from lightning_autopipe.planner.reduction import Reduction
from lightning_autopipe.planner.workload import StageWork, StepWork
from lightning_autopipe.schedules.merging import merged_microbatches
from lightning_autopipe.schedules.stash import slice_counts

_NOT_THERE = -1.0


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """One rank of a replica, with the stages that it runs.

    A computation's *code* says which input it takes and which result it gives, counted through the rank's stages: twice
    the number of the micro-batch's slice, one more for a backward or its input part. The last code is for what takes
    nothing from others and gives nothing to them: weight parts.
    """

    index: int
    global_rank: int
    works: Sequence[StageWork]
    """Of its stages, in turn."""
    turn_of: Mapping[int, int]
    """Position in ``works`` of each of its stages."""
    num_slices: Sequence[int]
    """Of each micro-batch."""
    actions: list[Action] = field(default_factory=list)
    """Its computations, in order."""
    codes: list[int] = field(default_factory=list)
    """Of each computation."""
    seconds: list[float] = field(default_factory=list)
    """Of each computation."""
    num_actions: int = 0
    sends: dict[int, Action] = field(default_factory=dict)
    """By code, the send of the result, as far as the schedule names it."""
    arrived: list[float]
    """By code, when the input is there; negative before."""
    outputs: list[Output | None] = field(default_factory=list)
    """By code, where the result goes; None where nobody waits for it."""
    sent: list[tuple[int, float, float]] = field(default_factory=list)
    """Code, when it was handed over, and when it arrived."""
    position: int = 0
    """Of the computation that runs or waits."""
    starts: list[float] = field(default_factory=list)
    """When each computation began, as far as they did."""
    waits_since: float = -1.0
    """Since when it waits for an input; negative where it does not."""
    reductions: list[RunningReduction] = field(default_factory=list)
    num_reduced: int = 0
    end_s: float = 0.0
    """When it has computed and reduced everything."""

    @property
    def optimizer_s(self) -> float:
        """What all its stages take to step."""
        return sum(work.optimizer_s for work in self.works)


@dataclass(slots=True, eq=False)
class Output:
    """The message with the result of a computation."""

    receiver: Node
    """The rank that has the micro-batch on the next stage, or on the one before."""
    code_offset: int
    """What the receiver's code has more than the sender's."""
    num_bytes: float
    route: int = -1
    """Index of the route; -1: none that takes time for a byte."""
    latency_s: float = 0.0


@dataclass(slots=True, eq=False)
class RunningReduction:
    """A sum of gradients over ranks."""

    reduction: Reduction
    members: list[Node]
    routes: list[tuple[int, float]]
    """Of each hop of the ring, the index of its route (-1: none) and its latency."""
    num_here: int = 0
    """Members that have come; once it runs, hops that have ended."""
    start_s: float = 0.0
    end_s: float = 0.0


def make_nodes(step: StepWork) -> list[Node]:
    """All ranks of all replicas, before anything has run.

    Raises:
        PlanError: a schedule has more slices to a micro-batch than were priced, or several ranks of a stage have the
            same micro-batch.
    """
    nodes: list[Node] = []
    for works, schedule, ranks in zip(step.stages, step.schedules, step.list_ranks, strict=True):
        nodes.extend(_Pipeline(step, works, schedule).make_nodes(ranks, len(nodes)))
    return nodes


class _Pipeline:
    """Makes the nodes of one replica.

    Args:
        step: what it is of.
        works: of the replica's stages, or of its lists where stages have several.
        schedule: of the replica.
    """

    def __init__(self, step: StepWork, works: Sequence[StageWork], schedule: Schedule) -> None:
        self._works, self._schedule = works, schedule
        self._stage_indices = step.stage_indices or range(len(works))
        self._num_slices = slice_counts(schedule)
        self._most_slices = max(self._num_slices)
        for stage_index, work in enumerate(works):
            if self._most_slices > len(work.units):
                raise PlanError(
                    f"schedule {schedule.name!r} runs micro-batches in {self._most_slices} slices, but stage "
                    f"{stage_index} is priced for at most {len(work.units)}"
                )
        self._slices_by_code = [number for number in self._num_slices for _ in range(2 * self._most_slices)]
        self._num_codes = len(self._slices_by_code)  # of one stage

    def make_nodes(self, ranks: Sequence[int], first_index: int) -> list[Node]:
        """The nodes, numbered from the first one's index on."""
        num_lists = self._schedule.num_ranks
        last = max(self._stage_indices)
        nodes = []
        for position, actions in enumerate(self._schedule.actions_by_rank):
            own = self._stage_indices[position::num_lists]
            # The first stage has the batch, the last one the loss.
            inputs = [[0.0 if stage_index == end else _NOT_THERE for end in (0, last)] for stage_index in own]
            node = Node(
                index=first_index + position,
                global_rank=ranks[position],
                works=self._works[position::num_lists],
                turn_of={stage_index: turn for turn, stage_index in enumerate(own)},
                num_slices=self._num_slices,
                arrived=[*chain.from_iterable(pair * (self._num_codes // 2) for pair in inputs), 0.0],
            )
            self._read(node, actions)
            node.outputs = [None] * len(node.arrived)
            nodes.append(node)
        by_stage: list[list[Node]] = [[] for _ in range(last + 1)]
        for index, stage_index in enumerate(self._stage_indices):
            by_stage[stage_index].append(nodes[index % num_lists])
        owners = [self._owners(of_stage) for of_stage in by_stage]
        for index, stage_index in enumerate(self._stage_indices):
            for neighbour in (stage_index + 1, stage_index - 1):
                if 0 <= neighbour <= last:
                    sender, work = nodes[index % num_lists], self._works[index]
                    self._connect(sender, stage_index, work, neighbour, owners[neighbour])
        if self._most_slices > 1:
            for stage_index in range(last):
                self._merge(
                    nodes[stage_index], nodes[stage_index + 1], merged_microbatches(self._schedule, stage_index)
                )
        return nodes

    def _read(self, node: Node, actions: Sequence[Action]) -> None:
        """Takes computations from a list, and the names of sends; receives are posted early and take no time."""
        seconds = [
            [
                (
                    unit.forward_s,
                    unit.backward_s,
                    unit.backward_s - unit.backward_weight_s,
                    unit.backward_weight_s,
                )
                for unit in work.units
            ]
            for work in node.works
        ]
        forward, backward = ActionType.FORWARD, ActionType.BACKWARD
        turn_of, num_slices, num_codes, most_slices = node.turn_of, self._num_slices, self._num_codes, self._most_slices
        for action in actions:
            kind, microbatch_index = action.type, action.microbatch_index
            turn = turn_of[action.stage_index]
            code = turn * num_codes + 2 * (most_slices * microbatch_index + (action.slice_index or 0))
            if kind is forward:
                column = 0
            elif kind is backward:
                column = 1
                code += 1
            elif kind is ActionType.BACKWARD_INPUT:
                column = 2
                code += 1
            elif kind is ActionType.BACKWARD_WEIGHT:
                column = 3
                code = len(node.arrived) - 1
            else:
                if kind.is_send:
                    node.sends[code + (kind is ActionType.SEND_GRADIENT)] = action
                continue
            node.actions.append(action)
            node.codes.append(code)
            node.seconds.append(seconds[turn][num_slices[microbatch_index] - 1][column])
        node.num_actions = len(node.actions)

    def _owners(self, stage: Sequence[Node]) -> list[Node]:
        """By number of a micro-batch's slice, the rank of a stage that has it; of one rank, that alone.

        Raises:
            PlanError: several have it.
        """
        if len(stage) == 1:
            return [stage[0]]
        owners: dict[int, Node] = {}
        for node in stage:
            for code, action in zip(node.codes, node.actions, strict=True):
                other = owners.setdefault(code >> 1, node)
                if other is not node:
                    raise PlanError(
                        f"{action}: rank {other.global_rank} has this micro-batch; give it to one rank a stage"
                    )
        return [owners.get(number, stage[0]) for number in range(self._num_codes // 2)]

    def _connect(self, sender: Node, stage_index: int, work: StageWork, neighbour: int, owners: Sequence[Node]) -> None:
        """Lets the results of a stage go to a neighbour's ranks."""
        is_back = neighbour < stage_index
        begin = self._num_codes * sender.turn_of[stage_index]
        code_offset = self._num_codes * owners[0].turn_of[neighbour] - begin
        slices = self._slices_by_code[::2]
        found: dict[tuple[int, int], Output] = {}
        outputs = []
        for owner, number in zip(owners if len(owners) > 1 else repeat(owners[0]), slices, strict=False):
            key = owner.index, number
            if key not in found:
                unit = work.units[number - 1]
                found[key] = Output(owner, code_offset, unit.gradient_bytes if is_back else unit.sent_bytes)
            outputs.append(found[key])
        sender.outputs[begin + is_back : begin + self._num_codes : 2] = outputs

    def _merge(self, sender: Node, receiver: Node, microbatches: frozenset[int]) -> None:
        """Makes one message of the forwards' results of all slices of some micro-batches."""
        last_run, first_needed = (
            {
                action.microbatch_index: (code, action)
                for code, action in order(list(zip(node.codes, node.actions, strict=True)))
                if action.type is ActionType.FORWARD and action.microbatch_index in microbatches
            }
            for node, order in ((sender, iter), (receiver, reversed))
        )
        for microbatch_index, (last, action) in last_run.items():
            first, _ = first_needed[microbatch_index]
            begin = 2 * self._most_slices * microbatch_index
            codes = range(begin, begin + 2 * self._num_slices[microbatch_index], 2)
            num_bytes = 0.0
            for code in codes:
                output = sender.outputs[code]
                assert output is not None
                num_bytes += output.num_bytes
                sender.outputs[code] = None
                sender.sends.pop(code, None)
                receiver.arrived[code] = _NOT_THERE if code == first else 0.0
            sender.outputs[last] = Output(receiver, first - last, num_bytes)
            sender.sends[last] = replace(action, type=ActionType.SEND_ACTIVATION, slice_index=None)
