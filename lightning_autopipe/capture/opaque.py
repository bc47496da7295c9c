"""Module calls that read values of activations: each is one operation, and a run on random stand-ins tells its shapes.

A mixture of experts that sends each token to the expert that its router chose reads values in the middle of the model.
Shapes alone do not decide what happens inside such a call; what it returns has the same shapes all the same.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.absent import AbsentTensor, AbsentValueError, is_absent

_MAX_SHARE = 0.5  # of the module's parameters: a larger call would leave nothing to cut
_PLAIN = (type(None), str, torch.dtype, torch.device)


class ReadsValuesError(Exception):
    """Ends a trace in which a module call reads values that it may keep to itself; names the calls to make opaque."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(paths)))
        self.paths = paths


def opaque_paths(module: nn.Module, path: str) -> frozenset[str]:
    """Give `path` and the paths of all modules of its type; none where so large a call would leave nothing to cut."""
    submodules = dict(module.named_modules())
    limit = _MAX_SHARE * _num_elements(module)
    found = submodules.get(path)
    if found is None or _num_elements(found) > limit:
        return frozenset()
    return frozenset(p for p, sub in submodules.items() if type(sub) is type(found) and _num_elements(sub) <= limit)


def shapes_of_result(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    absent_form: Callable[[Tensor], Tensor | None],
    before_run: Callable[[], None],
) -> Any:
    """Run a module's forward with random tensors in the place of activations; give its result with absent tensors.

    It runs several times on values of unlike signs: the shapes must stay the same.

    Args:
        module: Whose forward it is. Parameters that are absent get random values for the time.
        forward: The forward.
        args: Its arguments.
        kwargs: Keyword arguments alike.
        absent_form: Gives the absent twin of an activation, None for other tensors.
        before_run: Called before each run, when all stand-ins are made; the last run gave the result.

    Raises:
        AbsentValueError: the call fails on random values, writes into an argument, or returns something else than
            tensors of shapes that are known beforehand.
    """
    generator = torch.Generator().manual_seed(0)  # alike on every rank
    kept = _KeptAttributes(module)
    results = []
    for sign in (1.0, -1.0, None):
        draw = _Draw(generator, sign)
        results.append(_run_on_stand_ins(module, forward, args, kwargs, absent_form, before_run, draw))
    changed = kept.changed()
    if changed:
        raise AbsentValueError(
            f"it depends on values, and sets {', '.join(changed)}, which other stages would not see: return it instead."
        )
    if any(_shapes(other) != _shapes(results[-1]) for other in results[:-1]):
        raise AbsentValueError("it depends on values, and so does the shape of what it returns.")
    return results[-1]


