"""The simulator against steps computed by hand and published figures."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopipe.core import Action, ActionType, Link, PlanError, Schedule, StepEnd, Timeline
from lightning_autopipe.planner import simulate
from lightning_autopipe.planner.recurrence import one_f_one_b_ends
from lightning_autopipe.planner.simulator import simulated_s
from lightning_autopipe.planner.workload import StageWork, StepWork, UnitWork
from lightning_autopipe.schedules import (
    forward_only,
    gpipe,
    lower,
    one_f_one_b,
    peak_stash_size,
    sliced_one_f_one_b,
)
from tests.planner.steps import a_step, servers


def spans(timeline: Timeline, global_rank: int) -> list[str]:
    """Computations of a rank as ``0F1 2-3``."""
    return [
        f"{event.action} {event.start_s:g}-{event.end_s:g}"
        for event in timeline.events
        if event.global_rank == global_rank and isinstance(event.action, Action) and event.action.type.is_compute
    ]


def test_two_stages_by_hand() -> None:
    timeline = simulate(a_step(one_f_one_b(2, 3), [(1, 2), (1, 3)], stash_bytes=10))
    assert spans(timeline, 0) == ["0F0 0-1", "0F1 1-2", "0B0 5-7", "0F2 7-8", "0B1 9-11", "0B2 13-15"]
    assert spans(timeline, 1) == ["1F0 1-2", "1B0 2-5", "1F1 5-6", "1B1 6-9", "1F2 9-10", "1B2 10-13"]
    assert timeline.step_s == 15
    assert timeline.bubble_fraction == pytest.approx(1 - (9 + 12) / 30)
    # Stage 0 keeps one micro-batch while it works on another one; stage 1 works on its only one.
    assert timeline.peak_bytes == (10, 0)


def test_lists_are_the_same_with_and_without_sends() -> None:
    network = servers("AB", Link(a="A", b="B", bandwidth_bytes_per_s=4.0))
    for schedule in (one_f_one_b(2, 3), gpipe(2, 3), forward_only(2, 3), sliced_one_f_one_b(2, 3, num_sliced_first=1)):
        plain = a_step(schedule, [(1, 2), (2, 1)], num_bytes=2, network=network)
        lowered = a_step(lower(schedule), [(1, 2), (2, 1)], num_bytes=2, network=network)
        assert simulate(plain) == simulate(lowered)
        assert simulate(plain) == simulate(plain)


def test_a_message_waits_for_the_one_before_it_and_arrives_later() -> None:
    """A message takes 4 s on the link and 1 s of latency; forwards are made faster than they are sent."""
    network = servers("AB", Link(a="A", b="B", bandwidth_bytes_per_s=0.5, latency_s=1.0))
    timeline = simulate(a_step(forward_only(2, 3), [(1, 0), (2, 0)], num_bytes=2, network=network))
    assert spans(timeline, 1) == ["1F0 6-8", "1F1 10-12", "1F2 14-16"]
    sends = [f"{e.action} {e.start_s:g}-{e.end_s:g}" for e in timeline.events if str(e.action).startswith("0SA")]
    assert sends == ["0SA0 1-6", "0SA1 2-10", "0SA2 3-14"]


SLOW = {
    sharing: Link(a="A", b="B", bandwidth_bytes_per_s=1.0, sharing=sharing)  # 20 bytes take 20 ms
    for sharing in ("fair", "fifo")
}


@pytest.mark.parametrize(
    ("placement", "depths", "sharing", "expected"),
    [
        ("AABB", [3, 2, 1, 0], "fair", 890),
        ("AABB", [7, 5, 3, 1], "fair", 650),  # twice as many in flight
        ("AABB", [5, 4, 1, 0], "fair", 610),
        ("AABB", [3, 2, 1, 0], "fifo", 890),
        ("ABAB", [3, 2, 1, 0], "fair", 1398),
        ("ABAB", [3, 2, 1, 0], "fifo", 1300),
        ("ABAB", [6, 5, 3, 0], "fifo", 1070),
        ("ABAB", [9, 7, 5, 0], "fair", 1050),
        ("ABAB", [9, 7, 5, 0], "fifo", 1100),
    ],
)
def test_four_stages_over_a_slow_link(placement: str, depths: list[int], sharing: str, expected: int) -> None:
    step = a_step(
        lower(one_f_one_b(4, 16, depths)), [(10, 20)] * 4, num_bytes=20, network=servers(placement, SLOW[sharing])
    )
    assert round(simulate(step).step_s) == expected


def counted_in_units(num_first: int, num_last: int, depths: Sequence[int]) -> Schedule:
    """16 micro-batches, some in halves, with a warm-up that counts a half like a whole."""
    units: list[tuple[int, int | None]] = []
    for index in range(16):
        units += [(index, 0), (index, 1)] if index < num_first or index >= 16 - num_last else [(index, None)]

    def action(action_type: ActionType, stage: int, unit: tuple[int, int | None]) -> Action:
        return Action(type=action_type, stage_index=stage, microbatch_index=unit[0], slice_index=unit[1])

    lists = []
    for stage, depth in enumerate(depths):
        actions = [action(ActionType.FORWARD, stage, unit) for unit in units[:depth]]
        for position, unit in enumerate(units):
            if depth + position < len(units):
                actions.append(action(ActionType.FORWARD, stage, units[depth + position]))
            actions.append(action(ActionType.BACKWARD, stage, unit))
        lists.append(tuple(actions))
    return Schedule(name="units", actions_by_rank=tuple(lists), num_microbatches=16)


@pytest.mark.parametrize(
    ("schedule", "step_s", "stash"),
    [
        (one_f_one_b(8, 16), 69.0, 8),
        (gpipe(8, 16), 69.0, 16),
        (one_f_one_b(8, 8), 45.0, 8),
        (sliced_one_f_one_b(8, 16, num_sliced_first=2), 65.5, 8),
        (sliced_one_f_one_b(8, 16, num_sliced_first=2, num_sliced_last=7), 59.0, 8),
        (sliced_one_f_one_b(8, 16, num_sliced_first=8, num_sliced_last=8), 58.5, 8),
        (sliced_one_f_one_b(8, 8, num_sliced_first=4, num_sliced_last=4), 34.5, 8),
        (counted_in_units(2, 0, range(7, -1, -1)), 67.0, 8),
        (counted_in_units(2, 0, range(14, -1, -2)), 65.5, 14.5),
        (counted_in_units(2, 7, range(14, -1, -2)), 58.5, 11),
    ],
)
def test_eight_even_stages(schedule: Schedule, step_s: float, stash: float) -> None:
    timeline = simulate(a_step(schedule, [(1, 2)] * 8, stash_bytes=100))
    assert timeline.step_s == step_s
    assert peak_stash_size(schedule, 0) == stash
    assert max(timeline.peak_bytes) <= 100 * stash


def test_small_halves_that_cost_more_pay_less() -> None:
    """Halves that take 55 % of a whole: both ends in halves beat twice as many halves."""
    whole, half = UnitWork(forward_s=1, backward_s=2), UnitWork(forward_s=0.55, backward_s=1.1)

    def step_s(schedule: Schedule, *units: UnitWork) -> float:
        return simulate(StepWork(stages=((StageWork(units=units),) * 8,), schedules=(schedule,))).step_s

    assert step_s(one_f_one_b(8, 32), half) == pytest.approx(64.35)
    sliced = [
        step_s(sliced_one_f_one_b(8, 16, num_sliced_first=first, num_sliced_last=7), whole, half) for first in (2, 3, 4)
    ]
    assert min(sliced) < 64.35
    with pytest.raises(PlanError, match="runs micro-batches in 2 slices, but stage 0 is priced for at most 1"):
        step_s(sliced_one_f_one_b(8, 16, num_sliced_first=1), whole)


def with_two_replicas(num_microbatches: tuple[int, int] = (2, 2), **changes: object) -> StepWork:
    work = StageWork(units=(UnitWork(forward_s=1, backward_s=1),), reduced_bytes=8, optimizer_s=0.5)
    fields: dict[str, object] = {
        "stages": ((work, work), (work, work)),
        "schedules": tuple(one_f_one_b(2, number) for number in num_microbatches),
        "ranks": ((0, 1), (2, 3)),
    }
    return StepWork(**(fields | changes))  # type: ignore[arg-type]


def ends_of(timeline: Timeline, kind: StepEnd) -> dict[int, tuple[float, float]]:
    return {event.global_rank: (event.start_s, event.end_s) for event in timeline.events if event.action is kind}


def test_the_end_of_a_step_by_hand() -> None:
    """Stage 1 has computed at 5, stage 0 at 6; in a ring of two each sends 8 bytes, in two pieces with a latency each.

    Stage 1 sends alone for 1 s; its other 4 bytes share the link until 8, the last 4 of stage 0 go alone again.
    """
    network = servers("AABB", Link(a="A", b="B", bandwidth_bytes_per_s=4.0, latency_s=0.25))
    timeline = simulate(with_two_replicas(network=network, exchange_s=0.125))
    assert ends_of(timeline, StepEnd.GRADIENTS) == {1: (5, 8.5), 3: (5, 8.5), 0: (6, 9.5), 2: (6, 9.5)}
    assert ends_of(timeline, StepEnd.EXCHANGE) == dict.fromkeys(range(4), (9.5, 9.625))
    assert ends_of(timeline, StepEnd.OPTIMIZER) == dict.fromkeys(range(4), (9.625, 10.125))
    assert timeline.step_s == 10.125


@pytest.mark.parametrize("exchange_s", [0.0, 0.5])
@pytest.mark.parametrize("tied_bytes", [(), (((0, 1), 2.0),)])
def test_the_seconds_alone_are_those_of_the_timeline(exchange_s: float, tied_bytes: tuple[object, ...]) -> None:
    step = with_two_replicas((3, 1), exchange_s=exchange_s, tied_bytes=tied_bytes)
    assert simulated_s(step) == simulate(step).step_s


def test_reductions_take_turns_where_the_link_says_so() -> None:
    network = servers("AABB", Link(a="A", b="B", bandwidth_bytes_per_s=4.0, sharing="fifo"))
    timeline = simulate(with_two_replicas(network=network))
    assert ends_of(timeline, StepEnd.GRADIENTS) == {1: (5, 7), 3: (5, 7), 0: (6, 9), 2: (6, 9)}


def test_a_half_duplex_link_carries_both_directions_in_turns() -> None:
    network = servers("AABB", Link(a="A", b="B", bandwidth_bytes_per_s=4.0, duplex="half"))
    timeline = simulate(with_two_replicas(network=network))
    assert ends_of(timeline, StepEnd.GRADIENTS)[1] == (5, 12)  # 16 bytes alone for 1 s, then at half the rate for 6 s


def test_tied_gradients_are_summed_first_and_over_all_replicas() -> None:
    network = servers("AAAA")
    timeline = simulate(with_two_replicas(network=network, tied_bytes=(((0, 1), 4.0),)))
    assert ends_of(timeline, StepEnd.TIED_GRADIENTS) == dict.fromkeys(range(4), (6, 6))
    assert ends_of(timeline, StepEnd.GRADIENTS) == dict.fromkeys(range(4), (6, 6))


def test_replicas_have_their_own_numbers_of_microbatches() -> None:
    """8 devices of speed 1 and 4 of half of it, 96 micro-batches in all: equal shares 16 a device, by speed 10."""

    def step_s(fast: int, slow: int) -> float:
        def stage(seconds: float) -> tuple[StageWork]:
            return (StageWork(units=(UnitWork(forward_s=seconds, backward_s=seconds),)),)

        return simulate(
            StepWork(
                stages=(stage(0.5),) * 8 + (stage(1.0),) * 4,
                schedules=tuple(one_f_one_b(1, number) for number in [fast] * 8 + [slow] * 4),
            )
        ).step_s

    assert step_s(8, 8) == 16.0
    assert step_s(10, 4) == 10.0
    unequal = simulate(with_two_replicas((2, 5)))
    assert ends_of(unequal, StepEnd.GRADIENTS) == {1: (11, 11), 3: (11, 11), 0: (12, 12), 2: (12, 12)}


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        simulate(a_step(one_f_one_b(2, 2), [(1, 1), (1, 1)]))
        assert gc.isenabled() is is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_lists_that_wait_for_each_other_are_refused() -> None:
    lists = (("0F0", "0B0", "0F1", "0B1"), ("1F0", "1F1", "1B0", "1B1"))
    circular = Schedule(
        name="circular",
        actions_by_rank=tuple(tuple(map(Action.parse, names)) for names in lists),
        num_microbatches=2,
    )
    with pytest.raises(PlanError, match="cannot run to its end: 0B0 waits for what is never sent"):
        simulate(a_step(circular, [(1, 1), (1, 1)]))


def test_steps_that_contradict_themselves_are_refused() -> None:
    work = StageWork(units=(UnitWork(forward_s=1, backward_s=1),))
    with pytest.raises(PlanError, match="1 schedules for 2 replicas"):
        StepWork(stages=((work,), (work,)), schedules=(one_f_one_b(1, 1),))
    with pytest.raises(PlanError, match=r"unlike numbers of stages: \[1, 2\]"):
        StepWork(stages=((work,),), schedules=(one_f_one_b(2, 1),))
    with pytest.raises(PlanError, match="a rank runs one list of one replica"):
        StepWork(stages=((work, work),), schedules=(one_f_one_b(2, 1),), ranks=((0, 0),))


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.data())
def test_the_recurrence_gives_the_same_where_no_links_are_shared(data: st.DataObject) -> None:
    """Every boundary has a full-duplex link of its own, with a latency."""
    num_stages = data.draw(st.integers(1, 5))
    num_microbatches = data.draw(st.integers(1, 9))
    depths = sorted(data.draw(st.lists(st.integers(0, 10), min_size=num_stages, max_size=num_stages)), reverse=True)
    seconds = st.floats(0.0, 10.0)
    times = data.draw(st.lists(st.tuples(seconds, seconds), min_size=num_stages, max_size=num_stages))
    num_bytes = data.draw(st.sampled_from([0, 1, 7]))
    names = "ABCDE"[:num_stages]
    speed = st.floats(0.1, 100.0)
    links = [
        Link(a=a, b=b, bandwidth_bytes_per_s=data.draw(speed), latency_s=data.draw(seconds)) for a, b in pairwise(names)
    ]
    network = servers(names, *links)
    step = a_step(one_f_one_b(num_stages, num_microbatches, depths), times, num_bytes=num_bytes, network=network)
    hops = [(num_bytes / link.bandwidth_bytes_per_s, link.latency_s if num_bytes else 0.0) for link in links]
    ends = one_f_one_b_ends(
        [forward for forward, _ in times],
        [backward for _, backward in times],
        depths=depths,
        num_microbatches=num_microbatches,
        forward_hops=hops,  # type: ignore[arg-type]
        backward_hops=hops,  # type: ignore[arg-type]
    )
    timeline = simulate(step)
    assert timeline.step_s == pytest.approx(max(ends), rel=1e-12)
    for stage_index, end_s in enumerate(ends):
        own = [event for event in timeline.events if event.global_rank == stage_index]
        last = max(event.end_s for event in own if str(event.action)[1] in "FB")
        assert last == pytest.approx(end_s, rel=1e-12)
    if not num_bytes:
        without = one_f_one_b_ends(
            [forward for forward, _ in times],
            [backward for _, backward in times],
            depths=depths,
            num_microbatches=num_microbatches,
        )
        assert without == ends
