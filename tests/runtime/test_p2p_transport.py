"""What goes wrong between two processes, and what must not."""

from __future__ import annotations

import gc
import time
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.schedule import Schedule
from lightning_autopipe.runtime import p2p_channel, p2p_transport, wire
from lightning_autopipe.runtime.errors import CommunicationError, PipelineRuntimeError
from lightning_autopipe.runtime.executor import StageExecutor
from lightning_autopipe.runtime.process_groups import create_process_groups
from lightning_autopipe.runtime.stage import StageForward, StageOutput
from lightning_autopipe.runtime.tensor_spec import SpecBook
from lightning_autopipe.runtime.transport import SignatureTable
from lightning_autopipe.schedules import forward_only, gpipe, one_f_one_b
from tests.harness import run_processes, run_processes_to_end
from tests.runtime.test_executor import CountingStage
from tests.runtime.test_p2p_pipeline import send_odd_tensors
from tests.runtime.toy import Toy, assert_same_gradients, batch, cut, gradients, reference


def executor_of(num_stages: int, timeout_s: float = 20, num_replicas: int = 1) -> StageExecutor:
    layout = ParallelLayout(num_stages=num_stages, num_replicas=num_replicas)
    groups = create_process_groups(layout, timeout_s=timeout_s)
    transport = groups.transport(torch.device("cpu"))
    transport.warm_up()
    return StageExecutor(stage_index=groups.stage_index, num_stages=num_stages, transport=transport)


class DelayedStage(CountingStage):
    """Stage 0 sleeps in one micro-batch, or gives another shape under the same signature."""

    def __init__(self, *, stage_index: int, what: str) -> None:
        super().__init__(is_last=stage_index == 1)
        self.what = what if stage_index == 0 else ""

    def forward(self, microbatch_index: int, received: tuple[Tensor, ...]) -> StageOutput:
        if microbatch_index == 2 and self.what == "sleep":
            time.sleep(3)
        output = super().forward(microbatch_index, received)
        if microbatch_index == 2 and self.what == "branch":
            return StageOutput(sent=(output.sent[0][:2],))
        return output


def meet_error(what: str) -> dict[str, Any] | None:
    executor = executor_of(2, timeout_s=1)
    try:
        executor.run(DelayedStage(stage_index=executor.stage_index, what=what), one_f_one_b(2, 4))
    except PipelineRuntimeError as error:
        failed_action = executor.current_action
        with pytest.raises(PipelineRuntimeError, match="an earlier step failed"):
            executor.run(DelayedStage(stage_index=executor.stage_index, what=""), one_f_one_b(2, 4))
        return {
            "type": type(error).__name__,
            "text": str(error),
            "action": str(failed_action),
            **error.__dict__,
        }
    return None


def test_a_limit_names_both_stages_microbatch_and_direction() -> None:
    last, _ = run_processes(2, meet_error, "sleep")
    text = last.pop("text")
    assert last == {
        "type": "CommunicationError",
        "action": "1F2",
        "stage_index": 1,
        "peer_stage_index": 0,
        "microbatch_index": 2,
        "slice_index": None,
        "direction": "forward",
    }
    assert "stage 1 (global rank 0): receiving the activations of micro-batch 2 from stage 0 (global rank 1)" in text
    assert "limit: timeout = 1 s" in text


def test_other_shapes_under_one_signature_are_refused_by_the_sender() -> None:
    _, first = run_processes(2, meet_error, "branch")
    assert first["type"] == "PipelineRuntimeError"
    assert "value 0 is float32[2]" in first["text"]
    assert (first["stage_index"], first["microbatch_index"], first["direction"]) == (0, 2, "forward")


def lose_peer() -> str:
    executor = executor_of(2)
    if executor.stage_index == 0:
        dist.barrier()
        time.sleep(0.2)
        raise SystemExit(3)
    dist.barrier()
    with pytest.raises(CommunicationError, match=r"receiving the activations of micro-batch 0 .*losed by peer") as info:
        executor.run(CountingStage(is_last=True), one_f_one_b(2, 2))
    assert isinstance(info.value.__cause__, RuntimeError)
    return "noticed"


def test_a_broken_connection_is_noticed_at_once() -> None:
    outcomes = run_processes_to_end(2, lose_peer, timeout_s=30)
    assert [outcome.exit_code for outcome in outcomes] == [0, 3], [outcome.traceback for outcome in outcomes]
    assert outcomes[0].value == "noticed"


def count_alive(num_microbatches: int) -> tuple[int, int, int]:
    executor = executor_of(3)
    stage = CountingStage(is_last=executor.stage_index == 2)
    gc.disable()
    executor.run(stage, one_f_one_b(3, num_microbatches))
    return stage.peak, executor.peak_live_microbatches, len(stage.alive)


@pytest.mark.parametrize("num_microbatches", [2, 32])
def test_live_boundary_activations_are_bounded(num_microbatches: int) -> None:
    bounds = [min(3 - stage_index, num_microbatches) for stage_index in (2, 1, 0)]
    assert run_processes(3, count_alive, num_microbatches) == [(bound, bound, 0) for bound in bounds]


