"""What each place in a pipeline owns: the parameters that its stages use, the buffers that they write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from lightning_autopipe.runtime.step_capture import CaptureStore


class Ownership:
    """Which places use a tensor in the planned step. A place runs one stage, or several of them.

    Args:
        store: Knows the stages that use a parameter, by its first name, or write a buffer.
        num_places: Ranks of the pipeline.
    """

    def __init__(self, store: CaptureStore, num_places: int) -> None:
        self._store = store
        self._num_places = num_places
        self._first_name = _first_names(store.module)

    def parameter_owner(self, name: str) -> int:
        """Give the first place in the pipeline that uses a parameter; the last where the planned step does nowhere."""
        return min(self._owners(name))

    def owned_parameters(self, place: int) -> frozenset[str]:
        """Names (each of a tied parameter's) of the parameters that a place's stages use."""
        return frozenset(name for name in self._first_name if place in self._owners(name))

    def owned_buffers(self, place: int) -> frozenset[str]:
        """Names of the buffers that the step writes at this place; all others are equal everywhere."""
        names = (name for name, _ in self._store.module.named_buffers())
        return frozenset(name for name in names if place in self._places(self._store.owners.get(name, ())))

    def in_order_of_use(self, named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Give the same parameters in the order in which the planned step first uses them."""
        position = {name: index for index, name in enumerate(self._store.owners)}
        return dict(sorted(named.items(), key=lambda item: position.get(item[0], len(position))))

    def parameters_of_later_stages(self, place: int) -> frozenset[str]:
        """Names of a place's parameters that its first stage, whose backwards end last, does not use."""
        if self._store.num_stages <= self._num_places:
            return frozenset()
        own = self.owned_parameters(place)
        return frozenset(name for name in own if place not in self._store.owners.get(name, ()))

    def rename(self, names: Mapping[str, str]) -> None:
        """Know parameters by the other names that the module has given them; `names` has them by the ones before."""
        self._store.rename(names)
        self._first_name = _first_names(self._store.module)

    def _owners(self, name: str) -> frozenset[int]:
        return self._places(self._store.owners.get(self._first_name.get(name, name), (self._num_places - 1,)))

    def _places(self, stage_indices: Iterable[int]) -> frozenset[int]:
        """Where stages run: they go round the ranks of the pipeline."""
        return frozenset(stage_index % self._num_places for stage_index in stage_indices)


def _first_names(module: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
