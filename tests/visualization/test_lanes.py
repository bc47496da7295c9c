from __future__ import annotations

from itertools import pairwise

import pytest

from lightning_autopipe.core import Action, PlanError, StepEnd, Timeline, TimelineEvent
from lightning_autopipe.schedules import forward_only, gpipe, sliced_one_f_one_b
from lightning_autopipe.visualization import link_uses
from lightning_autopipe.visualization.lanes import BarKind, make_lanes, make_messages, pipeline_ranks
from lightning_autopipe.visualization.phases import step_phases

from .timelines import NUM_BYTES, a_timeline


def an_event(action: str | StepEnd, rank: int, start_s: float, end_s: float) -> TimelineEvent:
    return TimelineEvent(
        action=Action.parse(action) if isinstance(action, str) else action,
        global_rank=rank,
        start_s=start_s,
        end_s=end_s,
    )


def of_events(*events: TimelineEvent) -> Timeline:
    return Timeline(events=events, step_s=max(event.end_s for event in events), bubble_fraction=0.0)


def test_lanes_go_by_replica_and_stage_and_hold_all_but_the_messages() -> None:
    lanes = make_lanes(a_timeline(3, 4, 2, exchange_s=0.001, is_tied=True))
    assert [lane.global_rank for lane in lanes] == [2, 1, 0, 5, 4, 3]
    assert [lane.stage_index for lane in lanes] == [0, 1, 2] * 2
    assert [lane.replica_index for lane in lanes] == [0] * 3 + [1] * 3
    kinds = [bar.kind for bar in lanes[0].bars]
    assert kinds[:3] == [BarKind.FORWARD] * 3
    assert kinds[-4:] == [BarKind.TIED_GRADIENTS, BarKind.GRADIENTS, BarKind.EXCHANGE, BarKind.OPTIMIZER]
    assert len(kinds) == 8 + 4
    assert all(before.event.end_s <= after.event.start_s + 1e-12 for before, after in pairwise(lanes[0].bars))


def test_idle_time_of_all_lanes_is_the_bubble() -> None:
    timeline = a_timeline(3, 4, 2, exchange_s=0.001, is_tied=True)
    busy_s = sum(lane.busy_s for lane in make_lanes(timeline))
    assert 1 - busy_s / (6 * timeline.step_s) == pytest.approx(timeline.bubble_fraction, abs=1e-12)


def test_ranks_that_no_layout_has_belong_to_replicas_in_their_order_or_as_given() -> None:
    timeline = of_events(
        an_event("0F0", 1, 0, 1), an_event("0F0", 3, 0, 1), an_event("1F0", 0, 1, 2), an_event("1F0", 5, 1, 2)
    )
    assert pipeline_ranks(timeline) == ((1, 0), (3, 5))
    lanes = make_lanes(timeline, ranks=[[3, 0], [1, 5]])
    assert [(lane.global_rank, lane.replica_index) for lane in lanes] == [(3, 0), (0, 0), (1, 1), (5, 1)]


def test_messages_have_receivers_and_bytes() -> None:
    schedule = sliced_one_f_one_b(2, 3, num_sliced_first=1)
    timeline = a_timeline(2, 3, 2, schedule=schedule)
    messages = make_messages(timeline, boundary_bytes=[(NUM_BYTES, 2 * NUM_BYTES)])
    found = {(str(message.action), message.sender): (message.receiver, message.num_bytes) for message in messages}
    assert len(messages) == len(found) == 2 * 2 * 4
    assert found["0SA0.1", 1] == (0, NUM_BYTES / 2)
    assert found["0SA1", 3] == (2, NUM_BYTES)
    assert found["1SG0.0", 2] == (3, NUM_BYTES)
    assert found["1SG2", 0] == (1, 2 * NUM_BYTES)
    assert {message.num_bytes for message in make_messages(timeline)} == {None}


