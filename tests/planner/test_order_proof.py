"""Orders of unlike devices and partitions: branch and bound against brute force, and what it proves."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopipe.planner.device_order import choose_device_order
from lightning_autopipe.planner.objective import Objective, PipelineSetting
from lightning_autopipe.planner.order_proof import OrderProof
from lightning_autopipe.schedules import default_depths
from tests.planner.mappings import SAME
from tests.planner.steps import a_device, a_profile, a_setting


def every_choice(setting: PipelineSetting, depths: tuple[int, ...]) -> list[tuple[float, tuple[object, ...]]]:
    """Steps of all orders with all partitions that fit the memory, with both."""
    found = []
    for devices in permutations(setting.devices[0]):
        objective = Objective(replace(setting, devices=(devices,)))
        for cuts in combinations(range(1, objective.num_layers), setting.num_stages - 1):
            if not objective.overflow_bytes(cuts, depths):
                found.append((objective.step_s(cuts, depths), (devices, cuts)))
    return found


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.data())
def test_the_best_is_found_from_any_other_choice(data: st.DataObject) -> None:
    """Any speeds, times, depths that never rise, micro-batches, memory; begun from the worst choice that fits."""
    num_stages = data.draw(st.integers(1, 4), label="stages")
    speeds = data.draw(st.lists(st.sampled_from([1.0, 0.5, 0.25]), min_size=num_stages, max_size=num_stages))
    rooms = data.draw(st.lists(st.sampled_from([9, 40, 1 << 40]), min_size=num_stages, max_size=num_stages))
    num_layers = data.draw(st.integers(num_stages, num_stages + 3), label="layers")
    seconds = st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0]), min_size=num_layers, max_size=num_layers)
    profile = a_profile(data.draw(seconds), data.draw(seconds))
    layers = tuple(replace(layer, param_bytes=2, trainable_bytes=2) for layer in profile.layers)
    depth = st.lists(st.integers(0, 6), min_size=num_stages, max_size=num_stages)
    depths = data.draw(st.sampled_from([default_depths(num_stages), None]), label="plain depths")
    depths = depths or tuple(sorted(data.draw(depth), reverse=True))
    devices = tuple(
        a_device(rank, relative_speed=speed, memory_bytes=room)
        for rank, (speed, room) in enumerate(zip(speeds, rooms, strict=True))
    )
    setting = a_setting(
        replace(profile, layers=layers),
        num_stages,
        data.draw(st.integers(1, 9), label="micro-batches"),
        devices=(devices,),
        exchange_s=data.draw(st.sampled_from([0.0, 1.0])),
    )
    choices = every_choice(setting, depths)
    if not choices:
        return
    best_s = min(step_s for step_s, _ in choices)
    step_s, (worst, cuts) = max(choices, key=lambda choice: choice[0])
    proof = OrderProof(setting, depths, worst, cuts, step_s).run(effort=100_000)  # type: ignore[arg-type]
    assert proof.is_exact
    assert best_s / SAME <= proof.step_s <= best_s * SAME
    objective = Objective(replace(setting, devices=(proof.devices,)))
    assert objective.step_s(proof.cuts, depths) == proof.step_s
    assert not objective.overflow_bytes(proof.cuts, depths)
    stopped = OrderProof(setting, depths, worst, cuts, step_s).run(effort=1)  # type: ignore[arg-type]
    assert stopped.lower_bound_s <= best_s * SAME


def an_uneven_chain(num_layers: int, speeds: list[float]) -> PipelineSetting:
    draw = random.Random(4)
    times = [draw.uniform(1, 9) for _ in range(num_layers)]
    devices = tuple(a_device(rank, relative_speed=speed) for rank, speed in enumerate(speeds))
    return a_setting(a_profile(times, [1.8 * seconds for seconds in times]), len(speeds), 16, devices=(devices,))


def test_fifty_layers_on_eight_unlike_devices_are_proven() -> None:
    setting = an_uneven_chain(50, [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25])
    found = choose_device_order(setting)
    assert found.is_exact
    assert found.lower_bound_s == found.choice.step_s
    assert found.choice.is_exact
    without = choose_device_order(setting, proof_effort=0)
    assert not without.is_exact
    assert without.lower_bound_s == 0
    assert found.choice.step_s <= without.choice.step_s * SAME


def test_a_proof_that_is_not_finished_tells_how_much_better_others_could_be() -> None:
    found = choose_device_order(an_uneven_chain(40, [1, 1, 0.5, 0.5, 0.25, 0.25]), proof_effort=50)
    assert not found.is_exact
    assert 0.9 * found.choice.step_s < found.lower_bound_s < found.choice.step_s


@pytest.mark.parametrize("max_exact", [0, 20_000])
def test_few_choices_are_exact_either_way(max_exact: int) -> None:
    setting = an_uneven_chain(9, [1, 0.5, 0.25])
    found = choose_device_order(setting, max_exact=max_exact)
    best_s = min(step_s for step_s, _ in every_choice(setting, default_depths(3)))
    assert found.is_exact
    assert found.choice.step_s == pytest.approx(best_s)
