"""Simulated steps of ranks with several stages, of backwards in two parts, and of halves that go as one message."""

from __future__ import annotations

import pytest

from lightning_autopipe.core import Action, Link, PlanError, Schedule, StepEnd, Timeline
from lightning_autopipe.planner import simulate
from lightning_autopipe.planner.simulator import simulated_s
from lightning_autopipe.planner.workload import StageWork, StepWork, UnitWork
from lightning_autopipe.schedules import (
    get_schedule,
    interleaved_1f1b,
    lower,
    merged_microbatches,
    one_f_one_b,
    peak_stash_size,
    sliced_one_f_one_b,
    zero_bubble,
)
from tests.planner.steps import a_step, servers


def spans(timeline: Timeline, global_rank: int) -> list[str]:
    return [
        f"{event.action} {event.start_s:g}-{event.end_s:g}"
        for event in timeline.events
        if event.global_rank == global_rank and isinstance(event.action, Action) and event.action.type.is_compute
    ]


def sends(timeline: Timeline, global_rank: int) -> list[str]:
    return [
        f"{event.action} {event.start_s:g}-{event.end_s:g}"
        for event in timeline.events
        if event.global_rank == global_rank and isinstance(event.action, Action) and event.action.type.is_send
    ]


def written(*lists: str, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    return Schedule(
        name="written",
        actions_by_rank=tuple(tuple(map(Action.parse, text.split())) for text in lists),
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )


def a_stage(forward_s: float, backward_s: float, weight_s: float = 0.0, **fields: float) -> StageWork:
    unit = UnitWork(forward_s=forward_s, backward_s=backward_s, backward_weight_s=weight_s)
    return StageWork(units=(unit,), **fields)  # type: ignore[arg-type]


# Several stages a rank --------------------------------------------------------


def test_two_ranks_with_two_stages_each_by_hand() -> None:
    """A message takes 1 s in each direction; two stages of a rank have no message between them."""
    network = servers("AB", Link(a="A", b="B", bandwidth_bytes_per_s=2.0))
    unit = UnitWork(forward_s=1, backward_s=2, sent_bytes=2, gradient_bytes=2)
    stages = tuple(StageWork(units=(unit,), stash_bytes=size) for size in (8, 4, 2, 1))
    schedule = interleaved_1f1b(2, 1, 2)
    timeline = simulate(StepWork(stages=(stages,), schedules=(schedule,), ranks=((0, 1),), network=network))
    assert spans(timeline, 0) == ["0F0 0-1", "2F0 4-5", "2B0 10-12", "0B0 16-18"]
    assert spans(timeline, 1) == ["1F0 2-3", "3F0 6-7", "3B0 7-9", "1B0 13-15"]
    assert sends(timeline, 0) == ["0SA0 1-2", "2SA0 5-6", "2SG0 12-13"]
    assert sends(timeline, 1) == ["1SA0 3-4", "3SG0 9-10", "1SG0 15-16"]
    assert timeline.bubble_fraction == pytest.approx(1 - 2 * 6 / (2 * 18))
    # While a rank works on one stage's micro-batch it keeps that of the other one.
    assert timeline.peak_bytes == (8, 4)


def test_the_bubble_shrinks_with_the_stages_of_a_rank() -> None:
    for num_microbatches in (4, 5, 7, 8, 16):
        step_s = []
        for stages_per_rank in (1, 2, 4):
            stages = (a_stage(1 / stages_per_rank, 2 / stages_per_rank),) * (4 * stages_per_rank)
            schedule = interleaved_1f1b(4, num_microbatches, stages_per_rank)
            step_s.append(simulated_s(StepWork(stages=(stages,), schedules=(schedule,))))
        assert step_s == [3 * (num_microbatches + 3 / stages_per_rank) for stages_per_rank in (1, 2, 4)]


def test_memory_of_all_stages_of_a_rank_adds_up() -> None:
    """Stage 0 keeps two micro-batches of 8 bytes while its rank works on one of stage 2, which has no other."""
    schedule = written(
        "0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1", num_microbatches=2, stages_per_rank=2
    )
    first, third = a_stage(1, 1, fixed_bytes=100, stash_bytes=8, working_bytes=9), a_stage(1, 1, fixed_bytes=50)
    for working_bytes, expected in ((5, 150 + 2 * 8 + 5), (0, 150 + 8 + 9)):
        last = a_stage(1, 1, fixed_bytes=50, stash_bytes=1, working_bytes=working_bytes)
        step = StepWork(stages=((first, third, last, third),), schedules=(schedule,), ranks=((0, 1),))
        assert simulate(step).peak_bytes[0] == expected


def two_replicas(**fields: object) -> StepWork:
    stages = tuple(a_stage(1, 1, reduced_bytes=8 * (index + 1), optimizer_s=0.5) for index in range(4))
    values: dict[str, object] = {
        "stages": (stages, stages),
        "schedules": (interleaved_1f1b(2, 1, 2), interleaved_1f1b(2, 1, 2)),
        "ranks": ((0, 1), (2, 3)),
        "network": servers("AABB", Link(a="A", b="B", bandwidth_bytes_per_s=4.0, sharing="fifo")),
    }
    return StepWork(**(values | fields))  # type: ignore[arg-type]


def test_each_stage_of_a_rank_has_a_reduction_of_its_own() -> None:
    step = two_replicas()
    assert step.stage_ranks == ((0, 2), (1, 3), (0, 2), (1, 3))
    assert [(reduction.members, reduction.num_bytes) for reduction in step.reductions()] == [
        ((0, 2), 8),
        ((1, 3), 16),
        ((0, 2), 24),
        ((1, 3), 32),
    ]
    timeline = simulate(step)
    ends = [event for event in timeline.events if event.action is StepEnd.GRADIENTS]
    assert sum(event.global_rank == 0 for event in ends) == 2
    # Rank 1 has computed at 7 and sends 16 bytes; rank 0's 8 bytes wait for them, then each rank's second sum goes.
    assert [(event.start_s, event.end_s) for event in ends if event.global_rank == 1] == [(7, 11), (11, 21)]
    assert [(event.start_s, event.end_s) for event in ends if event.global_rank == 0] == [(8, 13), (13, 27)]
    # Both stages step, one after the other.
    assert timeline.step_s == 27 + 2 * 0.5
    assert simulated_s(step) == timeline.step_s


def test_stages_of_one_rank_that_share_parameters_need_no_sum_between_them() -> None:
    one = two_replicas(tied_bytes=(((0, 2), 4.0), ((0, 3), 2.0)))
    ties = [reduction.members for reduction in one.reductions() if reduction.is_tie]
    assert ties == [(0, 2), (0, 1, 2, 3)]
    stages, schedule = one.stages[0], interleaved_1f1b(2, 1, 2)
    alone = StepWork(stages=(stages,), schedules=(schedule,), tied_bytes=(((0, 2), 4.0),))
    assert alone.reductions() == []
    assert alone.list_ranks == ((1, 0, 1, 0),)  # as the layout has it: rank 0 runs the last stage


def test_ranks_are_named_once_for_all_their_stages() -> None:
    stages, schedule = two_replicas().stages[0], interleaved_1f1b(2, 1, 2)
    with pytest.raises(PlanError, match="ranks must name one rank for each list"):
        StepWork(stages=(stages,), schedules=(schedule,), ranks=((0, 1, 0, 1),))
    with pytest.raises(PlanError, match=r"unlike numbers of ranks: \[2, 4\]"):
        StepWork(stages=(stages, stages), schedules=(schedule, one_f_one_b(4, 1)))


# Backwards in two parts -------------------------------------------------------


def test_a_split_backward_by_hand() -> None:
    """Stage 1 hands its gradient on after 2 of 5 seconds; what it keeps is free after the rest of them."""
    schedule = written("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1I1 1W0 1W1", num_microbatches=2)
    stages = (a_stage(1, 4, 3, stash_bytes=10), a_stage(1, 5, 3, stash_bytes=10, working_bytes=1))
    timeline = simulate(StepWork(stages=(stages,), schedules=(schedule,), ranks=((0, 1),)))
    assert spans(timeline, 1) == ["1F0 1-2", "1I0 2-4", "1F1 4-5", "1I1 5-7", "1W0 7-10", "1W1 10-13"]
    assert spans(timeline, 0) == ["0F0 0-1", "0F1 1-2", "0B0 4-8", "0B1 8-12"]
    assert sends(timeline, 1) == ["1SG0 4-4", "1SG1 7-7"]
    assert timeline.step_s == 13
    assert timeline.peak_bytes == (10, 11)
    late = written("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", num_microbatches=2)
    assert simulate(StepWork(stages=(stages,), schedules=(late,), ranks=((0, 1),))).peak_bytes == (10, 1)


@pytest.mark.parametrize(("num_microbatches", "step_s"), [(16, 55.0), (8, 31.0)])
def test_zero_bubble_on_eight_even_stages(num_microbatches: int, step_s: float) -> None:
    schedule = zero_bubble(8, num_microbatches)
    step = StepWork(stages=((a_stage(1, 2, 1, stash_bytes=100),) * 8,), schedules=(schedule,))
    timeline = simulate(step)
    assert timeline.step_s == step_s
    assert max(peak_stash_size(schedule, stage) for stage in range(8)) <= 8
    assert max(timeline.peak_bytes) <= 800


# Slices that go as one message ------------------------------------------------


def test_merged_halves_by_hand() -> None:
    """On a link of 2 bytes a second, halves of 4 bytes, merged for the second micro-batch alone."""
    order = ["F0.0", "F0.1", "B0.0", "B0.1", "F1.0", "F1.1", "B1.0", "B1.1"]
    schedule = written(*(" ".join(f"{stage}{name}" for name in order) for stage in (0, 1)), num_microbatches=2)
    assert merged_microbatches(schedule, 0) == {1}
    network = servers("AB", Link(a="A", b="B", bandwidth_bytes_per_s=2.0, latency_s=1.0))
    timeline = simulate(a_step(schedule, [(2, 2), (2, 2)], num_bytes=8, network=network))
    activations = [text for text in sends(timeline, 0) if "SA" in text]
    # Two messages of 2 s and the latency; one of 4 s, handed over when the second half has ended.
    assert activations == ["0SA0.0 1-4", "0SA0.1 2-6", "0SA1 16-21"]
    assert spans(timeline, 1)[:2] == ["1F0.0 4-5", "1F0.1 6-7"]
    assert spans(timeline, 1)[4:6] == ["1F1.0 21-22", "1F1.1 22-23"]
    lowered = a_step(lower(schedule), [(2, 2), (2, 2)], num_bytes=8, network=network)
    assert simulate(lowered) == timeline
    assert simulated_s(lowered) == timeline.step_s


# All of them ------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        interleaved_1f1b(2, 3, 2),
        interleaved_1f1b(4, 6, 1),
        zero_bubble(4, 5),
        sliced_one_f_one_b(4, 8, num_sliced_first=2, num_sliced_last=3),
        get_schedule("gpipe", 4, 3),
    ],
    ids=lambda schedule: schedule.name,
)
def test_lists_are_the_same_with_and_without_sends(schedule: Schedule) -> None:
    names = "ABCD"[: schedule.num_ranks]
    network = servers(names, *(Link(a=a, b="switch", bandwidth_bytes_per_s=4.0) for a in names))
    units = tuple(
        UnitWork(forward_s=2 / k, backward_s=3 / k, backward_weight_s=1 / k, sent_bytes=2 / k, gradient_bytes=1 / k)
        for k in (1, 2)
    )
    stages = tuple(StageWork(units=units, stash_bytes=2) for _ in range(schedule.num_stages))
    ranks = (tuple(range(schedule.num_ranks)),)
    plain, lowered = (
        StepWork(stages=(stages,), schedules=(lists,), ranks=ranks, network=network)
        for lists in (schedule, lower(schedule))
    )
    assert simulate(plain) == simulate(lowered)
    assert simulated_s(plain) == simulate(plain).step_s


@pytest.mark.parametrize(
    ("placement", "depths", "expected"),
    [
        ("AABB", [3, 2, 1, 0], 845),
        ("AABB", [5, 4, 1, 0], 545),
        ("ABAB", [3, 2, 1, 0], 1240),
        ("ABAB", [6, 5, 3, 0], 1015),
    ],
)
def test_half_size_micro_batches_over_a_slow_link(placement: str, depths: list[int], expected: int) -> None:
    """Four stages, 32 micro-batches of 5 + 10 ms, 10 ms on the link: less stash than with 16 of twice the size."""
    link = Link(a="A", b="B", bandwidth_bytes_per_s=1.0, sharing="fifo")
    schedule = one_f_one_b(4, 32, depths)
    step = a_step(schedule, [(5, 10)] * 4, num_bytes=10, network=servers(placement, link))
    assert round(simulated_s(step)) == expected
    assert peak_stash_size(schedule, 0) / 2 < 4
