"""What steps keep in attributes of the module, on stages that do not run their end."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.step_attributes import StepAttributes


class Wire(Communicator):
    """Hands on what the last stage gives, without a process in between."""

    sent: Any = None

    def broadcast_in_pipeline(self, value: Any, *, stage_index: int) -> Any:
        Wire.sent = value if self.is_last_stage else Wire.sent
        return Wire.sent


class Keeper(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self.by_kind: dict[str, Any] = defaultdict(list)
        self.recent: deque[Any] = deque(maxlen=2)
        self.total: Any = 0
        self.sums = torch.zeros(2)
        self.same = [1, 2]
        self.function: Any = None

    def step(self, loss: torch.Tensor) -> None:
        self.kept.append(loss)
        self.by_kind["loss"].append(loss)
        self.recent.append(float(loss.detach()))
        self.total += float(loss.detach())
        self.sums.add_(1)
        self.new = "new"
        self.function = lambda: loss


def on_stage(stage_index: int) -> tuple[Keeper, StepAttributes]:
    layout = ParallelLayout(num_stages=2, num_replicas=1)
    wire = Wire(layout=layout, global_rank=layout.global_rank(stage_index, 0), device=torch.device("cpu"))
    module = Keeper()
    return module, StepAttributes(module, wire)


def test_what_steps_change_on_the_last_stage_is_told_to_the_others() -> None:
    (last, of_last), (first, of_first) = on_stage(1), on_stage(0)
    first.same, containers = [3], (first.kept, first.by_kind, first.recent)
    for number in (1.0, 2.0, 3.0):
        with of_last.watching():
            last.step(torch.tensor(number, requires_grad=True) * 1)
    of_last.share()
    of_first.share()
    assert [float(loss) for loss in first.kept] == [1, 2, 3]
    assert not first.kept[0].requires_grad
    assert [float(loss) for loss in first.by_kind["loss"]] == [1, 2, 3]
    assert list(first.recent) == [2, 3]
    assert first.total == 6
    assert torch.equal(first.sums, torch.full((2,), 3.0))
    assert first.new == "new"
    assert first.same == [3], "no step has changed it"
    assert first.function is None, "it cannot travel"
    assert all(now is then for now, then in zip((first.kept, first.by_kind, first.recent), containers, strict=True))


def test_what_hooks_change_stays_each_stages_own() -> None:
    (last, of_last), (first, of_first) = on_stage(1), on_stage(0)
    with of_last.watching():
        pass
    last.kept.append(1)
    first.kept.append(2)
    of_last.share()
    of_first.share()
    assert first.kept == [2]


def test_what_was_emptied_between_steps_is_shared_again() -> None:
    (last, of_last), (first, of_first) = on_stage(1), on_stage(0)
    for epoch in (1.0, 2.0):
        with of_last.watching():
            last.step(torch.tensor(epoch))
        of_last.share()
        of_first.share()
        assert [float(loss) for loss in first.kept] == [epoch]
        last.kept.clear()
        first.kept.clear()
