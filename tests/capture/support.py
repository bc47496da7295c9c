"""Running a step in stages, one after another, and comparing it with the step as the user wrote it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.capture.cuts import CutTable, find_layers
from lightning_autopipe.capture.draws import DrawKey
from lightning_autopipe.capture.program import StageProgram, bounds_to_ranges
from lightning_autopipe.capture.proof import proven_program
from lightning_autopipe.capture.records import StepTrace
from lightning_autopipe.capture.trace import trace_step
from lightning_autopipe.runtime.placement import release_parameters

_seeds = itertools.count()
CPU = torch.device("cpu")
KEY = DrawKey(seed=1, step=0, replica_index=0, microbatch_index=0)


@dataclass
class Outcome:
    """What one run of a step left behind."""

    result: Any = None
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Traced:
    trace: StepTrace
    table: CutTable

    @property
    def layer_cuts(self) -> list[int]:
        """The cuts that a planner may choose."""
        return [layer.start for layer in self.trace.layers[1:]]

    @property
    def legal_cuts(self) -> list[int]:
        return [p for p in range(1, len(self.trace.operations)) if self.table.legal[p]]

    @property
    def draws(self) -> bool:
        by_python = any(call.draws_python for call in self.trace.calls)
        return by_python or bool(self.trace.draw_functions) or any(op.is_random for op in self.trace.operations)


def traced(module: nn.Module, args: tuple[Any, ...], step_name: str = "training_step") -> Traced:
    trace = trace_step(module, getattr(module, step_name), clone(args), {}, step_name=step_name)
    table = CutTable(trace)
    trace.layers = find_layers(trace, table)
    return Traced(trace, table)


def assert_same_at_every_cut(
    module: nn.Module,
    args: tuple[Any, ...],
    *,
    step_name: str = "training_step",
    tolerance: float = 0.0,
    as_plain: bool = True,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Traced:
    """Cut a step at every place where the planner may, and everywhere it is legal; the outcome must stay the same.

    A step without random draws must also give what it gives without this package (unless not `as_plain`). Where steps
    draw, only the planner's cuts are compared: the draws are keyed by layer. At last the step is cut at all layers at
    once and run by copies of the module that hold their own parameters alone.
    """
    with context():
        found = traced(module, args, step_name)
        before = copy.deepcopy(module.state_dict())

        def run(cuts: Sequence[int]) -> Outcome:
            module.load_state_dict(before)
            return run_stages(
                [module] * (len(cuts) + 1), stage_programs(module, found, cuts, args, step_name), args, step_name
            )

        reference = run([])
        if as_plain and not found.draws:
            module.load_state_dict(before)
            _require_equal(reference, plain(module, args, step_name), 0.0, "uncut, against the plain step")
        failures = []
        for cut in found.layer_cuts if found.draws else found.legal_cuts:
            try:
                _require_equal(run([cut]), reference, tolerance, "")
            except Exception as error:
                failures.append(f"{_place(found, cut)}: {type(error).__name__}: {error}")
        assert not failures, f"{len(failures)} cuts are wrong:\n" + "\n".join(failures[:8])
        module.load_state_dict(before)
        apart = run_placed(module, found, found.layer_cuts, args, step_name)
        _require_equal(apart, reference, tolerance, f"cut at all of {found.layer_cuts}, each stage alone")
        module.load_state_dict(before)
    return found


def plain(module: nn.Module, args: tuple[Any, ...], step_name: str = "training_step") -> Outcome:
    """Run the step as it is."""
    module.zero_grad(set_to_none=True)
    result = getattr(module, step_name)(*clone(args))
    if torch.is_grad_enabled():
        _loss(result).backward()
    return Outcome(_detached(result), _gradients(module), _buffers(module), _parameters(module))


def run_stages(
    modules: Sequence[nn.Module],
    programs: Sequence[StageProgram],
    args: tuple[Any, ...],
    step_name: str = "training_step",
) -> Outcome:
    """Run the stages forwards and backwards as processes would: copies cross, and their random states differ."""
    for module in modules:
        module.zero_grad(set_to_none=True)
    received: tuple[Tensor, ...] = ()
    leaves, sent = [], []
    result = None
    for module, program in zip(modules, programs, strict=True):
        torch.manual_seed(next(_seeds))
        random.seed(next(_seeds))
        run = program.run(getattr(module, step_name), clone(args), {}, received, KEY)
        leaves.append(received)
        sent.append(run.sent)
        result = run.result
        received = tuple(_handed_over(tensor) for tensor in run.sent)
    if torch.is_grad_enabled():
        _loss(result).backward()
        for tensors, theirs in reversed(list(zip(sent[:-1], leaves[1:], strict=True))):
            pairs = [(tensor, leaf) for tensor, leaf in zip(tensors, theirs, strict=True) if tensor.requires_grad]
            gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for _, leaf in pairs]
            if pairs:
                torch.autograd.backward([tensor for tensor, _ in pairs], gradients)
    summed: dict[str, Tensor] = {}
    for module in dict.fromkeys(modules):
        for name, gradient in _gradients(module).items():
            summed[name] = summed[name] + gradient if name in summed else gradient
    return Outcome(_detached(result), summed, _buffers(modules[-1]), _parameters(modules[-1]))


def run_placed(
    module: nn.Module, found: Traced, cuts: Sequence[int], args: tuple[Any, ...], step_name: str = "training_step"
) -> Outcome:
    """Run each stage on a copy of the module in which the other stages' parameters have no storage."""
    modules, programs = [], []
    buffers: dict[str, nn.Module] = {}
    names = {name for name, _ in module.named_parameters()}
    used = {name for op in found.trace.operations for name in op.parameters}
    for start, stop in bounds_to_ranges(cuts):
        operations = found.trace.operations[start:stop]
        own = {name for op in operations for name in op.parameters}
        stage_module = copy.deepcopy(module)
        keep = own if stop is not None else own | (names - used)
        release_parameters(stage_module, keep, lambda name: "another stage", CPU)
        own_trace = traced(stage_module, args, step_name)
        _require_same_trace(own_trace.trace, found.trace)
        modules.append(stage_module)
        programs.append(_program(stage_module, own_trace, start, stop, args, step_name))
        buffers.update({name: stage_module for op in operations for name in op.buffers})
    outcome = run_stages(modules, programs, args, step_name)
    for name, owner in buffers.items():
        outcome.buffers[name] = owner.get_buffer(name).detach().clone()
    outcome.parameters = {name: tensor for stage in modules for name, tensor in _parameters(stage).items()}
    return outcome


