from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from lightning_autopipe.strategy.parameter_shares import even_shares
from tests.strategy.modules import InOrder, LanguageModule, token_data
from tests.strategy.runs import Fit, fit_in_processes

pytestmark = pytest.mark.filterwarnings("ignore")


def test_shares_are_even_and_the_same_in_any_order() -> None:
    sizes = {"a": 5, "b": 1, "c": 4, "d": 2, "e": 2}
    shares = even_shares(sizes, 2)
    assert [sum(sizes[name] for name in sizes if shares[name] == share) for share in (0, 1)] == [7, 7]
    assert even_shares(dict(reversed(sizes.items())), 2) == shares
    assert set(even_shares(sizes, 1).values()) == {0}
    assert even_shares({"a": 1}, 3) == {"a": 0}


def held(trainer: Any, module: Any) -> Any:
    """Names of parameters with state, of those in the groups, and whether the whole state is there for a file."""
    (optimizer,) = trainer.optimizers
    names = {parameter: name for name, parameter in module.named_parameters()}
    in_groups = sorted(names[p] for group in optimizer.param_groups for p in group["params"])
    whole = trainer.strategy.optimizer_state(optimizer)
    return sorted(names[p] for p in optimizer.state), in_groups, len(whole["state"]), len(names)


def test_each_replica_keeps_a_share_and_numbers_are_the_same() -> None:
    """Bit for bit, with ties between stages and a norm over all of them."""
    base = Fit(
        module_class=LanguageModule,
        module_options={"optimizer": "adamw", "lr": 0.01},
        data=partial(InOrder, token_data(32), batch_size=8),
        trainer_options={"gradient_clip_val": 0.1, "max_epochs": 2},
        after=held,
    )
    fits = {name: replace(base, strategy_options={"shard_optimizer": name == "shared"}) for name in ("all", "shared")}
    found = fit_in_processes(fits, num_stages=2, num_replicas=2)
    for whole, shared in zip(found["all"], found["shared"], strict=True):
        assert whole.values.keys() == shared.values.keys()
        assert all(torch.equal(value, shared.values[name]) for name, value in whole.values.items())
        assert whole.after[0] == whole.after[1] == shared.after[1]
        assert set(shared.after[0]) < set(shared.after[1])
    # Ranks 0 and 2 are the replicas of the last stage, 1 and 3 of the first.
    for one, other in ((0, 2), (1, 3)):
        own, others, stage = (found["shared"][rank].after for rank in (one, other, one))
        assert not set(own[0]) & set(others[0])
        assert sorted(own[0] + others[0]) == stage[1]
    assert found["shared"][0].after[2] == found["shared"][0].after[3]
