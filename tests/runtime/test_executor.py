from __future__ import annotations

import gc
import weakref
from collections.abc import Hashable

import pytest
import torch
from torch import Tensor, nn

from lightning_autopipe.core.errors import CaptureError, PipelineRuntimeError, PlanError
from lightning_autopipe.core.schedule import Action, ActionType, Schedule
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.runtime.backward import _in_layout_of
from lightning_autopipe.runtime.errors import StageError
from lightning_autopipe.runtime.in_process import InProcessPipeline
from lightning_autopipe.runtime.stage import StageOutput
from lightning_autopipe.runtime.units import unit_sizes, units_of
from lightning_autopipe.schedules import (
    forward_only,
    get_schedule,
    gpipe,
    interleaved_1f1b,
    lower,
    one_f_one_b,
    peak_stash,
    sliced_one_f_one_b,
)
from tests.runtime.toy import (
    WIDTH,
    Toy,
    assert_same_gradients,
    batch,
    cut,
    gradients,
    reference,
    run_in_process,
    weighted_loss,
)


@pytest.mark.parametrize("schedule_name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_loss_and_gradients_equal_the_uncut_model(num_stages: int, num_microbatches: int, schedule_name: str) -> None:
    toy, ids = Toy(), batch(7)
    loss, expected = reference(toy, ids)
    stages = cut([toy] * num_stages, ids, num_microbatches)
    run_in_process(stages, get_schedule(schedule_name, num_stages, num_microbatches))
    torch.testing.assert_close(weighted_loss(stages[-1]), loss, rtol=1e-12, atol=0)
    assert_same_gradients(gradients(toy), expected)


@pytest.mark.parametrize("depths", [(5, 4, 1, 0), (6, 5, 3, 0), (9, 9, 9, 9), (0, 0, 0, 0), (3, 0, 0, 0)])
def test_any_depth_of_the_warm_up_gives_the_same(depths: tuple[int, ...]) -> None:
    toy, ids = Toy(), batch(16)
    _, expected = reference(toy, ids)
    pipeline = run_in_process(cut([toy] * 4, ids, 8), one_f_one_b(4, 8, depths))
    assert_same_gradients(gradients(toy), expected)
    peaks = [executor.peak_live_microbatches for executor in pipeline.executors]
    assert peaks == [min(depth + 1, 8) for depth in depths]


SPECS = [
    ScheduleSpec(name="zero_bubble"),
    ScheduleSpec(name="zero_bubble", depths=(2, 1, 1, 0)),
    *(
        ScheduleSpec(name="sliced_1f1b", num_sliced_first=first, num_sliced_last=last)
        for first in range(4)
        for last in range(4)
        if 0 < first + last <= 3
    ),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_slices_and_split_backwards_give_the_same(spec: ScheduleSpec) -> None:
    for num_stages, frozen in ((1, ()), (2, ()), (4, (0, 1)), (4, (2, 3))):
        if spec.depths and num_stages != 4:
            continue
        toy, ids = Toy(frozen_blocks=frozen), batch(7)
        toy.embedding.requires_grad_(0 not in frozen)
        loss, expected = reference(toy, ids)
        schedule = get_schedule(spec, num_stages, 3)
        stages = cut([toy] * num_stages, ids, 1)
        for stage in stages:
            stage.microbatches = ids.split(list(unit_sizes(units_of(schedule), [3, 2, 2])))
        pipeline = run_in_process(stages, schedule)
        torch.testing.assert_close(weighted_loss(stages[-1]), loss, rtol=1e-12, atol=0)
        assert_same_gradients(gradients(toy), expected)
        for executor in pipeline.executors:
            assert executor.peak_live_microbatches == peak_stash(schedule, executor.stage_index)
            assert not executor._live


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5])
def test_several_stages_a_rank_give_the_same(num_microbatches: int) -> None:
    toy, ids = Toy(), batch(7)
    _, expected = reference(toy, ids)
    run_in_process(cut([toy] * 4, ids, num_microbatches), interleaved_1f1b(2, num_microbatches, 2))
    assert_same_gradients(gradients(toy), expected)


