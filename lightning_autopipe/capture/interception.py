"""Seeing every torch function that a step calls, custom autograd functions included."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import function as autograd_function
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

_FunctionBase: Any = autograd_function._SingleLevelFunction
_current = threading.local()


def current() -> OperationMode | None:
    """Give the innermost active mode of this thread."""
    return getattr(_current, "mode", None)


class OperationMode(TorchFunctionMode):
    """Hands every torch function to :meth:`operation`, which has to run it (or not) and give its result.

    The forward of a custom `torch.autograd.Function` counts as one function: the class itself. Its `apply` is caught
    where `Function.apply` calls the base class, so that `f = MyFunction.apply`, bound long before, is seen as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False
        self._outer: OperationMode | None = None

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
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        _current.mode = self._outer
        if self._outer is None:
            del _FunctionBase.apply

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within, torch functions run as if this mode did not exist (at no cost where it is the innermost mode)."""
        if self.is_paused:
            yield
            return
        on_top = _get_current_function_mode() is self  # type: ignore[no-untyped-call]
        if on_top:
            _pop_mode()  # type: ignore[no-untyped-call]
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False
            if on_top:
                _push_mode(self)  # type: ignore[no-untyped-call]


def _apply_custom_function(cls: Any, *args: Any) -> Any:
    original = super(_FunctionBase, cls).apply
    mode = current()
    if mode is None or mode.is_paused:
        return original(*args)

    def run(*run_args: Any) -> Any:
        with mode.paused():
            return original(*run_args)

    return mode.operation(cls, args, {}, run)
