"""What ranks decide between batches: one small message, whatever is asked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_autopipe.strategy import AutoPipeStrategy
from lightning_autopipe.strategy.shared_decisions import SharedDecisions
from tests.strategy.modules import InOrder, MlpModule, regression_data
from tests.strategy.runs import Fit, fit_in_processes


def test_what_was_asked_is_told_once_and_then_asked_anew() -> None:
    messages: list[list[bool]] = []

    def on_any_rank(votes: Sequence[bool]) -> list[bool]:
        messages.append(list(votes))
        return [votes[0], True]

    state = {"one": False, "other": False}
    decisions = SharedDecisions(on_any_rank)
    for name in state:
        decisions.add(name, partial(state.__getitem__, name))
    assert decisions.latest() == {"one": False, "other": True}
    assert decisions.ask() == {"one": False, "other": True}
    state["one"] = True
    assert decisions.latest()["one"] is False, "what all ranks were told counts, not what is so by now"
    assert decisions.latest()["one"] is True
    assert messages == [[False, False], [False, False], [True, False]]


class Counter(Callback):
    """Counts what is asked of all ranks, batch by batch."""

    def __init__(self) -> None:
        self.counts = [0]

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        strategy = trainer.strategy
        any_rank = strategy.any_rank

        def counted(votes: Sequence[bool]) -> list[bool]:
            self.counts[-1] += 1
            found: list[bool] = any_rank(votes)
            return found

        if isinstance(strategy, AutoPipeStrategy):
            strategy.any_rank = counted  # type: ignore[method-assign]

    def on_train_batch_start(self, *_: Any) -> None:
        self.counts.append(0)


def counts(trainer: Any, module: Any) -> list[int]:
    return next(callback.counts for callback in trainer.callbacks if isinstance(callback, Counter))


@pytest.mark.filterwarnings("ignore")
def test_there_is_one_message_between_two_batches() -> None:
    data = partial(InOrder, regression_data(32), batch_size=8)
    fit = Fit(module_class=MlpModule, data=data, callbacks=(Counter,), trainer_options={"max_epochs": 2}, after=counts)
    for rank in fit_in_processes({"fit": fit}, num_stages=2)["fit"]:
        # One before the first batch, one behind each, and behind the validation and the end of each epoch.
        assert rank.after == [1, 1, 1, 1, 3, 1, 1, 1, 3]