def test_a_lowered_schedule_gives_the_same() -> None:
    toy, ids = Toy(), batch(7)
    _, expected = reference(toy, ids)
    run_in_process(cut([toy] * 3, ids, 4), lower(one_f_one_b(3, 4)))
    assert_same_gradients(gradients(toy), expected)


def test_two_replicas_one_after_the_other_add_up() -> None:
    toy, ids = Toy(), batch(9)
    _, expected = reference(toy, ids)
    for part in (ids[:5], ids[5:]):
        run_in_process(cut([toy] * 2, part, 3, total=len(ids)), one_f_one_b(2, 3))
    assert_same_gradients(gradients(toy), expected)


@pytest.mark.parametrize("frozen", [[0, 1], [2, 3], [1], [0, 1, 2, 3]])
def test_frozen_stages(frozen: list[int]) -> None:
    toy, ids = Toy(frozen_blocks=frozen), batch(6)
    toy.embedding.requires_grad_(False)
    _, expected = reference(toy, ids)
    run_in_process(cut([toy] * 4, ids, 3), one_f_one_b(4, 3))
    assert_same_gradients(gradients(toy), expected)


def test_nothing_requires_grad() -> None:
    toy, ids = Toy().requires_grad_(False), batch(6)
    stages = cut([toy] * 3, ids, 2)
    run_in_process(stages, one_f_one_b(3, 2))
    assert all(gradient is None for gradient in gradients(toy).values())


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_evaluation_keeps_nothing_and_any_order_works(grad_mode: type) -> None:
    toy, ids = Toy(), batch(6)
    loss, expected = reference(toy, ids)
    pipeline = InProcessPipeline(3)
    for num_samples in (6, 2, 6):
        stages = cut([toy] * 3, ids[:num_samples], 2, train=False)
        with grad_mode():
            pipeline.run(stages, forward_only(3, 2))
        assert [executor.peak_live_microbatches for executor in pipeline.executors] == [0, 0, 0]
        assert all(gradient is None for gradient in gradients(toy).values())
    torch.testing.assert_close(weighted_loss(stages[-1]), loss, rtol=1e-12, atol=0)
    pipeline.run(cut([toy] * 3, ids, 4), one_f_one_b(3, 4))
    assert_same_gradients(gradients(toy), expected)


class CountingStage:
    """Sends one tensor on and counts how many of those that crossed are alive."""

    def __init__(self, *, is_last: bool) -> None:
        self.is_last = is_last
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.peak = 0

    def signature(self, microbatch_index: int) -> Hashable:
        return None

    def forward(self, microbatch_index: int, received: tuple[Tensor, ...]) -> StageOutput:
        h = received[0] if received else torch.ones(WIDTH)
        h = h * self.weight
        self.alive.add(received[0] if received else h)
        self.peak = max(self.peak, len(self.alive))
        return StageOutput(loss=h.sum()) if self.is_last else StageOutput(sent=(h,))


@pytest.mark.parametrize("num_microbatches", [4, 32])
def test_live_boundary_activations_are_bounded(num_microbatches: int) -> None:
    stages = [CountingStage(is_last=index == 3) for index in range(4)]
    gc.disable()  # only reference counts may free them
    try:
        pipeline = InProcessPipeline(4)
        pipeline.run(stages, one_f_one_b(4, num_microbatches))
        assert [stage.peak for stage in stages] == [4, 3, 2, 1]
        assert [executor.peak_live_microbatches for executor in pipeline.executors] == [4, 3, 2, 1]
        assert [len(stage.alive) for stage in stages] == [0, 0, 0, 0]
    finally:
        gc.enable()


