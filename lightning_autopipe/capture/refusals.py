"""Steps that cannot be shared out between stages, told by their traces, with the reason and a way out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lightning_autopipe.capture.cuts import CutTable
from lightning_autopipe.capture.records import ModuleCall, StepTrace
from lightning_autopipe.capture.source_lines import line_of_caller
from lightning_autopipe.core.errors import CaptureError, ConfigurationError

_LARGE_SHARE = 0.5  # of the parameters and of the work: a part of the step that is the model itself
_MAX_REASONS = 3


class RefusedStepError(CaptureError):
    """The step does what no stage can do: the trace ends with this error, wherever it happens."""


# While a step is traced ------------------------------------------------------------------------------


def refuse_generate(module: nn.Module, step_name: str) -> Iterator[tuple[dict[str, Any], Callable[..., Any]]]:
    """Give, for each submodule with a method `generate`, its attributes and what to put there while a step is traced.

    What is put there raises a `RefusedStepError`.
    """
    for path, submodule in module.named_modules():
        if not callable(getattr(type(submodule), "generate", None)):
            continue

        def generate(*args: Any, _path: str = path or type(submodule).__name__, **kwargs: Any) -> Any:
            raise RefusedStepError(
                f"{step_name} calls {_path}.generate() at {line_of_caller()}: that passes through the model once for "
                "each token, but a pipeline passes through the model once a step. Log a loss here and "
                "generate after the run, with the plain module loaded from a checkpoint, or set num_stages=1."
            )

        yield submodule.__dict__, generate


def refuse_parameter_assignment(name: str, step_name: str, module_path: str) -> RefusedStepError:
    """Give the error for a step that puts another tensor into a parameter."""
    return RefusedStepError(
        f"{step_name} assigns {name}.data in {module_path or 'the LightningModule'}, at {line_of_caller()}: the "
        "parameter is on one stage, and a micro-batch that still runs backward needs its old value. Write it where no "
        "micro-batch runs, in on_train_batch_start or on_train_batch_end (with torch.no_grad(): parameter.copy_(...)), "
        "or compute with a changed copy in the step."
    )


# After it was traced --------------------------------------------------------------------------------


def refuse_repeated_pass(trace: StepTrace, step_name: str) -> None:
    """Raise where a step passes through its model several times, each time on something else.

    Only calls made by the step itself or by the LightningModule's own forward count, and not those that take what an
    earlier one gave: a layer that a model repeats in a row can be shared out.

    Raises:
        CaptureError: it does.
    """
    sizes = trace.parameter_elements
    total, work = sum(sizes.values()) or 1, sum(op.flops for op in trace.operations) or 1.0
    shared: set[str] = set()
    repeated_work = 0.0
    largest: tuple[int, ModuleCall, int] | None = None
    for calls in _direct_calls(trace).values():
        passes = [call for index, call in enumerate(calls) if not _depends(trace, calls[:index], call)]
        if len(passes) < 2:
            continue
        counts = Counter(name for call in passes for name in _parameters(trace, call))
        names = {name for name, count in counts.items() if count > 1}
        shared |= names
        size = sum(sizes[name] for name in names)
        repeated_work += sum(op.flops for call in passes for op in trace.operations[call.start : call.stop])
        if largest is None or size > largest[0]:
            largest = size, passes[1], len(passes)
    share = sum(sizes[name] for name in shared) / total
    if largest is None or share <= _LARGE_SHARE or repeated_work <= _LARGE_SHARE * work:
        return
    _, call, num_passes = largest
    raise CaptureError(
        f"{step_name} passes {num_passes} times through {call.module_path or 'the LightningModule'} (again at "
        f"{call.source}). A pipeline passes through the model once a step: {share:.0%} of the parameters would lie on "
        "several stages. Join the inputs into one call (torch.cat along the samples, then split what it gives), or set "
        "num_stages=1 and num_replicas to the number of processes."
    )


def refuse_too_few_layers(trace: StepTrace, table: CutTable, num_stages: int, step_name: str) -> None:
    """Raise where a step cannot be cut into as many stages, and tell what must stay whole.

    Raises:
        ConfigurationError: it cannot.
    """
    num_layers = len(trace.layers)
    if num_stages <= num_layers:
        return
    reasons = [*_large_operations(trace, num_stages), *_obstacles(trace, table)][:_MAX_REASONS]
    why = f" What cannot be cut: {'; '.join(reasons)}." if reasons else ""
    raise ConfigurationError(
        f"num_stages={num_stages} is more than the {num_layers} layers that {step_name} can be cut into, and a stage "
        f"owns at least one.{why} Set num_stages to at most {num_layers} (more processes can run as num_replicas)"
        f"{', or change what cannot be cut' if reasons else ''}."
    )


def _direct_calls(trace: StepTrace) -> dict[str, list[ModuleCall]]:
    """By path the calls that the step or the LightningModule's own forward makes."""
    found: dict[str, list[ModuleCall]] = {}
    for call in trace.calls:
        if call.parent is not None and call.parent.is_own and call.start < call.stop:
            found.setdefault(call.module_path, []).append(call)
    return found


def _parameters(trace: StepTrace, call: ModuleCall) -> set[str]:
    return {name for op in trace.operations[call.start : call.stop] for name in op.parameters}


def _depends(trace: StepTrace, earlier: list[ModuleCall], call: ModuleCall) -> bool:
    """Whether a call takes anything that comes from an earlier one."""
    reached: set[int] = set()
    for op in trace.operations[: call.stop]:
        is_reached = any(index in reached for index in op.reads)
        if is_reached and op.index >= call.start:
            return True
        if is_reached or any(one.start <= op.index < one.stop for one in earlier):
            reached.update(op.made.values())
            reached.update(index for _, index in op.written_arguments)
    return False


def _large_operations(trace: StepTrace, num_stages: int) -> list[str]:
    """Operations that alone hold more parameters than a stage should."""
    sizes = trace.parameter_elements
    total = sum(sizes.values()) or 1
    found = []
    for op in trace.operations:
        share = sum(sizes[name] for name in op.parameters) / total
        if len(op.parameters) > 2 and share > 1 / num_stages:
            found.append(f"{op.name} in {op.module_path or 'the LightningModule'} ({share:.0%} of the parameters)")
    return found


def _obstacles(trace: StepTrace, table: CutTable) -> list[str]:
    """Why there is no cut where the step could else be cut, by the number of places."""
    takers = [op.index for op in trace.operations if op.parameters]
    between = range(takers[0] + 1, takers[-1] + 1) if takers else ()
    found = {position: reason for position in between if (reason := table.obstacle(position)) is not None}
    first: dict[str, int] = {}
    for position, reason in found.items():
        first.setdefault(reason, position)
    return [f"{reason}{_near(trace, first[reason])}" for reason, _ in Counter(found.values()).most_common()]


def _near(trace: StepTrace, position: int) -> str:
    lines = [call.source for call in trace.calls if call.start <= position < call.stop and call.source]
    return f" (near {lines[-1]})" if lines else ""
