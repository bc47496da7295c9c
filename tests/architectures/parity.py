"""One architecture cut at every planned cut, against its uncut step."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_autopipe.runtime.pipeline import Pipeline
from tests.capture.support import Traced
from tests.runtime.pipelines import Run, make_pipeline, run_pipelines, run_plain

MAX_STAGES = 4
MAX_RELATIVE_DIFFERENCE = {torch.float64: 1e-12, torch.float32: 1e-5}
_NEGLIGIBLE = 1e-6  # of the largest gradient: what is zero but for rounding (a bias before a normalization)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far a run through stages is from the uncut step."""

    cut_points: tuple[int, ...]
    relative: float
    """The largest over the loss and all gradients; 0.0 where all bits are equal."""
    names: tuple[str, ...]
    """What differs."""
    reason: str
    """Which sums have another order; empty where nothing differs."""


def planned_cuts(num_layers: int) -> Iterator[tuple[int, ...]]:
    """Every layer boundary by itself, then all that fits into the most stages."""
    for boundary in range(1, num_layers):
        yield (boundary,)
    num_stages = min(MAX_STAGES, num_layers)
    if num_stages > 2:
        yield tuple(num_layers * stage_index // num_stages for stage_index in range(1, num_stages))


def uncut(module: LightningModule, batch: Any) -> Run:
    """The step as the user wrote it; the module is left as it was."""
    before = copy.deepcopy(module.state_dict())
    run = run_plain(module, batch)
    module.load_state_dict(before)
    return run


def through_stages(
    module: LightningModule, batch: Any, cut_points: Sequence[int], *, num_microbatches: int = 1
) -> tuple[Pipeline, Run]:
    """The step through stages that begin at these layers; the module is left as it was."""
    before = copy.deepcopy(module.state_dict())
    pipeline = make_pipeline(
        module,
        (batch, 0),
        num_stages=len(cut_points) + 1,
        num_microbatches=num_microbatches,
        partition=tuple(cut_points),
    )
    run = run_pipelines([pipeline], [batch])
    module.load_state_dict(before)
    return pipeline, run


def difference(
    module: LightningModule, batch: Any, found: Traced, cut_points: Sequence[int], reference: Run
) -> Difference:
    """Run through stages and compare with a reference.

    Raises:
        AssertionError: other parameters have a gradient.
    """
    pipeline, run = through_stages(module, batch, cut_points)
    assert run.gradients.keys() == reference.gradients.keys(), run.gradients.keys() ^ reference.gradients.keys()
    scale = max(float(gradient.abs().max()) for gradient in reference.gradients.values())
    values = {"the loss": (run.loss, reference.loss)}
    values.update((name, (run.gradients[name], gradient)) for name, gradient in reference.gradients.items())
    by_name = {
        name: float((value - expected).abs().max()) / max(float(expected.abs().max()), _NEGLIGIBLE * scale)
        for name, (value, expected) in values.items()
        if not torch.equal(value, expected)
    }
    return Difference(
        cut_points=tuple(cut_points),
        relative=max(by_name.values(), default=0.0),
        names=tuple(by_name),
        reason=_reason(pipeline, found, cut_points, by_name) if by_name else "",
    )


def _reason(pipeline: Pipeline, found: Traced, cut_points: Sequence[int], names: Iterable[str]) -> str:
    """Say which gradients are summed in another order at these cuts."""
    stages = [pipeline.ownership.owned_parameters(stage_index) for stage_index in range(pipeline.num_stages)]
    if all(sum(name in owned for owned in stages) > 1 for name in names):
        return "a weight used on several stages"
    for cut in (found.trace.layers[index].start for index in cut_points):
        for reads in (found.trace.values[index].reads for index in found.table.crossing[cut]):
            if len(reads) > 2 and min(reads) < cut:
                return "a value used on several stages"
    return "a gradient crosses in the memory order of its value"