def test_what_was_received_and_sent_is_let_go_after_the_first_part_of_a_backward() -> None:
    pipeline = InProcessPipeline(3)
    held: list[int] = []

    class Looking:
        def ran(self, action: Action, *times: float) -> None:
            if action.type is ActionType.BACKWARD_INPUT:
                live = pipeline.executors[1]._live[1 * 3 + action.microbatch_index]
                held.append(len(live.received) + len(live.output.sent))

    pipeline.executors[1].observer = Looking()
    run = cut([Toy()] * 3, batch(6), 3)
    pipeline.run(run, get_schedule("zero_bubble", 3, 3))
    assert held == [0, 0, 0]


class RaisingStage:
    def __init__(self, *, is_last: bool, error: Exception | None = None, in_backward: bool = False) -> None:
        self.is_last = is_last
        self.error = error
        self.in_backward = in_backward
        self.weight = nn.Parameter(torch.ones(2))

    def signature(self, microbatch_index: int) -> Hashable:
        return None

    def _raise(self, gradient: Tensor) -> None:
        assert self.error is not None
        raise self.error

    def forward(self, microbatch_index: int, received: tuple[Tensor, ...]) -> StageOutput:
        h = (received[0] if received else torch.ones(2)) * self.weight
        if self.error is not None and microbatch_index == 1:
            if not self.in_backward:
                raise self.error
            h.register_hook(self._raise)
        return StageOutput(loss=h.sum()) if self.is_last else StageOutput(sent=(h,))


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("failing_stage", [0, 1, 2])
def test_an_error_names_stage_microbatch_and_direction(failing_stage: int, in_backward: bool) -> None:
    stages = [
        RaisingStage(is_last=i == 2, error=KeyError("gone") if i == failing_stage else None, in_backward=in_backward)
        for i in range(3)
    ]
    direction = "backward" if in_backward else "forward"
    with pytest.raises(
        StageError, match=rf"stage {failing_stage} of 3 .*{direction} of micro-batch 1: KeyError"
    ) as info:
        InProcessPipeline(3).run(stages, one_f_one_b(3, 3))
    assert (info.value.stage_index, info.value.microbatch_index, info.value.direction) == (failing_stage, 1, direction)
    assert isinstance(info.value.__cause__, KeyError)


def test_an_error_names_the_slice() -> None:
    stages = [RaisingStage(is_last=i == 1, error=KeyError("gone") if i else None) for i in range(2)]
    with pytest.raises(StageError, match=r"stage 1 of 2 .*forward of micro-batch 0\.1: KeyError") as info:
        InProcessPipeline(2).run(stages, sliced_one_f_one_b(2, 2, num_sliced_first=1))
    assert (info.value.microbatch_index, info.value.slice_index) == (0, 1)


def test_our_own_errors_keep_their_type() -> None:
    stages = [RaisingStage(is_last=index == 1, error=CaptureError("cannot") if index else None) for index in range(2)]
    with pytest.raises(CaptureError) as info:
        InProcessPipeline(2).run(stages, one_f_one_b(2, 2))
    assert (info.value.stage_index, info.value.microbatch_index) == (1, 1)  # type: ignore[attr-defined]


def test_other_values_under_the_same_signature_are_refused() -> None:
    class Branching(CountingStage):
        def forward(self, microbatch_index: int, received: tuple[Tensor, ...]) -> StageOutput:
            return StageOutput(sent=(torch.ones(2 + microbatch_index),))

    with pytest.raises(PipelineRuntimeError, match=r"value 0 is float32\[3\].* it was float32\[2\]"):
        InProcessPipeline(2).run([Branching(is_last=False), CountingStage(is_last=True)], forward_only(2, 2))


class ForgetfulStage(CountingStage):
    """Sends two values; the last stage uses only the second one."""

    def forward(self, microbatch_index: int, received: tuple[Tensor, ...]) -> StageOutput:
        if self.is_last:
            return StageOutput(loss=(received[1] * self.weight).sum())
        return StageOutput(sent=(self.weight * 2, self.weight * 3))


