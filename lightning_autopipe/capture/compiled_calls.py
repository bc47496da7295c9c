"""Module calls that a stage runs as the user's `torch.compile` wants them: whole, with nothing cut or keyed inside.

What the user has compiled is traced, cut and proven uncompiled. A stage then compiles the largest calls in it that lie
within the stage, each by itself, with the user's options.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported

from lightning_autopipe.capture.records import OPAQUE_CALL, ModuleCall, StepTrace

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gives a function's compiled form; one object for each place where the user has called `torch.compile`."""

REPLACES = "_autopipe_replaces"
"""On a function that stands in for a module's forward during a run: the module's own attribute `forward`, or None."""

_READS_VALUES = "what it does depends on values of activations"
_PLAIN = (bool, int, float, str, type(None))


@dataclass(slots=True, kw_only=True, eq=False)
class Compilation:
    """What of a module the user has given to `torch.compile`."""

    compilers: Mapping[str, Compiler]
    """By path of the module, or `STEP` where it is the whole one."""
    allowed: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """A context in which torch compiles, where it does not elsewhere."""
    tell: Callable[[Mapping[str, str]], None] = lambda uncompiled: None
    """Told by path which compiled modules run uncompiled, and why."""
    excluded: Mapping[nn.Module, str] = field(default_factory=dict)
    """Modules that run uncompiled whatever they do, and what holds them: why."""
    _frames: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)

    def compiled(self, path: str, module: nn.Module, compiler: Compiler) -> Callable[..., Any]:
        """Give what runs a module's forward compiled."""
        frame = self._frames.setdefault(_kind(module), _new_frame())
        run: Callable[..., Any] = _CompiledForward(module, compiler(frame), self.allowed)
        if not getattr(compiler, "fullgraph", False):
            return run

        def run_if_possible(*args: Any, **kwargs: Any) -> Any:
            nonlocal run
            try:
                return run(*args, **kwargs)
            except (Unsupported, FailOnRecompileLimitHit) as error:  # before anything has run, with fullgraph=True
                self.tell({path: f"by itself it cannot be one graph, as fullgraph=True wants: {_first_line(error)}"})
                run = own_forward(module)
                return run(*args, **kwargs)

        return run_if_possible


