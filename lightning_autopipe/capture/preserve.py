"""Running a step so that it leaves no trace: attributes, tensors and random state are as before."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.absent import AbsentTensor
from lightning_autopipe.capture.data_sizes import DataSizes
from lightning_autopipe.capture.draws import generator_state, kept_generators, set_generator_state

_MAX_CONTAINER = 100_000
# Write the running statistics (arguments 3 and 4) when training (argument 5), though their schemas do not say so.
_WRITE_STATISTICS = frozenset(
    {
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten.cudnn_batch_norm.default,
        torch.ops.aten.miopen_batch_norm.default,
    }
)
_MODULE_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


class DispatchObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every ATen operation: which tensors it writes, whether it draws random numbers, how much work it is.

    The content of each real tensor is saved before its first write, so that :meth:`undo` can put it back.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._data_sizes = DataSizes()
        self.begin()

    def begin(self, *, note_inputs: bool = False) -> None:
        """Start observing one operation; `inputs` collects the tensors that it computes with, if asked for."""
        self.written: list[torch.Tensor] = []
        self.inputs: dict[int, torch.Tensor] = {}
        self._notes_inputs = note_inputs
        self.is_random = False
        self.flops = 0.0
        self.sized_by_data = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._notes_inputs:
            self.inputs.update((id(tensor), tensor) for _, tensor in tree.tensors((args, kwargs)))
        for tensor in _written_arguments(func, args, kwargs):
            self.written.append(tensor)
            if not isinstance(tensor, AbsentTensor) and id(tensor) not in self._saved:
                self._saved[id(tensor)] = (tensor, tensor.detach().clone())
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.is_random = True
        result = func(*args, **kwargs)
        if self._data_sizes.is_sized_by_data(func, args, kwargs, result):
            self.sized_by_data = True
        self.flops += _flops(func, args, kwargs, result)
        return result

    def is_sized_by_data(self, tensor: torch.Tensor) -> bool:
        """Tell whether a batch's real numbers, which operations on shapes get as a twin, are as many as values said."""
        with torch._C.DisableTorchFunction():
            return tensor.is_floating_point() and self._data_sizes.is_known(tensor)

    def undo(self) -> None:
        """Put back the content of every real tensor that was written."""
        for tensor, saved in reversed(list(self._saved.values())):
            with torch.inference_mode(tensor.is_inference()):
                if tensor.shape == saved.shape:
                    tensor.data.copy_(saved)
                else:  # resized meanwhile
                    tensor.data = saved
        self._saved.clear()


def _written_arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    if func in _WRITE_STATISTICS and args[5]:
        yield from (tensor for tensor in args[3:5] if tensor is not None)
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor


def _flops(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> float:
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=result))
    first = result[0] if isinstance(result, tuple) and result else result  # the others are statistics, masks and such
    return float(first.numel()) if isinstance(first, torch.Tensor) else 0.0


@contextlib.contextmanager
def preserved_state(module: nn.Module) -> Iterator[PreservedState]:
    """Run the body under a :class:`DispatchObserver` and undo all that it did to `module` and to random state."""
    state = PreservedState(module)
    try:
        with preserved_random_state(), state.observer:
            yield state
    finally:
        state.restore()


class PreservedState:
    """The attributes of every submodule (containers copied) and the flags of parameters as they were."""

    def __init__(self, module: nn.Module) -> None:
        self.observer = DispatchObserver()
        self._module = module
        self._attributes = [(sub, dict(sub.__dict__)) for sub in module.modules()]
        self._flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        self._generators = [(generator, generator_state(generator)) for _, generator in kept_generators(module)]
        self._containers: dict[int, tuple[Any, Any]] = {}
        for _, attributes in self._attributes:
            for name, value in attributes.items():
                self._note(value, deep=name not in _MODULE_REGISTRIES)

    def _note(self, value: Any, deep: bool = True) -> None:
        if not isinstance(value, (list, dict, set, deque)) or id(value) in self._containers:
            return
        if len(value) > _MAX_CONTAINER:
            return
        self._containers[id(value)] = (value, value.copy())
        if deep:
            for item in value.values() if isinstance(value, dict) else value:
                self._note(item)

    def modules_changed(self) -> bool:
        """Tell whether the step has changed attributes or containers of any submodule so far."""
        for sub, before in self._attributes:
            now = sub.__dict__
            if any(now.get(name) is not value for name, value in before.items() if name != "forward"):
                return True
            if any(name not in before for name in now if name != "forward"):
                return True
        return any(not _same_items(value, copy) for value, copy in self._containers.values())

    def restore_early_changes(self, later: PreservedState) -> dict[str, Any]:
        """Put back what has changed up to the time of `later` and not since; give what has changed since, by name."""
        late: dict[str, Any] = {}
        paths = {id(sub): path for path, sub in self._module.named_modules()}
        then = {id(sub): attributes for sub, attributes in later._attributes}
        for sub, before in self._attributes:
            now, early = dict(sub.__dict__), then.get(id(sub), {})
            for name in {*now, *before}:
                if name in _MODULE_REGISTRIES or name == "forward":
                    continue
                if _is_same(now.get(name), early.get(name)):
                    _put(sub.__dict__, name, before)
                else:
                    late[f"{paths[id(sub)]}.{name}".lstrip(".")] = now.get(name)
        late_containers = [value for value, copy in later._containers.values() if not _same_items(value, copy)]
        if late_containers:
            late["the content of a list, dict, set or deque"] = None
        for value, copy in self._containers.values():
            if not any(value is other for other in late_containers):
                _refill(value, copy)
        return late

    def restore(self) -> None:
        """Put everything back, in place, so that other references to a container see it too."""
        self.observer.undo()
        for generator, generator_state_before in self._generators:
            set_generator_state(generator, generator_state_before)
        for sub, attributes in self._attributes:
            sub.__dict__.clear()
            sub.__dict__.update(attributes)
        for value, copy in self._containers.values():
            _refill(value, copy)
        for parameter, flag in self._flags:
            parameter.requires_grad_(flag)


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b)


def _put(attributes: dict[str, Any], name: str, before: dict[str, Any]) -> None:
    if name in before:
        attributes[name] = before[name]
    else:
        attributes.pop(name, None)


def _refill(value: Any, copy: Any) -> None:
    if not _same_items(value, copy):
        value.clear()
        if isinstance(value, (dict, set)):
            value.update(copy)
        else:
            value.extend(copy)


def _same_items(value: Any, copy: Any) -> bool:
    if len(value) != len(copy):
        return False
    if isinstance(value, dict):
        return all(key in value and value[key] is item for key, item in copy.items()) and list(value) == list(copy)
    if isinstance(value, set):
        return bool(value == copy)
    return all(a is b for a, b in zip(value, copy, strict=True))


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Leave the random state of torch (CPU and initialised CUDA devices), Python and NumPy as it was."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    states = torch.get_rng_state(), torch.cuda.get_rng_state_all() if cuda else None
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state_all(states[1])
        random.setstate(python_state)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)
