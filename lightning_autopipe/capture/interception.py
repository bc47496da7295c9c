"""Seeing every torch function that a step calls, custom autograd functions included."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _len_torch_function_stack, _pop_torch_function_stack, _push_on_torch_function_stack
from torch.autograd import function as autograd_function
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as _checkpoint

_FunctionBase: Any = autograd_function._SingleLevelFunction
_current = threading.local()


# Take a shape, dtype or device from their second argument, and values from their first one alone.
_BORROWERS = frozenset(
    {torch.Tensor.type_as, torch.Tensor.to, torch.Tensor.view_as, torch.Tensor.expand_as, torch.Tensor.reshape_as}
)


# Its own code uses parameters that it is not given, even where all that it is given are batch data.
RECOMPUTATION = _checkpoint.CheckpointFunction


# Change a flag of a tensor: of a parameter, on every stage alike.
SETS_FLAG = frozenset({torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__})  # type: ignore[attr-defined]


def value_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Give the arguments whose values a function may use."""
    if function in _BORROWERS:
        return args[:1]
    return (*args, *kwargs.values()) if kwargs else args


def current() -> OperationMode | None:
    """Give the innermost active mode of this thread."""
    return getattr(_current, "mode", None)


class OperationMode(TorchFunctionMode):
    """Hands every torch function to :meth:`operation`, which has to run it (or not) and give its result.

    The forward of a custom `torch.autograd.Function` counts as one function: the class itself. Its `apply` is caught
    where `Function.apply` calls the base class, so that `f = MyFunction.apply`, bound long before, is seen as well.
    The fused attention of `nn.TransformerEncoder` in evaluation is off: it drops padding, whose amount is data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False
        self._outer: OperationMode | None = None
        self._depth = 0

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        """Handle one call; `run(*args, **kwargs)` executes it."""
        raise NotImplementedError

    def counted_call(self, function: Callable[..., None], inputs: tuple[torch.Tensor, ...]) -> None:
        """Run a call with side effects on the one stage that owns `inputs`."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        return self.operation(func, args, kwargs or {}, func)

    def __enter__(self) -> OperationMode:
        self._outer = current()
        _current.mode = self
        if self._outer is None:
            _FunctionBase.apply = classmethod(_apply_custom_function)
            self._fast_path = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        super().__enter__()  # type: ignore[no-untyped-call]
        self._depth = _len_torch_function_stack()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        _current.mode = self._outer
        if self._outer is None:
            del _FunctionBase.apply
            torch.backends.mha.set_fastpath_enabled(self._fast_path)

    @property
    def is_innermost(self) -> bool:
        """Whether no other mode has been entered in this one."""
        return _len_torch_function_stack() == self._depth

    def unwatched(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `function` as if this mode did not exist; at no cost where this is the innermost mode."""
        if self.is_paused:
            return function(*args, **kwargs)
        on_top = self.is_innermost
        if on_top:
            _pop_torch_function_stack()
        self.is_paused = True
        try:
            return function(*args, **kwargs)
        finally:
            self.is_paused = False
            if on_top:
                _push_on_torch_function_stack(self)


def _apply_custom_function(cls: Any, *args: Any) -> Any:
    original = super(_FunctionBase, cls).apply
    mode = current()
    if mode is None or mode.is_paused:
        return original(*args)

    # Torch takes a mode off while it handles a function, and does not know that this is one: what the handling calls
    # would be taken for operations of the step.
    return mode.unwatched(mode.operation, (cls, args, {}, original), {})
