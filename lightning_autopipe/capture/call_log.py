"""The calls of a step's modules, noted while the step is traced."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.records import STEP, ModuleCall, ValueIndex
from lightning_autopipe.capture.source_lines import line_of_caller


class CallLog:
    """Which modules were called, in what order and inside which others.

    Args:
        position: Gives the number of operations so far.
        index_of: Gives the index of an activation's value, None for another tensor.
    """

    def __init__(self, position: Callable[[], int], index_of: Callable[[Tensor], int | None]) -> None:
        self.calls: list[ModuleCall] = []
        self._position = position
        self._index_of = index_of
        self._current: ModuleCall | None = None
        self._random_states: list[Any] = []
        self._next_index: dict[str, int] = {}

    @property
    def module_path(self) -> str:
        """The path of the module whose call runs; "" in the step itself."""
        return "" if self._current is None or self._current.module_path == STEP else self._current.module_path

    def enter(self, path: str) -> ModuleCall:
        """Note that a call begins."""
        call_index = self._next_index.get(path, 0)
        self._next_index[path] = call_index + 1
        position = self._position()
        call = ModuleCall(path, call_index, position, position, None, self._current)
        if self._current is not None:
            self._current.children.append(call)
            if self._current.is_own:
                call.source = line_of_caller()
        self.calls.append(call)
        self._current = call
        self._random_states.append(_python_random_state())
        return call

    def leave(self, call: ModuleCall) -> None:
        """Note that a call has ended, by whatever way."""
        call.stop = self._position()
        call.draws_python = self._random_states.pop() != _python_random_state()
        self._current = call.parent

    def note_placed_draw(self) -> None:
        """Note a draw that is keyed by its place: no module that holds it is passed over."""
        call = self._current
        while call is not None:
            call.num_free_draws += 1
            call = call.parent

    def as_recorded(self, result: Any) -> Any:
        """Give what a module call returned, with the index of a value in the place of each activation."""

        def leaf(path: tree.LeafPath, obj: Any) -> Any:
            if isinstance(obj, Tensor):
                index = self._index_of(obj)
                return _NOT_AN_ACTIVATION if index is None else ValueIndex(index)
            return obj

        return tree.map_leaves(leaf, result)


class _NotAnActivation:
    """In the place of a tensor that depends on batch data alone."""


_NOT_AN_ACTIVATION = _NotAnActivation()


def is_replayable_leaf(leaf: Any) -> bool:
    """Tell whether a leaf of a module's recorded result may be given again in a later run."""
    return leaf is None or isinstance(leaf, (ValueIndex, bool, str, torch.dtype, torch.device))


def _python_random_state() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    state = numpy.random.get_state()
    return random.getstate(), state[2], state[1].tobytes()