def clone(args: Any) -> Any:
    return tree.map_tensors(Tensor.clone, args)


def stage_programs(
    module: nn.Module,
    found: Traced,
    cuts: Sequence[int],
    args: tuple[Any, ...],
    step_name: str = "training_step",
) -> list[StageProgram]:
    """Give the program of each stage between these cuts."""
    return [_program(module, found, start, stop, args, step_name) for start, stop in bounds_to_ranges(cuts)]


def _program(
    module: nn.Module, found: Traced, start: int, stop: int | None, args: tuple[Any, ...], step_name: str
) -> StageProgram:
    step = getattr(module, step_name)
    return proven_program(found.trace, found.table, module, step, clone(args), {}, start=start, stop=stop, device=CPU)


def _handed_over(tensor: Tensor) -> Tensor:
    with torch.inference_mode(tensor.is_inference()):
        return tensor.detach().resolve_conj().clone().requires_grad_(tensor.requires_grad)


def _require_equal(outcome: Outcome, reference: Outcome, tolerance: float, what: str) -> None:
    for kind in ("gradients", "buffers", "parameters"):
        ours, theirs = getattr(outcome, kind), getattr(reference, kind)
        assert ours.keys() == theirs.keys(), f"{what}: {kind} of {sorted(ours.keys() ^ theirs.keys())}"
        for name, tensor in theirs.items():
            assert _close(ours[name], tensor, tolerance), f"{what}: {kind} of {name} differ"
    ours, theirs = list(tree.walk(outcome.result)), list(tree.walk(reference.result))
    assert [path for path, _ in ours] == [path for path, _ in theirs], f"{what}: the results have other leaves"
    for (path, ours_leaf), (_, leaf) in zip(ours, theirs, strict=True):
        same = _close(ours_leaf, leaf, tolerance) if isinstance(leaf, Tensor) else ours_leaf == leaf
        assert same, f"{what}: result {path} is {ours_leaf}, not {leaf}"


def _close(tensor: Tensor, other: Tensor, tolerance: float) -> bool:
    if tolerance == 0.0 or not tensor.is_floating_point():
        return torch.equal(tensor, other)
    return bool((tensor - other).abs().max() <= tolerance * other.abs().max())


def _require_same_trace(trace: StepTrace, other: StepTrace) -> None:
    def signature(of: StepTrace) -> list[tuple[Any, ...]]:
        return [(op.function, op.reads, op.parameters, op.buffers, tuple(op.made)) for op in of.operations]

    assert signature(trace) == signature(other), "the trace is another one when other stages' parameters are absent"


def _loss(result: Any) -> Tensor:
    loss = result["loss"] if isinstance(result, dict) else result
    assert isinstance(loss, Tensor)
    return loss


def _detached(result: Any) -> Any:
    return tree.map_tensors(lambda tensor: tensor.detach().clone(), result)


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters() if not is_absent(p)}


def _place(found: Traced, cut: int) -> str:
    before, after = found.trace.operations[cut - 1], found.trace.operations[cut]
    return f"at {cut} between {before.name} and {after.name} (in {after.module_path or 'the step'})"
