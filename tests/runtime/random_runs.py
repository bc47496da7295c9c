"""Randomised steps of the executor between real processes: any schedule, sizes and pauses must end, and be right."""

from __future__ import annotations

import random
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.schedule import Schedule
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.runtime.executor import StageExecutor
from lightning_autopipe.runtime.p2p_transport import P2PTransport
from lightning_autopipe.runtime.process_groups import create_process_groups
from lightning_autopipe.runtime.stage import StageOutput
from lightning_autopipe.runtime.units import units_of
from lightning_autopipe.schedules import get_schedule

MAX_MESSAGE_BYTES = 8 * 2**20
NAMES = ("1f1b", "gpipe", "sliced_1f1b", "zero_bubble", "interleaved_1f1b")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step: a schedule, the floats of each unit's message across each cut, and the longest pause of each rank."""

    spec: ScheduleSpec
    num_stages: int
    num_microbatches: int
    seed: int
    max_bytes: int
    pauses_s: tuple[float, ...]

    @property
    def schedule(self) -> Schedule:
        return get_schedule(self.spec, self.num_stages, self.num_microbatches)

    def num_floats(self) -> list[int]:
        """By unit, across all cuts; small ones and large ones, which differ within a step."""
        numbers = random.Random(self.seed)
        return [max(1, int(self.max_bytes / 4 * numbers.random() ** 3)) for _ in units_of(self.schedule)]


def random_case(seed: int, num_ranks: int, *, max_pause_s: float, max_bytes: int = MAX_MESSAGE_BYTES) -> Case:
    """The case of one seed."""
    numbers = random.Random(seed)
    name = numbers.choice(NAMES)
    num_microbatches = numbers.randint(1, 12)
    stages_per_rank = numbers.choice((2, 3)) if name == "interleaved_1f1b" and num_ranks > 1 else 1
    depths: tuple[int, ...] = ()
    if name in ("1f1b", "sliced_1f1b", "zero_bubble") and numbers.random() < 0.6:
        depths = tuple(sorted((numbers.randint(0, num_microbatches + 2) for _ in range(num_ranks)), reverse=True))
    num_first = num_last = 0
    if name == "sliced_1f1b":
        num_first = numbers.randint(0, num_microbatches)
        num_last = numbers.randint(0, num_microbatches - num_first)
    return Case(
        spec=ScheduleSpec(
            name=name,
            depths=depths,
            num_sliced_first=num_first,
            num_sliced_last=num_last,
            stages_per_rank=stages_per_rank,
        ),
        num_stages=num_ranks * stages_per_rank,
        num_microbatches=num_microbatches,
        seed=seed,
        max_bytes=int(max_bytes * numbers.random() ** 2),
        pauses_s=tuple(numbers.choice((0.0, max_pause_s / 4, max_pause_s)) for _ in range(num_ranks)),
    )


class PausingStage:
    """Multiplies by its parameter, with pauses; the loss of unit u is the mean of a value that is u + 1."""

    def __init__(self, case: Case, stage_index: int, pause_s: float) -> None:
        self.stage_index = stage_index
        self.is_last = stage_index == case.num_stages - 1
        self.parameter = torch.nn.Parameter(torch.ones((), dtype=torch.float32))
        self.num_floats = case.num_floats()
        self._numbers = random.Random(case.seed * 1000 + stage_index)
        self._pause_s = pause_s

    def signature(self, unit_index: int) -> Hashable:
        return self.num_floats[unit_index]

    def pause(self, gradient: Tensor | None = None) -> None:
        if self._pause_s:
            time.sleep(self._numbers.uniform(0, self._pause_s))

    def forward(self, unit_index: int, received: tuple[Tensor, ...]) -> StageOutput:
        self.pause()
        h = received[0] if received else torch.full((self.num_floats[unit_index],), float(unit_index + 1))
        assert h.shape == (self.num_floats[unit_index],)
        assert float(h[0].detach()) == float(h[-1].detach()) == unit_index + 1, "another unit's values came"
        h = h * self.parameter
        h.register_hook(self.pause)
        return StageOutput(loss=h.double().mean()) if self.is_last else StageOutput(sent=(h,))


def run_cases(cases: list[Case], timeout_s: float) -> list[list[float]]:
    """Run all cases in these processes, over the same groups; give the gradients of this rank's stages."""
    num_ranks = dist.get_world_size()
    groups = create_process_groups(ParallelLayout(num_stages=num_ranks), timeout_s=timeout_s)
    transports: dict[int, P2PTransport] = {}
    results = []
    for case in cases:
        schedule = case.schedule
        if schedule.stages_per_rank not in transports:
            transport = groups.transport(torch.device("cpu"), stages_per_rank=schedule.stages_per_rank)
            transport.warm_up()
            transports[schedule.stages_per_rank] = transport
        rank = groups.stage_index
        executor = StageExecutor(
            stage_index=rank, num_stages=case.num_stages, transport=transports[schedule.stages_per_rank]
        )
        stages = {index: PausingStage(case, index, case.pauses_s[rank]) for index in schedule.stages_of(rank)}
        executor.run(stages, schedule)
        results.append([float(_gradient(stage)) for stage in stages.values()])
    return results


def _gradient(stage: PausingStage) -> Tensor:
    assert stage.parameter.grad is not None, f"stage {stage.stage_index} has no gradient"
    return stage.parameter.grad


def wrong_cases(cases: list[Case], by_rank: list[list[list[float]]]) -> Iterator[str]:
    """Tell which cases gave other gradients than the sum of 1, 2, ... for each parameter."""
    for index, case in enumerate(cases):
        num_units = len(units_of(case.schedule))
        expected = num_units * (num_units + 1) / 2
        found = [gradient for results in by_rank for gradient in results[index]]
        if any(abs(gradient - expected) > 1e-3 * expected for gradient in found):
            yield f"{case}: gradients {found}, expected {expected}"
