"""Stages with unlike numbers of ranks: steps by hand, the same as replicas where counts are equal, and no hangs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopipe.core import (
    Action,
    ActionType,
    ConfigurationError,
    DeviceMapping,
    Partition,
    PlanError,
    Schedule,
    StepEnd,
    TiedParameter,
    Timeline,
)
from lightning_autopipe.planner import CostModel, simulate
from lightning_autopipe.planner.contention import step_flows
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.objective import Objective
from lightning_autopipe.planner.unequal import deal_microbatches, default_windows, unequal_step_work, windowed_lists
from lightning_autopipe.planner.workload import StageWork, StepWork, UnitWork
from tests.planner.mappings import a_cluster, a_mapping_setting, a_model
from tests.planner.steps import a_profile


def spans(timeline: Timeline, global_rank: int) -> str:
    """Computations of a rank as ``F1 2-3``."""
    return ", ".join(
        f"{str(event.action)[1:]} {event.start_s:g}-{event.end_s:g}"
        for event in timeline.events
        if event.global_rank == global_rank and isinstance(event.action, Action) and event.action.type.is_compute
    )


def a_step(times: Sequence[float], stage_ranks: tuple[tuple[int, ...], ...], num_microbatches: int) -> StepWork:
    """One layer a stage, with forwards and backwards alike long."""
    partition = Partition(cut_points=tuple(range(1, len(times))), num_layers=len(times))
    mapping = DeviceMapping(stage_ranks=stage_ranks)
    return unequal_step_work(CostModel(a_profile(times, times)), partition, mapping, num_microbatches=num_microbatches)


@pytest.mark.parametrize(
    ("times", "stage_ranks", "num_microbatches", "expected"),
    [
        (
            [2, 1],
            ((1, 2), (0,)),
            4,
            {
                1: "F0 0-2, F2 2-4, B0 4-6, B2 8-10",
                2: "F1 0-2, F3 2-4, B1 6-8, B3 10-12",
                0: "F0 2-3, B0 3-4, F1 4-5, B1 5-6, F2 6-7, B2 7-8, F3 8-9, B3 9-10",
            },
        ),
        (
            [3, 1],
            ((1, 2, 3), (0,)),
            3,
            {
                1: "F0 0-3, B0 5-8",
                2: "F1 0-3, B1 7-10",
                3: "F2 0-3, B2 9-12",
                0: "F0 3-4, B0 4-5, F1 5-6, B1 6-7, F2 7-8, B2 8-9",
            },
        ),
        (
            [1, 2],
            ((2,), (0, 1)),
            4,
            {
                2: "F0 0-1, F1 1-2, F2 2-3, B0 5-6, F3 6-7, B1 7-8, B2 9-10, B3 11-12",
                0: "F0 1-3, B0 3-5, F2 5-7, B2 7-9",
                1: "F1 2-4, B1 4-6, F3 7-9, B3 9-11",
            },
        ),
    ],
    ids=["2-1", "3-1", "1-2"],
)
def test_by_hand(
    times: list[float], stage_ranks: tuple[tuple[int, ...], ...], num_microbatches: int, expected: dict[int, str]
) -> None:
    timeline = simulate(a_step(times, stage_ranks, num_microbatches))
    assert {rank: spans(timeline, rank) for rank in expected} == expected
    assert timeline.step_s == 12


def test_messages_and_sums_by_hand() -> None:
    """2-1, each rank a server at 4 bytes a second; 2 bytes there and back, and a ring of two that sums 8 bytes.

    F0 and F1 end at 1 and share the way into rank 0 until 2, which computes until 2 + 3 x 3; the last gradient is there
    at 11.5, and its backward takes 2; then each rank of the ring sends 8 bytes.
    """
    topology = a_cluster("ABC", bandwidth=4.0)
    cost = CostModel(a_model([1.0, 1.0], num_bytes=2, gradient_bytes=8))
    work = unequal_step_work(
        cost,
        Partition(cut_points=(1,), num_layers=2),
        DeviceMapping(stage_ranks=((1, 2), (0,))),
        network=LinkNetwork(topology),
        num_microbatches=3,
    )
    timeline = simulate(work)
    assert spans(timeline, 0) == "F0 2-3, B0 3-5, F1 5-6, B1 6-8, F2 8-9, B2 9-11"
    assert spans(timeline, 1) == "F0 0-1, F2 1-2, B0 5.5-7.5, B2 11.5-13.5"
    assert spans(timeline, 2) == "F1 0-1, B1 8.5-10.5"
    sums = [event for event in timeline.events if event.action is StepEnd.GRADIENTS]
    assert {event.global_rank: (event.start_s, event.end_s) for event in sums} == {1: (13.5, 15.5), 2: (13.5, 15.5)}
    flows = {(flow.sender, flow.receiver, flow.is_reduction): flow.num_bytes for flow in step_flows(work, timeline)}
    assert flows == {
        (1, 0, False): 4,
        (2, 0, False): 2,
        (0, 1, False): 4,
        (0, 2, False): 2,
        (1, 2, True): 8,
        (2, 1, True): 8,
    }


def test_gradients_tied_over_stages_are_summed_by_all_their_ranks() -> None:
    profile = a_model([1.0, 1.0], gradient_bytes=8)
    tie = TiedParameter(name="weight", num_bytes=6, is_trainable=True)
    layers = tuple(replace(layer, parameters=("weight",), tied=(tie,)) for layer in profile.layers)
    work = unequal_step_work(
        CostModel(replace(profile, layers=layers)),
        Partition(cut_points=(1,), num_layers=2),
        DeviceMapping(stage_ranks=((1, 3), (0,))),
        num_microbatches=2,
    )
    assert [(sum_.is_tie, sum_.members, sum_.num_bytes) for sum_ in work.reductions()] == [
        (True, (1, 0, 3), 6),
        (False, (1, 3), 2),
    ]


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_equal_counts_are_replicas(num_replicas: int) -> None:
    """The same numbers to the bit, with links that are shared, tied gradients left out, and sums at the end."""
    num_stages = 3
    topology = a_cluster("AABBCCDDE"[: num_stages * num_replicas], bandwidth=5.0)
    setting = a_mapping_setting(
        a_model([1.0, 2.0, 1.5, 1.0], num_bytes=3, gradient_bytes=4), topology, num_stages, num_replicas, 12
    )
    stage_ranks = tuple(tuple(range(stage, num_stages * num_replicas, num_stages)) for stage in (2, 1, 0))
    grid = tuple(zip(*stage_ranks, strict=True))
    replicas = Objective(setting.pipelines(grid, (12 // num_replicas,) * num_replicas)).step_work((1, 3), (2, 1, 0))
    unequal = unequal_step_work(
        setting.cost,
        Partition(cut_points=(1, 3), num_layers=4),
        DeviceMapping(stage_ranks=stage_ranks),
        network=setting.network,
        num_microbatches=12,
    )
    ours, theirs = simulate(unequal), simulate(replicas)
    assert (ours.step_s, ours.peak_bytes) == (theirs.step_s, theirs.peak_bytes)
    assert [(e.global_rank, e.start_s, e.end_s) for e in ours.events] == [
        (e.global_rank, e.start_s, e.end_s) for e in theirs.events
    ]
    assert set(step_flows(unequal, ours)) == set(step_flows(replicas, theirs))


def test_microbatches_are_dealt_in_turn_or_by_speed() -> None:
    assert deal_microbatches(7, [1.0, 1.0, 1.0]) == (0, 1, 2, 0, 1, 2, 0)
    assert deal_microbatches(8, [1.0, 1.0, 1.0]) == (0, 1, 2, 0, 1, 2, 0, 1)
    assert deal_microbatches(6, [1.0, 2.0]) == (0, 1, 0, 0, 1, 0)
    assert deal_microbatches(3, [1.0, 1.0, 100.0]) == (0, 1, 2)
    assert deal_microbatches(4, [0.0, 0.0]) == (0, 1, 0, 1)
    with pytest.raises(ConfigurationError, match="2 micro-batches for 3 replicas"):
        deal_microbatches(2, [1.0, 1.0, 1.0])


def test_unlike_ranks_take_what_they_can() -> None:
    """Speeds 1 and 0.5 before a stage that takes nothing much: 4 micro-batches here, 2 there."""
    topology = a_cluster("AAA", [1.0, 1.0, 0.5])
    work = unequal_step_work(
        CostModel(a_profile([1, 0.001], [1, 0.001])),
        Partition(cut_points=(1,), num_layers=2),
        DeviceMapping(stage_ranks=((1, 2), (0,))),
        network=LinkNetwork(topology),
        num_microbatches=6,
    )
    timeline = simulate(work)
    assert spans(timeline, 1).count("B") == 4
    assert spans(timeline, 2).count("B") == 2
    assert timeline.step_s == pytest.approx(8, rel=0.01)


def test_windows() -> None:
    assert default_windows([1, 1, 1]) == (2, 1, 0)
    assert default_windows([2, 2, 2]) == (4, 2, 0)
    assert default_windows([15, 1]) == (15, 0)
    assert default_windows([8, 4, 4]) == (8, 4, 0)
    assert default_windows([1, 4, 3]) == (7, 4, 0)
    owners = ((0, 1, 0, 1), (0, 0, 0, 0))
    assert [" ".join(map(str, actions)) for actions in windowed_lists(owners, (2, 1))[0]] == [
        "0F0 0F2 0B0 0B2",
        "0F1 0F3 0B1 0B3",
    ]
    with pytest.raises(ConfigurationError, match=r"windows=\(1, 2\): a stage is to run further ahead"):
        windowed_lists(owners, (1, 2))
    with pytest.raises(ConfigurationError, match=r"windows=\(1,\): give each of the 2 stages one"):
        windowed_lists(owners, (1,))


def test_steps_with_a_microbatch_on_two_ranks_of_a_stage_are_refused() -> None:
    work = StageWork(units=(UnitWork(forward_s=1, backward_s=1),))
    lists = tuple(tuple(map(Action.parse, names)) for names in (("0F0", "0B0"), ("0F0", "0B0"), ("1F0", "1B0")))
    schedule = Schedule(name="twice", actions_by_rank=lists, num_microbatches=1)
    with pytest.raises(PlanError, match="0F0: rank 2 has this micro-batch; give it to one rank a stage"):
        simulate(StepWork(stages=((work,) * 3,), schedules=(schedule,), stage_indices=(0, 0, 1)))
    with pytest.raises(PlanError, match="stage_indices must name the stage of each of 3 lists"):
        StepWork(stages=((work,) * 3,), schedules=(schedule,), stage_indices=(0, 2, 2))


@settings(deadline=None, derandomize=True, max_examples=120)
@given(st.data())
def test_every_list_runs_to_its_end(data: st.DataObject) -> None:
    """Any counts, speeds, windows that never rise and links: `simulate` raises where something waits for ever."""
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    num_stages, num_ranks = len(counts), sum(counts)
    num_microbatches = data.draw(st.integers(max(counts), 12))
    speeds = data.draw(st.lists(st.sampled_from([1.0, 0.5, 0.3]), min_size=num_ranks, max_size=num_ranks))
    names = data.draw(st.lists(st.sampled_from("ABC"), min_size=num_ranks, max_size=num_ranks))
    window = st.integers(0, 2 * num_microbatches)
    windows = sorted(data.draw(st.lists(window, min_size=num_stages, max_size=num_stages)), reverse=True)
    times = data.draw(st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=num_stages, max_size=num_stages))
    ranks = iter(range(num_ranks))
    stage_ranks = tuple(reversed([tuple(next(ranks) for _ in range(count)) for count in reversed(counts)]))
    work = unequal_step_work(
        CostModel(a_model(times, num_bytes=data.draw(st.sampled_from([0, 5])), gradient_bytes=3)),
        Partition(cut_points=tuple(range(1, num_stages)), num_layers=num_stages),
        DeviceMapping(stage_ranks=stage_ranks),
        network=LinkNetwork(a_cluster("".join(names), speeds)),
        num_microbatches=num_microbatches,
        windows=data.draw(st.sampled_from([None, tuple(windows)])),
    )
    timeline = simulate(work)
    done = Counter(
        (event.action.type, event.action.stage_index, event.action.microbatch_index)
        for event in timeline.events
        if isinstance(event.action, Action) and event.action.type.is_compute
    )
    assert done == Counter(
        (kind, stage, index)
        for kind in (ActionType.FORWARD, ActionType.BACKWARD)
        for stage in range(num_stages)
        for index in range(num_microbatches)
    )
