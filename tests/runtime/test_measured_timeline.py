from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from lightning_autopipe.core import Action, StepEnd, Timeline
from lightning_autopipe.planner import simulate
from lightning_autopipe.planner.workload import StageWork, StepWork, UnitWork
from lightning_autopipe.runtime.clocks import AlignedClock, ClockReading, read_clocks
from lightning_autopipe.runtime.measured_timeline import measured_timeline
from lightning_autopipe.runtime.timeline_recorder import Ran, RankStep, TimelineRecorder
from lightning_autopipe.schedules import get_schedule, one_f_one_b, sliced_one_f_one_b
from tests.harness import run_processes

SAME = AlignedClock(begin=ClockReading(own_s=0.0, rank_0_s=0.0), end=ClockReading(own_s=1.0, rank_0_s=1.0))


def shifted(offset_s: float, drift: float = 0.0) -> AlignedClock:
    """Of a rank whose clock shows ``offset_s`` more at first, and runs faster."""
    return AlignedClock(
        begin=ClockReading(own_s=offset_s, rank_0_s=0.0),
        end=ClockReading(own_s=offset_s + 100 * (1 + drift), rank_0_s=100.0),
    )


def observed(timeline: Timeline, clocks: dict[int, AlignedClock]) -> dict[int, RankStep]:
    """What observers on the ranks of a simulated step would have been told, by their own clocks."""
    ran: dict[int, list[Ran]] = {}
    for event in sorted(timeline.events, key=lambda event: event.end_s):
        if isinstance(event.action, StepEnd) or event.action.type.is_compute:
            clock = clocks[event.global_rank]
            rate = (clock.end.own_s - clock.begin.own_s) / 100
            start_s, end_s = (clock.begin.own_s + rate * (5 + seconds) for seconds in (event.start_s, event.end_s))
            ran.setdefault(event.global_rank, []).append((event.action, start_s, start_s, end_s))
    return {rank: RankStep(begin_s=0.0, ran=tuple(of_rank)) for rank, of_rank in ran.items()}


def a_step(schedule_name: str) -> StepWork:
    schedule = {
        "1f1b": one_f_one_b(3, 4),
        "sliced": sliced_one_f_one_b(3, 4, num_sliced_first=2),
        "gpipe": get_schedule("gpipe", 3, 4),
    }[schedule_name]
    units = tuple(UnitWork(forward_s=0.01 / k, backward_s=0.02 / k, sent_bytes=8, gradient_bytes=8) for k in (1, 2))
    stages = tuple(StageWork(units=units, optimizer_s=0.003) for _ in range(3))
    return StepWork(stages=(stages, stages), schedules=(schedule, schedule), exchange_s=0.001)


@pytest.mark.parametrize("schedule_name", ["1f1b", "sliced", "gpipe"])
def test_what_observers_see_of_a_simulated_step_gives_that_step_again(schedule_name: str) -> None:
    step = a_step(schedule_name)
    predicted = simulate(step)
    clocks = {rank: shifted(1000.0 * rank, 1e-4 * rank) for rank in range(6)}
    measured = measured_timeline(observed(predicted, clocks), clocks, step.list_ranks)
    assert measured.step_s == pytest.approx(predicted.step_s, rel=1e-6)
    assert measured.bubble_fraction == pytest.approx(predicted.bubble_fraction, abs=1e-6)
    found = {(str(event.action), event.global_rank): event for event in measured.events}
    assert found.keys() == {(str(event.action), event.global_rank) for event in predicted.events}
    for event in predicted.events:
        other = found[str(event.action), event.global_rank]
        assert other.start_s == pytest.approx(event.start_s, abs=1e-7), event
        if isinstance(event.action, StepEnd) or event.action.type.is_compute:
            assert other.end_s == pytest.approx(event.end_s, abs=1e-7), event
        else:  # seen when the receiver takes it
            assert other.end_s >= event.end_s - 1e-7, event


def test_a_message_ends_when_its_receiver_takes_it_and_waits_are_kept() -> None:
    steps = {
        1: RankStep(begin_s=0.0, ran=((Action.parse("0F0"), 0.0, 0.0, 1.0),)),
        0: RankStep(begin_s=0.0, ran=((Action.parse("1F0"), 0.5, 1.5, 2.0),)),
    }
    measured = measured_timeline(steps, {0: SAME, 1: SAME}, [[1, 0]])
    (message,) = [event for event in measured.events if str(event.action) == "0SA0"]
    assert (message.start_s, message.end_s, message.global_rank) == (1.0, 1.5, 1)
    assert {str(event.action): event.waited_s for event in measured.events} == {"0F0": 0.0, "1F0": 1.0, "0SA0": 0.0}
    assert measured.bubble_fraction == pytest.approx(1 - 1.5 / 4)


