"""Measures each layer of a step by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_autopipe.capture.cuts import CutTable
from lightning_autopipe.capture.records import StepTrace
from lightning_autopipe.core.profile import LayerMeasurement
from lightning_autopipe.profiling.findings import (
    LayerFindings,
    OptimizerCost,
    ProfilingError,
    crossing_values,
    join_findings,
)
from lightning_autopipe.profiling.groups import share_out
from lightning_autopipe.profiling.optimizer_cost import optimizer_costs
from lightning_autopipe.profiling.stand_ins import in_memory
from lightning_autopipe.profiling.stopwatch import Stopwatch
from lightning_autopipe.profiling.survey import LayerGroup, survey_layers
from lightning_autopipe.profiling.unchanged import unchanged

DEFAULT_BUDGET_S = 2.0
"""How long a process measures, besides one run of each kind of layer to begin with."""

_WARM_UP_ROUNDS = 2
_MIN_ROUNDS = 3
_MAX_ROUNDS = 15


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
) -> tuple[LayerMeasurement, ...]:
    """Measure every layer of a traced step in this process alone, for the micro-batch that it was traced on.

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

    Raises:
        ProfilingError: a layer cannot be run by itself.
    """
    try:
        with unchanged(module, trace.written_parameters):
            share = LayerShare(trace, table, module, step, args, kwargs, device=device)
            (found,) = measure_in_turns({0: share}, budget_s).values()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if isinstance(found, str):
        raise ProfilingError(f"the layers of the step cannot be measured one by one: {found}")
    return join_findings([found]).measurements()


class LayerShare:
    """The layers of a step that this process measures, among those that share the work.

    A layer runs by itself on random tensors of the shapes that cross into it. Equal layers are measured once. Where a
    layer has gradients both of what came in and of parameters, its backward is also run as far as the first alone; the
    rest is the parameters' part. Meanwhile the module changes: see `unchanged`.

    Args:
        trace: of one micro-batch, with its layers.
        table: its cuts.
        module: whole, on `device`.
        step: the traced method.
        args: the micro-batch and what else the step takes.
        kwargs: keyword arguments alike.
        device: where to run.
        member_index: this process's number among those that share the work.
        num_members: how many those are; all trace the same step.

    Raises:
        Exception: whatever a layer that cannot be run by itself raises.
    """

    def __init__(
        self,
        trace: StepTrace,
        table: CutTable,
        module: nn.Module,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        device: torch.device,
        member_index: int = 0,
        num_members: int = 1,
    ) -> None:
        begin = time.perf_counter()
        groups = survey_layers(trace, table, module, step, args, kwargs, device=device)
        survey_s = time.perf_counter() - begin
        shares = share_out(dict(enumerate(group.forward_flops for group in groups)), num_members)
        self._times = [_GroupTimes(groups[number], device) for number in shares[member_index]]
        sent = {index: group.sent for group in groups for index in group.layers}
        self._num_layers = len(trace.layers)
        self._values = crossing_values(table, trace.layers, [sent[index] for index in range(self._num_layers)])
        for _ in range(_WARM_UP_ROUNDS):
            self.run_round()
        self.least_s = survey_s + (_WARM_UP_ROUNDS + _MIN_ROUNDS) * sum(taken.round_s for taken in self._times)
        """Seconds that all of it takes at the least."""
        for taken in self._times:
            taken.forget()

    def run_round(self) -> None:
        """Run each kind of layer once."""
        for taken in self._times:
            taken.run()

    def findings(self) -> LayerFindings:
        """What was found: medians of all rounds after the warm-up."""
        by_layer = {index: taken.measurement() for taken in self._times for index in taken.group.layers}
        around = [statistics.median(taken.around_s) for taken in self._times]
        return LayerFindings(
            num_layers=self._num_layers,
            layers=by_layer,
            values=self._values,
            # A forward's, shared with the backward, which takes little of its own.
            overhead_s=statistics.median(around) / 2 if around else 0.0,
        )

    def clear_gradients(self) -> None:
        """Drop the gradients that the rounds have left."""
        for taken in self._times:
            taken.group.clear_gradients()


def measure_in_turns(shares: Mapping[int, LayerShare], budget_s: float) -> dict[int, LayerFindings | str]:
    """Run rounds of several shares (of micro-batches of several sizes, say) in turns, until a budget is spent.

    So caches are as cold as in a real step, and what disturbs the process for a while falls on all layers and sizes
    alike: their ratios, which decide on a plan, move less than the times.

    Returns:
        What was found of each share, or why it could not be run to the end.
    """
    problems: dict[int, str] = {}
    deadline = time.perf_counter() + budget_s
    for round_index in range(_MAX_ROUNDS):
        if round_index >= _MIN_ROUNDS and time.perf_counter() > deadline:
            break
        for key, share in shares.items():
            if key in problems:
                continue
            try:
                share.run_round()
            except Exception as error:  # another share may still be of use
                problems[key] = f"{type(error).__name__}: {error}"
    for share in shares.values():
        share.clear_gradients()
    return {key: problems[key] if key in problems else share.findings() for key, share in shares.items()}


def optimizer_findings(
    trace: StepTrace,
    parameters: Mapping[str, nn.Parameter],
    layer_indices: Iterable[int],
    optimizers: Sequence[Optimizer],
    device: torch.device,
) -> dict[int, OptimizerCost] | None:
    """Measure optimizers' steps on copies of some layers' parameters; one that several use counts in the first of them.

    None where there is no optimizer, or it cannot be tried.
    """
    counted: set[str] = set()
    own: dict[int, list[nn.Parameter]] = {}
    for index, layer in enumerate(trace.layers):
        own[index] = [parameters[name] for name in layer.parameters if name not in counted]
        counted.update(layer.parameters)
    return optimizer_costs(optimizers, {index: own[index] for index in layer_indices}, device=device)


@dataclass(slots=True)
class _GroupTimes:
    """Runs of one of a group of equal layers."""

    group: LayerGroup
    device: torch.device
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    parts_s: list[tuple[float, float]] = field(default_factory=list)
    """Of a backward in two parts."""
    around_s: list[float] = field(default_factory=list)
    """What forwards took besides the layer: reaching it through the step's own code, and leaving it."""
    round_s: float = 0.0

    def run(self) -> None:
        """One forward with its whole backward, and one with that in two parts."""
        begin = time.perf_counter()
        self._run(is_split=False)
        if self.group.has_split_backward:
            self._run(is_split=True)
        self.round_s = time.perf_counter() - begin

    def forget(self) -> None:
        """Drop what was measured so far: it was to warm up."""
        for taken in (self.forward_s, self.backward_s, self.parts_s, self.around_s):
            taken.clear()

    def measurement(self) -> LayerMeasurement:
        """Medians, and bytes."""
        group = self.group
        backward_s = statistics.median(self.backward_s)
        weight_s = split_s = 0.0
        if group.has_weight_gradients and not group.hands_gradients_back:
            weight_s = backward_s
        elif group.has_split_backward:
            weight_s = min(backward_s, statistics.median(second_s for _, second_s in self.parts_s))
            split_s = max(0.0, statistics.median(map(sum, self.parts_s)) - backward_s)
        return LayerMeasurement(
            forward_s=statistics.median(self.forward_s),
            backward_s=backward_s,
            backward_weight_s=weight_s,
            backward_split_s=split_s,
            activation_bytes=group.activation_bytes,
            received_kept_bytes=group.received_kept_bytes,
            sent_kept_bytes=group.sent_kept_bytes,
            peak_bytes=group.peak_bytes,
            sent_bytes=sum(spec.num_bytes for spec in group.sent),
            gradient_bytes=sum(spec.num_bytes for spec in group.sent if spec.requires_grad),
        )

    def _run(self, *, is_split: bool) -> None:
        with in_memory(self.group.parameters):
            self._run_in_memory(is_split=is_split)

    def _run_in_memory(self, *, is_split: bool) -> None:
        group = self.group
        received = group.sample_received(self.device)
        gradients = group.sample_gradients(self.device)
        forward, backward = Stopwatch(self.device), Stopwatch(self.device)
        batch = group.runner.fresh_batch()
        begin = Stopwatch.host_clock()
        output = group.runner.forward(batch, received, forward)
        forward_s = forward.elapsed_s()
        # A device works on while the host goes through the step.
        self.around_s.append(max(0.0, Stopwatch.host_clock() - begin - forward_s) if self.device.type == "cpu" else 0.0)
        self.forward_s.append(forward_s)
        if is_split:
            rest = Stopwatch(self.device)
            group.runner.split_backward(output, gradients, received, (backward, rest))
            self.parts_s.append((backward.elapsed_s(), rest.elapsed_s()))
            return
        group.runner.backward(output, gradients, backward)
        self.backward_s.append(backward.elapsed_s() if group.root_specs else 0.0)
