"""Measured profiles in the strategy: shared between ranks, and what happens when they cannot be had."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_autopipe.core import LayerMeasurement, LayerProfile, ModelProfile
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.profiling import ProfilingError
from lightning_autopipe.runtime.pipeline import Pipeline
from lightning_autopipe.schedules import get_schedule
from lightning_autopipe.strategy.measuring import measured_profile

STEP = "training_step"
BATCH = (torch.ones(4, 8), 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.pow(2).mean()


class OtherRanks:
    """A communicator of two ranks of which the other one says `other(what this one says)`."""

    def __init__(self, other: Any) -> None:
        self.layout = ParallelLayout(num_stages=2, num_replicas=1)
        self.global_rank = 0
        self.told: list[Any] = []
        self._other = other

    def gather_in_pipeline(self, value: Any) -> list[Any]:
        self.told.append(value)
        return [self._other(value), value]

    def gather_over_replicas(self, value: Any) -> list[Any]:
        return [value]


def a_pipeline(module: nn.Module) -> Pipeline:
    layout = ParallelLayout(num_stages=2, num_replicas=1)
    return Pipeline(
        module, layout=layout, global_rank=0, transport=None, num_microbatches=1, make_schedule=get_schedule
    )


def measure(pipeline: Any, profile: ModelProfile, ranks: Any, *, may_fail: bool) -> ModelProfile:
    return measured_profile(
        pipeline, profile, ranks, step_name=STEP, args=BATCH, kwargs={}, num_microbatches=2, may_fail=may_fail
    )


def test_both_ranks_measurements_make_the_profile() -> None:
    pipeline = a_pipeline(Net())
    profile = pipeline.profile(STEP, BATCH, {})

    theirs = LayerMeasurement(
        forward_s=1.0, backward_s=1.0, activation_bytes=0, peak_bytes=0, sent_bytes=7, gradient_bytes=7
    )
    ranks = OtherRanks(lambda mine: {number: theirs for number in range(3) if number not in mine})
    measured = measure(pipeline, profile, ranks, may_fail=False)
    sent = [layer.measured.sent_bytes for layer in measured.layers if layer.measured]
    assert len(sent) == measured.num_layers
    assert 7 in sent
    assert set(sent) <= {7, 2 * 8 * 4, 0}  # two of four samples, or the end of the step
    assert len(set(sent)) > 1
    assert len(ranks.told) == 1
    assert pipeline.num_microbatches == 1
    assert not pipeline.tracing


@pytest.mark.parametrize("may_fail", [True, False])
def test_a_rank_that_fails_before_it_measures_tells_the_others(may_fail: bool) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("no room")

    pipeline = SimpleNamespace(
        module=Net(), device=torch.device("cpu"), silent=contextlib.nullcontext, capture_microbatch=fail
    )
    profile = ModelProfile(layers=(LayerProfile(name="a", forward_flops=1.0),))
    ranks = OtherRanks(lambda mine: {})
    if may_fail:
        with pytest.warns(UserWarning, match="no room. Stages are balanced by counted .* profile='flops'"):
            assert measure(pipeline, profile, ranks, may_fail=True) is profile
    else:
        with pytest.raises(ProfilingError, match="no room"):
            measure(pipeline, profile, ranks, may_fail=False)
    assert ranks.told == ["MemoryError: no room"]


def test_when_another_rank_fails_all_count_operations() -> None:
    pipeline = a_pipeline(Net())
    profile = pipeline.profile(STEP, BATCH, {})
    with pytest.warns(UserWarning, match="no kernel"):
        assert measure(pipeline, profile, OtherRanks(lambda mine: "no kernel"), may_fail=True) is profile
