"""Which schedule has the shortest step: slices, several stages a rank, backwards in two parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_autopipe.core import DeviceTimes, LayerMeasurement, LayerProfile, ModelProfile
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.planner import CostModel, SearchSpace, alike_devices, plan_of, search, simulate
from lightning_autopipe.planner.plan_step import plan_step
from lightning_autopipe.planner.search import SearchResult

STASH_BYTES = 1000
"""What each layer keeps of one sample."""


def a_profile(num_layers: int, *, half: float = 0.5, weight: float = 0.0, split: float = 0.0) -> ModelProfile:
    """Layers that take 1 s forward and 2 s backward for two samples, and a share ``half`` of that for one."""
    layer = LayerProfile(
        name="layer",
        forward_flops=1.0,
        measured=LayerMeasurement(
            forward_s=1.0,
            backward_s=2.0,
            backward_weight_s=weight,
            backward_split_s=split,
            activation_bytes=2 * STASH_BYTES,
            peak_bytes=2 * STASH_BYTES,
            sent_bytes=0,
            gradient_bytes=0,
        ),
    )
    times = tuple(
        DeviceTimes(
            device_model="the profiled device",
            microbatch_size=size,
            forward_s=(share,) * num_layers,
            backward_s=(2 * share,) * num_layers,
            backward_weight_s=(weight * share,) * num_layers,
            backward_split_s=(split * share,) * num_layers,
        )
        for size, share in ((1.0, half), (2.0, 1.0))
    )
    layers = tuple(replace(layer, name=f"layers.{index}") for index in range(num_layers))
    return ModelProfile(layers=layers, times=times, microbatch_size=2.0)


def found(
    profile: ModelProfile, *, num_stages: int, num_microbatches: int | None, kept: int | None = None, **changes: Any
) -> SearchResult:
    """The best choice for so many micro-batches of two samples, or for any sizes; stages may keep ``kept`` of them."""
    samples = 2.0 * (num_microbatches or 16)
    layers = profile.num_layers // num_stages
    memory = 2**40 if kept is None else kept * layers * 2 * STASH_BYTES
    space = SearchSpace(
        cost=CostModel(profile),
        network=alike_devices(num_stages, memory_bytes=memory),
        batch_size=samples,
        num_stages=num_stages,
        num_microbatches=num_microbatches or "auto",
        memory_share=1.0,
        optimizer_state_ratio=0.0,
        **changes,
    )
    result = search(space)
    plan = plan_of(result, space, module_fingerprint="test")
    assert simulate(plan_step(plan)).step_s == pytest.approx(result.best.step_s, rel=1e-12)
    assert all(peak <= memory for peak in simulate(plan_step(plan)).peak_bytes)
    return result


@pytest.mark.parametrize(("num_microbatches", "step_s"), [(16, 58.5), (8, 34.5)])
def test_halves_at_both_ends_save_half_of_startup_and_ending(num_microbatches: int, step_s: float) -> None:
    """Of 69 and 45 s with whole micro-batches, at no more stash than theirs; see Liu et al., CLUSTER 2022."""
    result = found(a_profile(8), num_stages=8, num_microbatches=num_microbatches, kept=8, schedule="sliced_1f1b")
    best = result.best
    assert best.schedule.name == "sliced_1f1b"
    assert best.plain_step_s == 3.0 * (num_microbatches + 7)
    assert step_s <= best.step_s <= step_s + 0.5


@pytest.mark.parametrize(("half", "is_sliced"), [(0.55, True), (0.6, True), (0.8, False)])
def test_slices_pay_where_halves_cost_little_more_than_half(half: float, is_sliced: bool) -> None:
    """Against the better of whole micro-batches and of two times as many small ones, which may be chosen, too."""
    best = found(a_profile(8, half=half), num_stages=8, num_microbatches=None, kept=8, kinds=("sliced_1f1b",)).best
    assert best.schedule.is_sliced == is_sliced
    others = min(3.0 * (16 + 7), 3.0 * half * (32 + 7))
    assert best.step_s <= others / (1.02 if is_sliced else 1.0)


def test_halves_go_as_one_message_only_where_that_takes_no_longer() -> None:
    even, later = (
        found(a_profile(4, half=half), num_stages=4, num_microbatches=8, schedule="sliced_1f1b").best
        for half in (0.5, 0.55)
    )
    assert even.schedule.merges_slices
    assert not later.schedule.merges_slices
    merged = tuple(replace(schedule, merges_slices=True) for schedule in later.work.schedules)
    assert simulate(replace(later.work, schedules=merged)).step_s > later.step_s


@pytest.mark.parametrize(("num_microbatches", "step_s"), [(16, 55.0), (8, 31.0)])
def test_backwards_in_two_parts_fill_the_ending(num_microbatches: int, step_s: float) -> None:
    """Qi et al., ICLR 2024: forward, input and weight gradients alike long, at the stash of 1F1B's first stage."""
    profile = a_profile(8, weight=1.0)
    best = found(profile, num_stages=8, num_microbatches=num_microbatches, kept=8, schedule="zero_bubble").best
    assert best.schedule.name == "zero_bubble"
    assert best.step_s <= step_s


def test_backwards_are_whole_where_splitting_them_costs_more_than_it_saves() -> None:
    options: dict[str, Any] = {"num_stages": 8, "num_microbatches": 16, "kept": 8, "kinds": ("zero_bubble",)}
    assert found(a_profile(8, weight=1.0, split=0.1), **options).best.schedule.name == "zero_bubble"
    assert found(a_profile(8, weight=1.0, split=0.8), **options).best.schedule.name == "1f1b"


def test_the_first_stages_backwards_are_whole_and_cost_no_splitting() -> None:
    profile = a_profile(8, weight=1.0, split=0.1)
    best = found(profile, num_stages=8, num_microbatches=16, kept=8, schedule="zero_bubble").best
    (first, *later) = best.work.stages[0]
    assert (first.units[0].backward_s, first.units[0].backward_weight_s) == (2.0, 0.0)
    assert all((stage.units[0].backward_s, stage.units[0].backward_weight_s) == (2.1, 1.0) for stage in later)


def test_several_stages_a_rank_make_the_ends_shorter_where_halves_are_dear() -> None:
    """Four ranks of four layers each, two or four stages: the 3 idle turns of 12 s become 3 of 6 or 3 s."""
    best = found(
        a_profile(16, half=1.0), num_stages=4, num_microbatches=8, kinds=("sliced_1f1b", "interleaved_1f1b")
    ).best
    assert best.schedule.name == "interleaved_1f1b"
    assert best.plain_step_s == 12.0 * (8 + 3)
    v = best.schedule.stages_per_rank
    assert best.step_s == pytest.approx(12.0 * 8 + 12.0 * 3 / v)
    assert best.partition.num_stages == 4 * v


def test_several_stages_a_rank_are_not_chosen_where_their_stash_does_not_fit() -> None:
    tight = found(a_profile(16, half=1.0), num_stages=4, num_microbatches=8, kept=4).best
    assert tight.schedule.name == "1f1b"


@pytest.mark.parametrize("schedule", ["sliced_1f1b", "zero_bubble", "interleaved_1f1b"])
def test_a_schedule_that_is_asked_for_is_taken_whatever_it_costs(schedule: str) -> None:
    profile = a_profile(8, half=1.0, weight=0.5)
    best = found(profile, num_stages=4, num_microbatches=4, schedule=schedule).best
    assert best.schedule.name == schedule


def test_a_schedule_that_cannot_be_priced_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="zero-bubble those of weight gradients apart"):
        found(a_profile(8), num_stages=4, num_microbatches=4, schedule="zero_bubble")
