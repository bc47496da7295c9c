"""First values of tensors: recorded while a module is built, and computed later for those that stay here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_autopipe.capture.absent import AbsentTensor, AbsentValueError, computing_shapes, is_absent
from lightning_autopipe.runtime.placement import exchange
from lightning_autopipe.runtime.recorded_calls import SMALL, RecordedCall, Reference, as_recorded, plainly, storage_of

_META = torch.device("meta")
_HOME = "no process yet: a module built in configure_model gets its values before the first batch"
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_aten = torch.ops.aten
# What writes the whole of its first argument without reading it.
_OVERWRITES = frozenset(
    {
        _aten.normal_.default,
        _aten.uniform_.default,
        _aten.fill_.Scalar,
        _aten.zero_.default,
        _aten.copy_.default,
        _aten.exponential_.default,
        _aten.log_normal_.default,
        _aten.cauchy_.default,
        _aten.bernoulli_.float,
        _aten.random_.default,
    }
)


class InitialValues:
    """Records how tensors get their first values, and computes them for those that are asked for.

    While it records, large tensors have shapes only (as parameters of other stages have), and what is done to them is
    written down, each draw with the state of its generator. Draws are also made, and thrown away: every generator goes
    on as ever, so that each value is the one that the module has when it is built at once. A value that the program
    reads is computed on the spot.
    """

    def __init__(self) -> None:
        self._calls: list[RecordedCall] = []
        self._storages: set[int] = set()
        self._scratch = _Scratch()
        self._modes: tuple[TorchDispatchMode, TorchFunctionMode] = (_Recording(self), _DataAssignments())

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been recorded."""
        return not self._calls

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which operations that make or take large tensors are recorded."""
        with ExitStack() as stack:
            stack.enter_context(computing_shapes())
            for mode in self._modes:
                stack.enter_context(mode)
            stack.callback(self._scratch.clear)
            yield

    def take_over(self, parameter: nn.Parameter) -> nn.Parameter:
        """Let a parameter that has its values get them when they are asked for; gives the object to use from now on."""
        with torch.no_grad():
            source = parameter.detach()
            absent = AbsentTensor(torch.empty_like(source, device=_META), source.device, home=_HOME)
            self.record(_aten.clone.default, (source,), {}, [absent], frozenset())
            with self.recording():
                taken_over = nn.Parameter(absent, requires_grad=parameter.requires_grad)
            return exchange(parameter, taken_over)

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor's values can be computed."""
        return isinstance(tensor, AbsentTensor) and storage_of(tensor.meta) in self._storages

    def compute(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Give the values of recorded tensors. What is computed on the way is dropped as soon as it is not needed."""
        wanted = [tensor.meta for tensor in tensors if isinstance(tensor, AbsentTensor)]
        assert len(wanted) == len(tensors)
        calls = self._needed(wanted)
        last_use: dict[int, int] = {}
        for position, call in enumerate(calls):
            last_use.update((id(used.meta), position) for used in (*call.references(), *call.made))
        last_use.update((id(meta), len(calls)) for meta in wanted)
        real: dict[int, Tensor] = {}
        with plainly(), torch.no_grad():
            for position, call in enumerate(calls):
                results = call.run(real)
                real.update((id(made.meta), result) for made, result in zip(call.made, results, strict=True))
                for used in (*call.references(), *call.made):
                    if last_use[id(used.meta)] == position:
                        real.pop(id(used.meta), None)
        missing = next((meta for meta in wanted if id(meta) not in real), None)
        if missing is not None:
            raise AbsentValueError(f"the values of a tensor of shape {tuple(missing.shape)} are on another stage.")
        return [real[id(meta)] for meta in wanted]

    def forget(self) -> None:
        """Drop all records: what still has no values will not get any here."""
        self._calls.clear()
        self._storages.clear()

    # ----- recording

    def record(
        self, function: Any, args: Any, kwargs: Any, made: Sequence[AbsentTensor], written: frozenset[int]
    ) -> None:
        """Write down a call whose results are `made`; a draw is made once, so that its generator goes on."""
        self._storages.update(storage_of(tensor.meta) for tensor in made)
        state = None
        if torch.Tag.nondeterministic_seeded in function.tags:
            state = self._drawn(function, args, kwargs)
        first = args[0] if args else None
        whole = first.meta if function in _OVERWRITES and isinstance(first, AbsentTensor) else None
        if whole is not None and not _is_all(whole):
            whole = None
        self._calls.append(
            RecordedCall(
                function=function,
                args=pytree.tree_map(as_recorded, args),
                kwargs=pytree.tree_map(as_recorded, kwargs),
                made=tuple(map(Reference.to, made)),
                written=written,
                altered=first.meta if _alters(function) and isinstance(first, AbsentTensor) else None,
                overwritten=None if whole is None else storage_of(whole),
                generator_state=state,
                default_dtype=torch.get_default_dtype(),
            )
        )

    def _drawn(self, function: Any, args: Any, kwargs: Any) -> tuple[torch.Generator, Tensor]:
        generator = kwargs.get("generator") or _default_generator(_device(args, kwargs))
        state = generator.get_state()
        overwrites = function in _OVERWRITES

        def value(leaf: Any) -> Any:
            if not isinstance(leaf, AbsentTensor):
                return leaf
            if overwrites:
                return self._scratch.like(leaf)
            return self.compute([leaf])[0]

        with plainly(), torch.no_grad():
            real_args, real_kwargs = pytree.tree_map(value, (args, kwargs))
            function(*real_args, **real_kwargs)
        return generator, state

    # ----- computing

    def _needed(self, wanted: Sequence[Tensor]) -> list[RecordedCall]:
        """The calls that give these tensors their values, in order."""
        handles = {id(meta) for meta in wanted}
        live = {storage_of(meta) for meta in wanted}
        needed: list[RecordedCall] = []
        for call in reversed(self._calls):
            touched = {id(made.meta) for made in call.made} | {id(call.altered)}
            if handles.isdisjoint(touched) and live.isdisjoint(call.written):
                continue
            needed.append(call)
            if call.overwritten is not None:
                live.discard(call.overwritten)
            kept = {made.storage for made in call.made} | {call.overwritten}  # views need no values of their bases
            for used in call.references():
                handles.add(id(used.meta))
                if used.storage not in kept:
                    live.add(used.storage)
        return needed[::-1]


class _Scratch:
    """Memory for draws that are thrown away: one piece for all of them, as large as the largest.

    A piece for each would lie between the many small things that are made meanwhile, and not be usable again.
    """

    def __init__(self) -> None:
        self._storages: dict[torch.device, torch.UntypedStorage] = {}

    def like(self, tensor: Tensor) -> Tensor:
        num_elements = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
        num_bytes = num_elements * tensor.element_size()
        storage = self._storages.get(tensor.device)
        if storage is None or storage.nbytes() < num_bytes:
            storage = torch.empty(num_bytes, dtype=torch.uint8, device=tensor.device).untyped_storage()
            self._storages[tensor.device] = storage
        result = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return result.set_(storage, 0, tensor.size(), tensor.stride())

    def clear(self) -> None:
        self._storages.clear()


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands operations on large tensors to the record."""

    def __init__(self, values: InitialValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        absent = [tensor for tensor in tensors if isinstance(tensor, AbsentTensor)]
        if not absent:
            from_nothing = not tensors or (func is _aten.empty_like.default and tensors[0].is_meta)
            return self._make(func, args, kwargs) if from_nothing and _takes_device(func) else func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if any(not isinstance(tensor, AbsentTensor) for tensor in written):
            return self._with_values(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except (AbsentValueError, NotImplementedError):
            if written:
                raise
            return self._with_values(func, args, kwargs)
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, AbsentTensor)]
        if not results:
            return self._with_values(func, args, kwargs)
        own = {id(tensor) for tensor in absent}
        made = [] if all(id(tensor) in own for tensor in results) else results
        storages = frozenset(storage_of(tensor.meta) for tensor in written if isinstance(tensor, AbsentTensor))
        self._values.record(func, args, kwargs, made, storages)
        return result

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device = _device(args, kwargs)
        meta = func(*args, **{**kwargs, "device": _META, "pin_memory": None})
        if device.type == "meta" or not isinstance(meta, Tensor) or meta.numel() < SMALL:
            return func(*args, **kwargs)
        result = AbsentTensor(meta, device, home=_HOME)
        self._values.record(func, args, kwargs, [result], frozenset())
        return result

    def _with_values(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation that shapes do not decide."""

        def value(leaf: Any) -> Any:
            return self._values.compute([leaf])[0] if isinstance(leaf, AbsentTensor) else leaf

        with plainly():
            real_args, real_kwargs = pytree.tree_map(value, (args, kwargs))
            return func(*real_args, **real_kwargs)


class _DataAssignments(TorchFunctionMode):
    """Lets `parameter.data = tensor` act on what has no storage."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA and any(map(is_absent, args)):
            target, value = args
            if is_absent(target) and is_absent(value):
                func(target, value)
                target.meta = value.meta
            else:
                new = nn.Parameter(value.detach(), target.requires_grad) if isinstance(target, nn.Parameter) else value
                torch.utils.swap_tensors(target, new)  # type: ignore[no-untyped-call]
            return None
        return func(*args, **(kwargs or {}))


def _is_all(meta: Tensor) -> bool:
    return meta.is_contiguous() and meta.numel() * meta.element_size() == meta.untyped_storage().nbytes()


def _alters(func: Any) -> bool:
    return torch.Tag.inplace_view in func.tags or func.overloadpacket is _aten.set_


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes."""
    found: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found.extend(pytree.tree_leaves(value))
    return [leaf for leaf in found if isinstance(leaf, Tensor)]


def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _device(args: Any, kwargs: Mapping[str, Any]) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    devices = (leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return next(devices, torch.device("cpu"))


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
