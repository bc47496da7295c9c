"""Measures each layer of a step by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_autopipe.capture.cuts import CutTable
from lightning_autopipe.capture.records import StepTrace
from lightning_autopipe.core.errors import CaptureError
from lightning_autopipe.core.profile import LayerMeasurement
from lightning_autopipe.profiling.groups import share_out
from lightning_autopipe.profiling.stopwatch import Stopwatch
from lightning_autopipe.profiling.survey import LayerGroup, survey_layers
from lightning_autopipe.profiling.unchanged import unchanged

DEFAULT_BUDGET_S = 2.0
"""How long a process measures, besides one run of each kind of layer to begin with."""

_WARM_UP_ROUNDS = 2
_MIN_ROUNDS = 3
_MAX_ROUNDS = 15

Findings = dict[int, LayerMeasurement]
"""What one process measured, by the number of the group of equal layers."""

Exchange = Callable[["Findings | str"], Sequence["Findings | str"]]
"""Tells all processes what this one has found, or why it failed; gives what all of them tell. Collective."""


class ProfilingError(CaptureError):
    """The layers of a step cannot be measured."""


def measure_layers(
    trace: StepTrace,
    table: CutTable,
    module: nn.Module,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    device: torch.device,
    budget_s: float = DEFAULT_BUDGET_S,
    member_index: int = 0,
    num_members: int = 1,
    exchange: Exchange | None = None,
) -> tuple[LayerMeasurement, ...]:
    """Measure seconds and bytes of every layer of a traced step, for the micro-batch that it was traced on.

    A layer runs by itself on random tensors of the shapes that cross into it, again and again in turns with the others,
    so that caches are as cold as in a real step. Equal layers are measured once. Times are medians after a warm-up.
    Module, gradients, flags and random state are as before, and nothing is logged. Runs under the caller's grad mode.

    Args:
        trace: of one micro-batch, with its layers.
        table: its cuts.
        module: whole, on `device`.
        step: the traced method.
        args: the micro-batch and what else the step takes.
        kwargs: keyword arguments alike.
        device: where to run.
        budget_s: how long to measure, roughly.
        member_index: this process's number among those that share the work.
        num_members: how many those are; all trace the same step.
        exchange: shares what was found; not needed for one process.

    Raises:
        ProfilingError: a layer cannot be run by itself; on every process alike.
    """
    findings: Findings | str
    num_groups, groups = 0, []
    try:
        with unchanged(module, trace.written_parameters):
            groups = survey_layers(trace, table, module, step, args, kwargs, device=device)
            num_groups = len(groups)
            shares = share_out(dict(enumerate(group.forward_flops for group in groups)), num_members)
            mine = {number: groups[number] for number in shares[member_index]}
            seconds = _measure(mine, device, budget_s)
            findings = {number: _measurement(mine[number], *seconds[number]) for number in mine}
    except Exception as error:  # the others wait in the exchange, and must be told
        findings = f"{type(error).__name__}: {error}"
    told = [findings] if exchange is None else exchange(findings)
    merged: Findings = {}
    for of_member in told:
        if isinstance(of_member, str):
            raise ProfilingError(f"the layers of the step cannot be measured one by one: {of_member}")
        merged.update(of_member)
    if set(merged) != set(range(num_groups)):
        raise ProfilingError("the processes traced unlike steps, so that they cannot share the measuring of its layers")
    of_layer = {index: merged[number] for number, group in enumerate(groups) for index in group.layers}
    return tuple(of_layer[index] for index in range(len(trace.layers)))


def _measure(groups: Mapping[int, LayerGroup], device: torch.device, budget_s: float) -> dict[int, tuple[float, float]]:
    """Median seconds of forward and backward of each group."""
    times: dict[int, list[tuple[float, float]]] = {number: [] for number in groups}
    deadline = time.perf_counter() + budget_s
    for round_index in range(_WARM_UP_ROUNDS + _MAX_ROUNDS):
        if round_index >= _WARM_UP_ROUNDS + _MIN_ROUNDS and time.perf_counter() > deadline:
            break
        for number, group in groups.items():
            taken = _run(group, device)
            if round_index >= _WARM_UP_ROUNDS:
                times[number].append(taken)
    for group in groups.values():
        group.clear_gradients()
    return {
        number: (statistics.median(f for f, _ in taken), statistics.median(b for _, b in taken))
        for number, taken in times.items()
    }


def _run(group: LayerGroup, device: torch.device) -> tuple[float, float]:
    received = group.sample_received(device)
    gradients = group.sample_gradients(device)
    forward, backward = Stopwatch(device), Stopwatch(device)
    output = group.runner.forward(group.runner.fresh_batch(), received, forward)
    group.runner.backward(output, gradients, backward)
    return forward.elapsed_s(), backward.elapsed_s() if group.root_specs else 0.0


def _measurement(group: LayerGroup, forward_s: float, backward_s: float) -> LayerMeasurement:
    return LayerMeasurement(
        forward_s=forward_s,
        backward_s=backward_s,
        activation_bytes=group.activation_bytes,
        received_kept_bytes=group.received_kept_bytes,
        sent_kept_bytes=group.sent_kept_bytes,
        peak_bytes=group.peak_bytes,
        sent_bytes=sum(spec.num_bytes for spec in group.sent),
        gradient_bytes=sum(spec.num_bytes for spec in group.sent if spec.requires_grad),
    )
