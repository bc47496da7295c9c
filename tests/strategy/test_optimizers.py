from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lightning_autopipe import CheckpointError, ConfigurationError
from lightning_autopipe.strategy.optimizers import WholeOptimizer

STAGES = {"0.weight": 0, "0.bias": 0, "1.weight": 1, "1.bias": 1, "2.weight": 2, "2.bias": 2}


def module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))


def make(model: nn.Module, *, named: bool = False) -> torch.optim.AdamW:
    """Two groups, neither in the module's order nor complete."""
    decayed = [(name, p) for name, p in model.named_parameters() if name.endswith("weight")][::-1]
    rest = [(name, p) for name, p in model.named_parameters() if name in ("0.bias", "2.bias")]
    groups: list[dict[str, Any]] = [
        {"params": decayed if named else [p for _, p in decayed], "weight_decay": 0.5},
        {"params": rest if named else [p for _, p in rest], "lr": 0.5},
    ]
    return torch.optim.AdamW(groups, lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for index in range(num_steps):
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(hash((name, index)) % 1000)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def stage(stage_index: int, *, named: bool = False) -> tuple[nn.Module, WholeOptimizer]:
    model = module()
    whole = WholeOptimizer(make(model, named=named), model)
    whole.prune(lambda name: STAGES[name] == stage_index)
    return model, whole


@pytest.mark.parametrize("named", [False, True])
def test_stages_together_are_the_whole(named: bool) -> None:
    plain = module()
    optimizer = make(plain, named=named)
    step(plain, optimizer, 2)
    states: dict[int, Any] = {}
    stages = [stage(index, named=named) for index in range(3)]
    for model, whole in stages:
        step(model, whole.optimizer, 2)
        states.update(whole.local_states())
        for name, parameter in model.named_parameters():
            if any(parameter is kept for group in whole.optimizer.param_groups for kept in group["params"]):
                assert torch.equal(parameter, plain.get_parameter(name))
    expected = optimizer.state_dict()
    for _, whole in stages:
        assert_same_state(whole.state_dict(states), expected)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("before_pruning", [False, True])
def test_a_whole_state_is_loaded_by_each_stage(before_pruning: bool, named: bool) -> None:
    plain = module()
    optimizer = make(plain, named=named)
    step(plain, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.25
    states: dict[int, Any] = {}
    for stage_index in range(3):
        model = module()
        whole = WholeOptimizer(make(model, named=named), model)
        if before_pruning:
            whole.load_state_dict(saved)
        whole.prune(lambda name, index=stage_index: STAGES[name] == index)  # type: ignore[misc]
        if not before_pruning:
            whole.load_state_dict(saved)
        assert whole.optimizer.param_groups[0]["lr"] == 0.25
        states.update(whole.local_states())
    assert_same_state(whole.state_dict(states), saved)


def assert_same_state(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state["param_groups"] == expected["param_groups"]
    assert list(state["state"]) == sorted(expected["state"])
    for position, values in expected["state"].items():
        for key, value in values.items():
            assert torch.equal(state["state"][position][key], value), (position, key)


def test_schedulers_and_the_users_own_groups_stay_attached() -> None:
    model = module()
    optimizer = make(model)
    groups = optimizer.param_groups
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    whole = WholeOptimizer(optimizer, model)
    whole.prune(lambda name: False)
    assert optimizer.param_groups is groups
    assert [len(group["params"]) for group in groups] == [0, 0]
    optimizer.step()
    scheduler.step()
    assert groups[0]["lr"] == 0.05


@pytest.mark.parametrize("before_pruning", [False, True])
def test_groups_that_are_added_are_pruned_and_saved(before_pruning: bool) -> None:
    """As finetuning callbacks do; the group has the parameters of all stages."""

    def add(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.add_param_group({"params": [model.get_parameter("1.bias")], "lr": 0.3})

    plain = module()
    optimizer = make(plain)
    add(plain, optimizer)
    step(plain, optimizer, 2)
    expected = optimizer.state_dict()
    for stage_index in range(3):
        model = module()
        whole = WholeOptimizer(make(model), model)
        if before_pruning:
            add(model, whole.optimizer)
        whole.prune(lambda name, index=stage_index: STAGES[name] == index)  # type: ignore[misc]
        if not before_pruning:
            add(model, whole.optimizer)
        whole.load_state_dict(expected)
        assert whole.names == ("2.weight", "1.weight", "0.weight", "0.bias", "2.bias", "1.bias")
        assert [len(names) for names in whole.group_names()] == [3, 2, 1]
        assert len(whole.optimizer.param_groups[2]["params"]) == (stage_index == 1)
        own = {position: expected["state"][position] for position in whole.local_states()}
        assert len(own) == 2
        assert_same_state(whole.state_dict(own), {**expected, "state": own})


def test_groups_that_are_replaced_are_noted_anew() -> None:
    """As finetuning callbacks do when a run is resumed."""
    model = module()
    whole = WholeOptimizer(make(model), model)
    whole.prune(lambda name: STAGES[name] == 0)
    whole.optimizer.param_groups = [{**whole.optimizer.defaults, "params": list(model.parameters())}]
    assert whole.group_names() == [tuple(STAGES)]
    assert len(whole.optimizer.param_groups[0]["params"]) == 2


def test_state_of_what_is_let_go_is_let_go() -> None:
    model = module()
    optimizer = make(model)
    whole = WholeOptimizer(optimizer, model)
    step(model, optimizer, 1)
    whole.prune(lambda name: name == "0.weight")
    assert len(optimizer.state) == 1
    whole.prune(lambda name: True)  # once only
    assert len(optimizer.state) == 1


def test_other_groups_are_refused() -> None:
    model = module()
    whole = WholeOptimizer(make(model), model)
    other = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match=r"groups of \[6\] parameters, this one has \[3, 2\]"):
        whole.load_state_dict(other.state_dict())


def test_optimizers_that_are_refused() -> None:
    model = module()
    with pytest.raises(ConfigurationError, match="LBFGS"):
        WholeOptimizer(torch.optim.LBFGS(model.parameters()), model)
    sharded = torch.optim.SGD(model.parameters())
    sharded.consolidate_state_dict = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="distributes its state"):
        WholeOptimizer(sharded, model)
    with pytest.raises(ConfigurationError, match="not registered"):
        WholeOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), model)