def _run_on_stand_ins(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    absent_form: Callable[[Tensor], Tensor | None],
    before_run: Callable[[], None],
    draw: _Draw,
) -> Any:
    originals: dict[int, tuple[Tensor, AbsentTensor, Tensor]] = {}  # by stand-in: itself is kept alive here

    def stand_in(tensor: Tensor) -> Tensor:
        absent = absent_form(tensor)
        if not isinstance(absent, AbsentTensor):
            return tensor
        made = draw.like(absent)
        originals[id(made)] = tensor, absent, made
        return made

    run_args, run_kwargs = tree.map_tensors(stand_in, (args, kwargs))
    try:
        with _filled_parameters(module, draw):
            before_run()
            result = forward(*run_args, **run_kwargs)
    except AbsentValueError:
        raise
    except Exception as error:
        raise AbsentValueError(
            f"it depends on values, and on random ones it raises {type(error).__name__}: {error}."
        ) from error
    if any(made._version > 0 for _, _, made in originals.values()):
        raise AbsentValueError("it depends on values and writes into an argument.")

    def as_absent(path: tree.LeafPath, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            if isinstance(leaf, _PLAIN):
                return leaf
            raise AbsentValueError(f"it depends on values and returns a {type(leaf).__name__}.")
        if is_absent(leaf):
            raise AbsentValueError("it depends on values that it is not given.")
        known = originals.get(id(leaf))
        if known is not None:
            return known[0]
        return AbsentTensor(_meta_twin(leaf, originals.values()), leaf.device, leaf.requires_grad)

    return tree.map_leaves(as_absent, result)


class _KeptAttributes:
    """What the submodules of a module keep besides parameters and buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._submodules = dict(module.named_modules())
        self._before = {path: dict(sub.__dict__) for path, sub in self._submodules.items()}
        self._contents = {path: self._content(path) for path in self._submodules}

    def changed(self) -> list[str]:
        """Give the names of the attributes that have changed, or whose content has."""
        names: list[str] = []
        for path, sub in self._submodules.items():
            before, contents, now = self._before[path], self._contents[path], self._content(path)
            for name in sorted({*sub.__dict__, *before} - {"forward"}):
                same = sub.__dict__.get(name, names) is before.get(name, names) and now.get(name) == contents.get(name)
                if not same:
                    names.append(f"self.{path}.{name}" if path else f"self.{name}")
        return names

    def _content(self, path: str) -> dict[str, Any]:
        """What tells that an attribute was written in place: a tensor's version, the items of a container."""
        contents: dict[str, Any] = {}
        for name, value in self._submodules[path].__dict__.items():
            if isinstance(value, Tensor):
                contents[name] = value._version
            elif isinstance(value, dict):
                contents[name] = [(key, id(item)) for key, item in value.items()]
            elif isinstance(value, (list, set, deque)):
                contents[name] = [id(item) for item in value]
        return contents


def _shapes(result: Any) -> list[Any]:
    return [
        (path, leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (path, leaf) for path, leaf in tree.walk(result)
    ]


def _num_elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@dataclass(frozen=True, slots=True)
class _Draw:
    """Makes random tensors: of one sign, or of both."""

    generator: torch.Generator
    sign: float | None

    def like(self, absent: AbsentTensor) -> Tensor:
        """Give one of the geometry of `absent`; it is no leaf, as no activation is."""
        overlaps = any(stride == 0 and size > 1 for size, stride in zip(absent.size(), absent.stride(), strict=True))
        stride = torch.empty(absent.size(), device="meta").stride() if overlaps else absent.stride()
        tensor = torch.empty_strided(absent.size(), stride, dtype=absent.dtype, device=absent.device)
        with torch.no_grad():
            if tensor.is_floating_point() or tensor.is_complex():
                values = torch.randn(absent.size(), dtype=torch.float32, generator=self.generator)
                tensor.copy_(values if self.sign is None else self.sign * values.abs())
            else:
                tensor.zero_()
        return tensor.requires_grad_(absent.requires_grad).clone()  # a clone: no write to it has been counted


def _meta_twin(tensor: Tensor, originals: Any) -> Tensor:
    """A tensor on the meta device that shares memory with the argument's twin where the real ones share theirs."""
    for _, absent, made in originals:
        if made.untyped_storage()._cdata == tensor.untyped_storage()._cdata and made.stride() == absent.meta.stride():
            offset = absent.meta.storage_offset() + tensor.storage_offset() - made.storage_offset()
            twin: Tensor = absent.meta.as_strided(tensor.size(), tensor.stride(), offset)
            return twin
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


@contextlib.contextmanager
def _filled_parameters(module: nn.Module, draw: _Draw) -> Iterator[None]:
    """Parameters of other stages have random values for a while."""
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    made: dict[int, nn.Parameter] = {}
    try:
        for sub in module.modules():
            for name, parameter in sub._parameters.items():
                if parameter is not None and is_absent(parameter):
                    if id(parameter) not in made:
                        value = draw.like(parameter).detach()  # type: ignore[arg-type]
                        made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                    swapped.append((sub._parameters, name, parameter))
        for registry, name, parameter in swapped:
            registry[name] = made[id(parameter)]
        yield
    finally:
        for registry, name, parameter in swapped:
            registry[name] = parameter
