"""What several stages log in a hook, as one."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import torch

from lightning_autopipe.strategy.hook_log import _Call, _log, _merged
from tests.strategy.modules import MlpModule


def call(name: str, value: float, hook: str = "on_train_batch_end") -> _Call:
    return _Call(hook=hook, name=name, value=value, dtype=torch.float64, dataloader_idx=None, arguments={})


def named(calls: list[_Call]) -> list[tuple[str, float]]:
    return [(one.name, one.value) for one in calls]


def test_the_last_stages_value_counts() -> None:
    first, last = [call("a", 1.0), call("b", 2.0)], [call("a", 3.0), call("a", 4.0)]
    assert named(_merged([first, last])) == [("a", 3.0), ("a", 4.0), ("b", 2.0)]
    assert named(_merged([[], []])) == []


def test_the_same_name_in_another_hook_is_another_call() -> None:
    assert len(_merged([[call("a", 1.0)], [call("a", 2.0, hook="on_train_start")]])) == 2


def test_a_module_can_still_be_copied_and_pickled() -> None:
    module = MlpModule()
    vars(module)["log"] = partial(_log, module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert vars(other)["log"].args == (other,)