class PendingCounter(CountingStage):
    """Looks at how many sends its executor still holds."""

    def __init__(self, executor: StageExecutor) -> None:
        super().__init__(is_last=executor.stage_index == executor.num_stages - 1)
        self.transport = executor._transport
        self.most = 0

    def forward(self, microbatch_index: int, received: tuple[Tensor, ...]) -> StageOutput:
        assert isinstance(self.transport, p2p_transport.P2PTransport)
        self.most = max(self.most, *(len(sender._pending) for sender in self.transport._senders.values()))
        return super().forward(microbatch_index, received)


def count_pending(evaluate: bool) -> int:
    p2p_channel._SMALL_BYTES = 0  # in this process, which ends with the test
    executor = executor_of(2)
    stage: StageForward = PendingCounter(executor)
    with torch.set_grad_enabled(not evaluate):
        executor.run(stage, forward_only(2, 40) if evaluate else one_f_one_b(2, 40))
    return stage.most


@pytest.mark.parametrize("evaluate", [False, True])
def test_sends_under_way_are_bounded(evaluate: bool) -> None:
    assert all(0 < most <= 5 for most in run_processes(2, count_pending, evaluate)[evaluate:])


def run_reversed_backwards() -> dict[str, Tensor | None]:
    """GPipe with its backwards last in, first out on stages 0 and 1, first in, first out on stage 2."""
    plain = gpipe(3, 5)
    lists = [
        actions if index == 2 else (*actions[:5], *reversed(actions[5:]))
        for index, actions in enumerate(plain.actions_by_rank)
    ]
    schedule: Schedule = replace(plain, name="reversed", actions_by_rank=tuple(lists))
    executor = executor_of(3)
    toy = Toy()
    executor.run(cut([toy] * 3, batch(10), 5)[executor.stage_index], schedule)
    return gradients(toy)


def test_orders_of_neighbours_may_differ() -> None:
    _, expected = reference(Toy(), batch(10))
    by_rank = run_processes(3, run_reversed_backwards)
    merged = {name: next((rank[name] for rank in by_rank if rank[name] is not None), None) for name in expected}
    assert_same_gradients(merged, expected)


def run_frozen(frozen: list[int]) -> dict[str, Tensor | None]:
    executor = executor_of(4)
    toy = Toy(frozen_blocks=frozen)
    toy.embedding.requires_grad_(False)
    executor.run(cut([toy] * 4, batch(32), 16)[executor.stage_index], one_f_one_b(4, 16))
    return gradients(toy)


@pytest.mark.parametrize("frozen", [[0, 1], [1, 2, 3], [0, 1, 2, 3]])
def test_frozen_stages(frozen: list[int]) -> None:
    toy = Toy(frozen_blocks=frozen)
    toy.embedding.requires_grad_(False)
    _, expected = reference(toy, batch(32))
    by_rank = run_processes(4, run_frozen, frozen)
    merged = {name: next((rank[name] for rank in by_rank if rank[name] is not None), None) for name in expected}
    assert_same_gradients(merged, expected)


def send_odd_tensors_through_host_memory() -> Tensor | None:
    p2p_transport.wire_for = lambda device, group: wire.HostWire(device)
    return send_odd_tensors(4)


def test_staging_in_host_memory_changes_nothing() -> None:
    _, staged = run_processes(2, send_odd_tensors_through_host_memory)
    _, direct = run_processes(2, send_odd_tensors, 4)
    assert torch.equal(staged, direct)


class GrowingStage:
    """Every micro-batch of another length, so that every one needs a header; later steps repeat some."""

    def __init__(self, *, is_last: bool, lengths: list[int]) -> None:
        self.is_last = is_last
        self.lengths = lengths
        self.parameter = nn.Parameter(torch.ones(()))

    def signature(self, microbatch_index: int) -> Hashable:
        return self.lengths[microbatch_index]

    def forward(self, microbatch_index: int, received: tuple[Tensor, ...]) -> StageOutput:
        h = received[0] if received else torch.ones(self.lengths[microbatch_index])
        h = h * self.parameter
        return StageOutput(loss=h.sum()) if self.is_last else StageOutput(sent=(h,))


def run_growing(max_signatures: int = 4096) -> list[float]:
    SignatureTable.MAX_SIGNATURES = SpecBook.MAX_SIGNATURES = max_signatures  # of this process
    executor = executor_of(3)
    sums = []
    for lengths in ([1, 2, 3, 4, 5, 6], [3, 7, 0, 8, 1], [7, 7, 7], [9]):
        stage = GrowingStage(is_last=executor.stage_index == 2, lengths=lengths)
        executor.run(stage, one_f_one_b(3, len(lengths)))
        assert stage.parameter.grad is not None
        sums.append(float(stage.parameter.grad))
    return sums


def test_new_shapes_in_every_microbatch() -> None:
    assert run_processes(3, run_growing) == [[21.0, 19.0, 21.0, 9.0]] * 3


@pytest.mark.parametrize("max_signatures", [1, 2, 4])
def test_what_was_forgotten_is_told_again(max_signatures: int) -> None:
    assert run_processes(3, run_growing, max_signatures) == [[21.0, 19.0, 21.0, 9.0]] * 3
