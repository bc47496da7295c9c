"""The same stages, cut out of one whole module by capture and replayed, as the strategy runs them."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from benchmarks.module_stage import Loss
from benchmarks.stage_modules import StageMaker
from lightning_autopipe.capture.cuts import CutTable, find_layers
from lightning_autopipe.capture.draws import DrawKey
from lightning_autopipe.capture.program import StageProgram, bounds_to_ranges
from lightning_autopipe.capture.proof import proven_program
from lightning_autopipe.capture.trace import trace_step
from lightning_autopipe.runtime.stage import StageOutput


class ReplayedStage:
    """A `StageForward` that runs one step of the whole model and passes over the other stages.

    Args:
        model: makes the stages, which are joined here.
        stage_index: the one to run.
        num_stages: of the whole model.
        num_samples: of a micro-batch.
        loss: of a micro-batch's result and its targets.
    """

    def __init__(self, model: StageMaker, *, stage_index: int, num_stages: int, num_samples: int, loss: Loss) -> None:
        self.module = nn.Sequential(*(model.stage(index, num_stages) for index in range(num_stages)))
        self._loss = loss
        self._shares: tuple[Tensor, ...] = (model.inputs(num_samples),)
        trace = trace_step(self.module, self._step, (self._shares[0],), {}, step_name="step")
        table = CutTable(trace)
        trace.layers = find_layers(trace, table)
        starts = [
            next(call.start for call in trace.calls if call.module_path == str(index)) for index in range(1, num_stages)
        ]
        start, stop = bounds_to_ranges(starts)[stage_index]
        self._program: StageProgram = proven_program(
            trace,
            table,
            self.module,
            self._step,
            (self._shares[0],),
            {},
            start=start,
            stop=stop,
            device=torch.device("cpu"),
        )

    def begin(self, batch: Tensor, num_microbatches: int) -> None:
        """Begin a step."""
        self._shares = batch.chunk(num_microbatches)

    def signature(self, unit_index: int) -> Hashable:
        return len(self._shares[unit_index])

    def forward(self, unit_index: int, received: tuple[Tensor, ...]) -> StageOutput:
        key = DrawKey(seed=0, step=0, replica_index=0, microbatch_index=unit_index)
        ran = self._program.run(self._step, (self._shares[unit_index],), {}, received, key)
        if self._program.is_last:
            return StageOutput(loss=ran.result / len(self._shares))
        return StageOutput(sent=tuple(ran.sent))

    def _step(self, share: Tensor) -> Tensor:
        return self._loss(self.module(share), torch.zeros(len(share), 1))