def test_a_value_that_nobody_uses_has_a_zero_gradient() -> None:
    stages = [ForgetfulStage(is_last=False), ForgetfulStage(is_last=True)]
    InProcessPipeline(2).run(stages, one_f_one_b(2, 2))
    assert stages[0].weight.grad is not None
    assert stages[0].weight.grad.tolist() == [2 * 3.0] * WIDTH


def test_gradients_cross_in_the_memory_order_of_their_values() -> None:
    leaf = torch.zeros(3, 4).t().requires_grad_()
    gradient = torch.rand(4, 3)
    moved = _in_layout_of(leaf, gradient)
    assert moved.stride() == (1, 4)
    assert torch.equal(moved, gradient)
    assert not moved.requires_grad
    assert torch.equal(_in_layout_of(leaf, gradient.to_sparse()), gradient)


def test_a_schedule_that_waits_in_a_circle_is_an_error() -> None:
    good = gpipe(2, 2)
    stage_0, stage_1 = good.actions_by_rank
    circular = Schedule(
        name="circular",
        num_microbatches=2,
        actions_by_rank=((stage_0[0], stage_0[2], stage_0[1], stage_0[3]), stage_1),
    )
    with pytest.raises(PipelineRuntimeError, match=r"circular.*0B0, 1F1"):
        run_in_process(cut([Toy()] * 2, batch(4), 2), circular)


def test_a_schedule_for_other_stages_is_refused() -> None:
    with pytest.raises(PlanError, match="3 stages, this pipeline 2"):
        run_in_process(cut([Toy()] * 2, batch(4), 2), one_f_one_b(3, 2))


def test_backward_runs_without_autocast() -> None:
    seen = []

    class Watching(CountingStage):
        def forward(self, microbatch_index: int, received: tuple[Tensor, ...]) -> StageOutput:
            output = super().forward(microbatch_index, received)
            assert torch.is_autocast_enabled("cpu")
            tensor = output.loss if output.loss is not None else output.sent[0]
            tensor.register_hook(lambda gradient: seen.append(torch.is_autocast_enabled("cpu")))
            return output

    with torch.autocast("cpu", dtype=torch.bfloat16):
        InProcessPipeline(2).run([Watching(is_last=False), Watching(is_last=True)], one_f_one_b(2, 2))
    assert seen == [False] * 4


class Notes:
    """An observer that keeps what it is told, in one list with other events."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.times: list[tuple[float, float, float]] = []

    def ran(self, action: Action, waited_from_s: float, started_s: float, ended_s: float) -> None:
        self.events.append(str(action))
        self.times.append((waited_from_s, started_s, ended_s))


def test_an_observer_is_told_of_every_action_and_the_callback_comes_before_the_last_backward() -> None:
    schedule = one_f_one_b(2, 3)
    pipeline = InProcessPipeline(2)
    notes = [Notes(), Notes()]
    for executor, own in zip(pipeline.executors, notes, strict=True):
        executor.observer = own
    calls: list[tuple[int, ...]] = []
    stages = cut([Toy()] * 2, batch(6), 3)
    pipeline.run(stages, schedule, before_last_backward=lambda: calls.append(tuple(len(own.events) for own in notes)))
    for own, actions in zip(notes, schedule.actions_by_rank, strict=True):
        assert own.events == [str(action) for action in actions]
        times = [time for triple in own.times for time in triple]
        assert times == sorted(times)
    assert calls == [(5, 5)]
    pipeline.run(cut([Toy()] * 2, batch(6), 3, train=False), forward_only(2, 3), before_last_backward=pytest.fail)


def test_a_rank_is_called_back_before_its_last_backward() -> None:
    notes = Notes()
    executor = InProcessPipeline(1).executors[0]
    executor.observer = notes
    executor.run(
        cut([Toy()], batch(6), 3)[0],
        one_f_one_b(1, 3),
        before_last_backward=lambda: notes.events.append("callback"),
    )
    assert notes.events == ["0F0", "0B0", "0F1", "0B1", "0F2", "callback", "0B2"]