class CompiledCallChoice:
    """Which calls of a stage are compiled as a whole, and why others are not.

    Args:
        trace: The step's.
        submodules: By path.
        compilation: What the user has compiled; None: nothing.
        keyed_positions: Where the stage's random draws are keyed anew.
    """

    def __init__(
        self,
        trace: StepTrace,
        submodules: Mapping[str, nn.Module],
        compilation: Compilation | None,
        keyed_positions: Collection[int],
    ) -> None:
        self._trace = trace
        self._submodules = submodules
        self._compilation = compilation
        self._keyed_positions = keyed_positions
        self._layer_starts = [layer.start for layer in trace.layers]
        self.uncompiled: dict[str, str] = {}
        """Modules that run uncompiled though they are compiled, or a part of one: why."""

    @property
    def is_wanted(self) -> bool:
        """Whether anything is compiled."""
        return self._compilation is not None

    def compiler_of(self, path: str) -> Compiler | None:
        """Give how the user has compiled the module itself."""
        return None if self._compilation is None else self._compilation.compilers.get(path)

    def can_compile(self, call: ModuleCall) -> bool:
        """Tell whether a call in something compiled, which runs unwatched, can be compiled as a whole."""
        operations = self._trace.operations[call.start : call.stop]
        if isinstance(self._submodules[call.module_path], OptimizedModule):
            return False  # what it holds is compiled instead of it
        if (
            len(operations) < 2
            or not any(op.parameters for op in operations)
            or any(op.is_mean_loss for op in operations)
        ):
            return False  # nothing to gain; or a loss or a metric behind the model
        reason = self._reason_against(call)
        if reason is not None:
            self.uncompiled[call.module_path] = reason
        return reason is None

    def note_opaque(self, call: ModuleCall) -> None:
        """Note of a call in something compiled that nobody has seen its inside."""
        self.uncompiled[call.module_path] = _READS_VALUES

    def note_inside(self, call: ModuleCall, *, is_unwatched: bool, has_compiled: bool) -> None:
        """Note of a call in something compiled that it is not compiled as a whole, and whether any of its parts is.

        Where none is, what was found of its parts says nothing more.
        """
        path = call.module_path
        if has_compiled:
            self.uncompiled.pop(path, None)
            return
        if not is_unwatched and self.compiler_of(path) is not None:
            self.uncompiled[path] = "a value that it makes is used or logged elsewhere without being returned"
        if path in self.uncompiled:
            for inner in [
                inner for inner in self.uncompiled if inner.startswith(f"{path}." if path else "") and inner != path
            ]:
                del self.uncompiled[inner]

    def _reason_against(self, call: ModuleCall) -> str | None:
        assert self._compilation is not None
        operations = self._trace.operations[call.start : call.stop]
        if any(op.region is not None for op in operations):
            return "its forward runs again in the backward (torch.utils.checkpoint), where nothing is compiled"
        if any(op.function == OPAQUE_CALL for op in operations):
            return _READS_VALUES
        if call.draws_python:
            return "it draws from Python's or NumPy's random generators"
        # Draws are keyed by layer, and two graphs may draw otherwise than one. What draws is compiled within a layer:
        # so numbers do not depend on the stages.
        inside = range(call.start + 1, call.stop)
        is_random = any(op.is_random for op in operations)
        if any(position in inside for position in (self._layer_starts if is_random else self._keyed_positions)):
            return "it draws random numbers (dropout) in several layers, each of which has a seed of its own"
        excluded = self._compilation.excluded
        return next((excluded[sub] for sub in self._submodules[call.module_path].modules() if sub in excluded), None)


class _CompiledForward:
    """Runs a module's own forward compiled, and those of all modules in it."""

    def __init__(
        self,
        module: nn.Module,
        frame: Callable[..., Any],
        allowed: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._module = module
        self._frame = frame
        self._allowed = allowed
        self._attributes = [sub.__dict__ for sub in module.modules()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = own_forward(self._module)
        replaced: list[tuple[dict[str, Any], Any]] = []
        try:
            for attributes in self._attributes:
                current = attributes.get("forward")
                if current is not None and hasattr(current, REPLACES):
                    replaced.append((attributes, current))
                    own = _own_attribute(current)
                    if own is None:
                        del attributes["forward"]
                    else:
                        attributes["forward"] = own
            with self._allowed():
                return self._frame(forward, *args, **kwargs)
        finally:
            for attributes, current in replaced:
                attributes["forward"] = current


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Give a module's forward, without what stands in for it during a run."""
    own = _own_attribute(module.__dict__.get("forward"))
    return own if own is not None else type(module).forward.__get__(module)  # type: ignore[no-any-return]


def _own_attribute(forward: Any) -> Any:
    while hasattr(forward, REPLACES):
        forward = getattr(forward, REPLACES)
    return forward


def _new_frame() -> Callable[..., Any]:
    """Make a function with a code object of its own: torch keeps what it has compiled, and counts it, by these."""

    def frame(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    frame.__code__ = frame.__code__.replace()
    return frame


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _kind(module: nn.Module) -> Hashable:
    """Give what equal modules share: they run one compiled graph; too many unlike ones in one frame would run none."""
    parts: list[Hashable] = []
    for path, sub in module.named_modules():
        plain = [(name, value) for name, value in vars(sub).items() if type(value) in _PLAIN and name != "training"]
        tensors = [(n, t.shape, t.dtype) for n, t in (*sub._parameters.items(), *sub._buffers.items()) if t is not None]
        parts.append((path, type(sub), tuple(plain), tuple(tensors)))
    return tuple(parts)
