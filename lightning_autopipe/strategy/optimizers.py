"""Optimizers that were made for the whole module, on ranks that keep a part of it.

``configure_optimizers`` runs on the whole module, whatever its groups go by (names, modules, lists). The names of each
group are noted; then every rank keeps its own parameters in the groups. Checkpoints have the layout of the optimizer on
the whole module: a position for each parameter, in the order of the groups.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_autopipe.capture.source_lines import line_of_function
from lightning_autopipe.core.errors import CheckpointError, ConfigurationError


@dataclass(frozen=True, slots=True)
class _Group:
    positions: tuple[int, ...]
    """In the whole optimizer, of the parameters that this rank keeps in the group; all of them before `prune`."""
    all_positions: tuple[int, ...]
    param_names: tuple[str, ...] | None


class WholeOptimizer:
    """Remembers what an optimizer looked like on the whole module.

    Raises:
        ConfigurationError: the optimizer needs all parameters in one process, or holds one that the module does not.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        self.optimizer = unwrapped(optimizer)
        self.is_pruned = False
        self._is_mock = isinstance(self.optimizer, _MockOptimizer)
        self._module = module
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._groups: list[_Group] = []
        self._is_from_file = False
        self._is_owned: Callable[[str], bool] = lambda name: True
        self._keeps_state: Callable[[str], bool] = lambda name: True
        if self._is_mock:
            return
        refuse_optimizer(self.optimizer, module)
        self.follow_groups()

    @property
    def names(self) -> tuple[str, ...]:
        """The first name of each parameter in the module, by position."""
        return tuple(self._names)

    def group_names(self) -> list[tuple[str, ...]]:
        """The first names of all parameters of each group."""
        self.follow_groups()
        return [tuple(self._names[position] for position in group.all_positions) for group in self._groups]

    def follow_groups(self) -> None:
        """Notes groups that were added, or put in the place of others, since the last look, as finetuning callbacks do.

        On a pruned optimizer they have the parameters of all stages, too, and are pruned now.

        Raises:
            ConfigurationError: one of them holds a parameter that the module does not.
        """
        groups = self.optimizer.param_groups
        is_known = [self._is_known(index, group) for index, group in enumerate(groups)]
        if self._is_mock or (all(is_known) and len(groups) == len(self._groups)):
            return
        name_of = {id(parameter): name for name, parameter in self._module.named_parameters()}
        names: list[str] = []
        parameters: list[nn.Parameter] = []
        noted: list[_Group] = []
        for index, group in enumerate(groups):
            first = len(names)
            if is_known[index]:
                known = self._groups[index]
                names += [self._names[position] for position in known.all_positions]
                parameters += [self._parameters[position] for position in known.all_positions]
                param_names = known.param_names
            else:
                names += [_name(parameter, name_of, index) for parameter in group["params"]]
                parameters += group["params"]
                param_names = tuple(group["param_names"]) if "param_names" in group else None
            positions = tuple(range(first, len(names)))
            noted.append(_Group(positions, positions, param_names))
        self._names, self._parameters, self._groups = names, parameters, noted
        if self.is_pruned:
            self._prune()

    def _is_known(self, index: int, group: Mapping[str, Any]) -> bool:
        if index >= len(self._groups):
            return False
        kept = [self._parameters[position] for position in self._groups[index].positions]
        return len(kept) == len(group["params"]) and all(map(operator.is_, kept, group["params"]))

    def prune(self, is_owned: Callable[[str], bool]) -> None:
        """Lets the optimizer keep only the parameters whose (first) name is owned; groups may become empty."""
        self._is_owned = is_owned
        if self._is_mock or self.is_pruned:
            return
        self.follow_groups()
        self._prune()

    def rename(self, names: Mapping[str, str]) -> None:
        """Knows parameters by other names, given by the ones before."""
        self._names = [names.get(name, name) for name in self._names]

    def _prune(self) -> None:
        is_owned = self._is_owned
        owned = [is_owned(name) for name in self._names]
        for group_index, (known, group) in enumerate(zip(self._groups, self.optimizer.param_groups, strict=True)):
            kept = tuple(position for position in known.all_positions if owned[position])
            # In place: schedulers and the user hold these very dicts.
            group["params"][:] = [self._parameters[position] for position in kept]
            if known.param_names is not None:
                begin = known.all_positions[0] if known.all_positions else 0
                group["param_names"][:] = [known.param_names[position - begin] for position in kept]
            self._groups[group_index] = _Group(kept, known.all_positions, known.param_names)
        for position, parameter in enumerate(self._parameters):
            if not owned[position]:
                self.optimizer.state.pop(parameter, None)
        self.is_pruned = True

    def keep_states(self, is_kept: Callable[[str], bool]) -> None:
        """Keeps the state of those parameters only whose (first) name is kept, now and after loading."""
        self._keeps_state = is_kept
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if not is_kept(name):
                self.optimizer.state.pop(parameter, None)

    def rebind(self, module: nn.Module) -> None:
        """Takes the parameters that the module has now in the place of those that it had under the same names."""
        self.follow_groups()
        now = dict(module.named_parameters())
        for position, name in enumerate(self._names):
            before, parameter = self._parameters[position], now[name]
            if parameter is before:
                continue
            self._parameters[position] = parameter
            if before in self.optimizer.state:
                self.optimizer.state[parameter] = self.optimizer.state.pop(before)
            for group in self.optimizer.param_groups:
                group["params"][:] = [parameter if p is before else p for p in group["params"]]

    def local_states(self) -> dict[int, Any]:
        """The state of each parameter that this rank keeps, by its position in the whole optimizer."""
        self.follow_groups()
        states = self.optimizer.state_dict()["state"] if not self._is_mock else {}
        kept = [position for group in self._groups for position in group.positions]
        return {kept[index]: state for index, state in states.items() if isinstance(index, int)}

    def state_dict(self, states: Mapping[int, Any]) -> dict[str, Any]:
        """The whole optimizer's ``state_dict``, given the state of each parameter by position."""
        self.follow_groups()
        own = self.optimizer.state_dict()
        if self._is_mock:
            return own
        groups = []
        for known, group in zip(self._groups, own["param_groups"], strict=True):
            whole = {**group, "params": list(known.all_positions)}
            if known.param_names is not None:
                whole["param_names"] = list(known.param_names)
            groups.append(whole)
        # Positions ascend, as in an optimizer that was never pruned; whatever else the optimizer adds is kept.
        return {**own, "state": dict(sorted(states.items())), "param_groups": groups}

    def load_state_dict(self, whole: Mapping[str, Any]) -> None:
        """Takes from a whole optimizer's ``state_dict`` what this rank keeps.

        Raises:
            CheckpointError: its groups differ from this optimizer's.
        """
        if self._is_mock:
            return
        self.follow_groups()
        self._check_groups(whole)
        self._is_from_file = True
        if not self.is_pruned:
            self.optimizer.load_state_dict(dict(whole))
            return
        # Ids in a state_dict are arbitrary; what counts is their order in the groups.
        ids = [identifier for group in whole["param_groups"] for identifier in group["params"]]
        state: dict[int, Any] = {}
        groups = []
        next_index = 0
        for known, saved in zip(self._groups, whole["param_groups"], strict=True):
            indices = list(range(next_index, next_index + len(known.positions)))
            next_index += len(indices)
            local = {**saved, "params": indices}
            if "param_names" in saved:
                begin = known.all_positions[0] if known.all_positions else 0
                local["param_names"] = [saved["param_names"][position - begin] for position in known.positions]
            groups.append(local)
            for index, position in zip(indices, known.positions, strict=True):
                if ids[position] in whole["state"] and self._keeps_state(self._names[position]):
                    state[index] = whole["state"][ids[position]]
        self.optimizer.load_state_dict({**whole, "state": state, "param_groups": groups})
        self.leave_file()

    def leave_file(self) -> None:
        """Copies what this rank keeps of a loaded state: until now it may lie in the mapped file of a checkpoint."""
        if not self._is_from_file:
            return
        self._is_from_file = False
        for state in self.optimizer.state.values():
            state.update({key: value.clone() for key, value in state.items() if isinstance(value, Tensor)})

    def _check_groups(self, whole: Mapping[str, Any]) -> None:
        saved = [len(group["params"]) for group in whole["param_groups"]]
        own = [len(group.all_positions) for group in self._groups]
        if saved != own:
            raise CheckpointError(
                f"the checkpoint's optimizer has groups of {saved} parameters, this one has "
                f"{own}: configure_optimizers must make the same groups as it did when the checkpoint was written"
            )


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The user's optimizer inside Lightning's wrapper."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def refuse_optimizer(optimizer: Optimizer, module: nn.Module) -> None:
    """Raises for optimizers whose step looks at all parameters together, or that distribute state themselves.

    Raises:
        ConfigurationError: it is one of them.
    """
    name = type(optimizer).__name__
    method = getattr(module, "configure_optimizers", None)
    place = "" if method is None else f" ({line_of_function(method)})"
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError(
            f"configure_optimizers{place} returned {name}, whose step needs the gradients of all parameters in one "
            "process; a pipeline's stages have only their own. Use one that treats parameters one by one (AdamW, SGD, "
            "...)"
        )
    if hasattr(optimizer, "consolidate_state_dict"):
        raise ConfigurationError(
            f"configure_optimizers{place} returned {name}, which distributes its state over processes itself; a "
            "pipeline does that by stage. Return the optimizer that it wraps"
        )


def _name(parameter: Any, name_of: Mapping[int, str], group_index: int) -> str:
    name = name_of.get(id(parameter))
    if name is None:
        raise ConfigurationError(
            f"group {group_index} of the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not "
            "registered in the LightningModule, so that no stage owns it; assign it as an attribute of the module (or "
            "use nn.ParameterList for lists)"
        )
    return name