def test_a_sum_begins_when_the_last_of_its_ranks_has_come_so_far() -> None:
    ended = {3: 1.0, 2: 2.0, 1: 3.0, 0: 4.0}
    steps = {
        rank: RankStep(
            begin_s=0.0,
            ran=(
                (Action.parse(f"{1 - rank % 2}F0"), 0.0, 0.0, ready_s),
                (StepEnd.GRADIENTS, ready_s, ready_s, 4.5),
                (StepEnd.EXCHANGE, 4.5, 4.5, 5.0),
                (StepEnd.OPTIMIZER, 5.0, 5.0, 5.0 + rank),
            ),
        )
        for rank, ready_s in ended.items()
    }
    measured = measured_timeline(steps, dict.fromkeys(range(4), SAME), [[1, 0], [3, 2]])
    sums = {
        event.global_rank: (event.start_s, event.waited_s)
        for event in measured.events
        if event.action is StepEnd.GRADIENTS
    }
    assert sums == {1: (3.0, 0.0), 3: (3.0, 2.0), 0: (4.0, 0.0), 2: (4.0, 2.0)}
    optimizers = {event.start_s for event in measured.events if event.action is StepEnd.OPTIMIZER}
    assert optimizers == {5.0}, "nobody waits for another one's optimizer"


def test_stages_of_one_rank_send_each_other_nothing_and_clocks_that_miss_make_no_message_end_early() -> None:
    ran: Sequence[Ran] = [
        (Action.parse("0F0"), 0.0, 0.0, 1.0),
        (Action.parse("1F0"), 1.0, 1.0, 2.0),
    ]
    one_rank = measured_timeline({0: RankStep(begin_s=0.0, ran=tuple(ran))}, {0: SAME}, [[0, 0]])
    assert [str(event.action) for event in one_rank.events] == ["0F0", "1F0"]
    early = AlignedClock(begin=ClockReading(own_s=0.0, rank_0_s=-0.5), end=ClockReading(own_s=1.0, rank_0_s=0.5))
    steps = {1: RankStep(begin_s=0.0, ran=(ran[0],)), 0: RankStep(begin_s=0.0, ran=(ran[1],))}
    (message,) = [
        event for event in measured_timeline(steps, {1: SAME, 0: early}, [[1, 0]]).events if "SA" in str(event.action)
    ]
    assert message.start_s == message.end_s == 1.0


def test_a_recorder_gives_each_step_with_its_end() -> None:
    recorder = TimelineRecorder()
    assert recorder.begin_step() is None
    begin_s = time.perf_counter()
    recorder.ran(Action.parse("0F0"), begin_s, begin_s + 1, begin_s + 2)
    with recorder.timed(StepEnd.EXCHANGE):
        pass
    recorder.note_rest(StepEnd.OPTIMIZER)
    step = recorder.begin_step()
    assert step is not None
    assert step.begin_s <= begin_s
    assert [str(what) for what, *_ in step.ran] == ["0F0", "exchange", "optimizer"]
    _, (_, _, started_s, exchanged_s), (_, _, rest_s, ended_s) = step.ran
    assert started_s <= exchanged_s == rest_s <= ended_s
    assert step.end_s == begin_s + 2
    assert step.busy_s == pytest.approx(1 + ended_s - rest_s)
    empty = recorder.end_step()
    assert empty is not None
    assert (empty.ran, empty.end_s) == ((), empty.begin_s)
    assert recorder.end_step() is None


def _read_twice() -> tuple[tuple[ClockReading, ...], float]:
    readings = read_clocks(dist.group.WORLD)
    return readings, time.perf_counter()


def test_clocks_of_one_machine_are_found_equal() -> None:
    (readings, after_s), (none, _) = run_processes(2, _read_twice)
    assert none == ()
    own, other = readings
    assert own.own_s == own.rank_0_s
    # perf_counter is one clock for all processes of a Linux machine.
    assert abs(other.own_s - other.rank_0_s) <= other.error_s < 1.0
    assert own.own_s < other.rank_0_s < after_s


def test_one_process_needs_no_messages() -> None:
    (own,) = read_clocks(None)
    assert own.own_s == own.rank_0_s