def test_where_stages_have_unlike_numbers_of_ranks_lanes_go_by_stage() -> None:
    timeline = of_events(
        an_event("0F0", 4, 0, 1),
        an_event("0F1", 1, 0, 1),
        an_event("0SA0", 4, 1, 2),
        an_event("0SA1", 1, 1, 3),
        an_event("1F0", 0, 2, 3),
        an_event("1F1", 0, 3, 4),
        an_event("1SG0", 0, 4, 5),
        an_event("1SG1", 0, 5, 6),
    )
    lanes = make_lanes(timeline)
    assert [(lane.global_rank, lane.stage_index, lane.replica_index) for lane in lanes] == [
        (1, 0, 0),
        (4, 0, 0),
        (0, 1, 0),
    ]
    messages = make_messages(timeline, boundary_bytes=[(100, 50)])
    assert [(message.sender, message.receiver, message.num_bytes) for message in messages] == [
        (4, 0, 100),
        (1, 0, 100),
        (0, 4, 50),
        (0, 1, 50),
    ]
    with pytest.raises(PlanError, match=r"stages of \[2, 1\] ranks, so there are no replicas"):
        pipeline_ranks(timeline)


def test_use_of_links_counts_overlapping_messages_once() -> None:
    timeline = of_events(
        an_event("0F0", 1, 0, 1),
        an_event("0SA0", 1, 1, 3),
        an_event("0SA1", 1, 2, 4),
        an_event("0SA2", 1, 5, 6),
        an_event("1F0", 0, 3, 10),
    )
    (use,) = link_uses(timeline, boundary_bytes=[(100, 0)])
    assert (use.name, use.num_messages, use.num_bytes) == ("rank 1 → rank 0", 3, 300)
    assert (use.busy_s, use.busy_share) == (4, 0.4)
    assert link_uses(timeline)[0].num_bytes is None


@pytest.mark.parametrize(
    ("timeline", "ranks", "problem"),
    [
        (
            of_events(an_event(StepEnd.OPTIMIZER, 2, 0, 1), an_event("0F0", 0, 0, 1)),
            (),
            r"ranks \[2\] run; give ranks=",
        ),
        (of_events(an_event("0F0", 0, 0, 1), an_event("1F0", 7, 0, 1)), ((0, 1),), r"events of ranks \[7\]"),
    ],
)
def test_what_a_timeline_does_not_tell_is_an_error(timeline: Timeline, ranks: tuple[()], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        make_lanes(timeline, ranks)


def test_phases_cover_the_step() -> None:
    timeline = a_timeline(2, 4, bandwidth_bytes_per_s=None)
    phases = step_phases(timeline)
    assert [phase.name for phase in phases] == ["warm-up", "steady", "cool-down", "step's end"]
    assert [phase.start_s for phase in phases[1:]] == [phase.end_s for phase in phases[:-1]]
    # The first backward follows two forwards, the last forward is followed by two backwards.
    assert [phases[0].start_s, phases[0].end_s] == pytest.approx([0, 0.021])
    assert phases[2].end_s - phases[2].start_s == pytest.approx(0.022 + 0.02)
    assert phases[3].end_s == timeline.step_s


def test_phases_of_other_schedules() -> None:
    assert [phase.name for phase in step_phases(a_timeline(2, 3, schedule=gpipe(2, 3), optimizer_s=0))] == [
        "warm-up",
        "cool-down",
    ]
    assert step_phases(a_timeline(2, 3, schedule=forward_only(2, 3), optimizer_s=0)) == ()


def test_a_rank_with_several_stages_has_one_lane() -> None:
    timeline = of_events(
        an_event("0F0", 1, 0, 1),
        an_event("1F0", 0, 1, 2),
        an_event("2F0", 1, 2, 3),
        an_event("3F0", 0, 3, 4),
        an_event("3I0", 0, 4, 5),
        an_event("3W0", 0, 5, 6),
    )
    first, second = make_lanes(timeline)
    assert (first.label, second.label) == ("stages 0, 2 · rank 1", "stages 1, 3 · rank 0")
    assert [bar.kind for bar in second.bars] == [
        BarKind.FORWARD,
        BarKind.FORWARD,
        BarKind.BACKWARD_INPUT,
        BarKind.BACKWARD_WEIGHT,
    ]
    assert make_lanes(timeline, ranks=[[1, 0, 1, 0]]) == (first, second)
