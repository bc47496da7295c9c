from __future__ import annotations

import copy
import math
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_autopipe import PipelineRuntimeError
from lightning_autopipe.strategy.outputs import ElsewhereValue, for_other_stages, join_outputs

SIZES = (3, 2)
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Mapping(OrderedDict):  # type: ignore[type-arg]
    """As transformers' ModelOutput is: made from keywords."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)


def join(first: Any, second: Any, weights: tuple[float, float] = (3.0, 2.0)) -> Any:
    return join_outputs([first, second], sizes=SIZES, weights=weights)


def test_one_microbatch_is_given_back() -> None:
    value = object()
    assert join_outputs([value], sizes=(3,), weights=(1.0,)) is value


def test_samples_are_joined_and_scalars_averaged() -> None:
    a, b = torch.randn(3, 4), torch.randn(2, 4)
    joined = join({"x": a, "loss": torch.tensor(1.0)}, {"x": b, "loss": torch.tensor(2.0)})
    assert torch.equal(joined["x"], torch.cat([a, b]))
    assert float(joined["loss"]) == pytest.approx(1.4)
    assert joined["loss"].dtype is torch.float32


def test_averages_go_by_weight() -> None:
    assert float(join(torch.tensor(1.0), torch.tensor(5.0), weights=(3.0, 1.0))) == 2.0
    assert float(join(torch.tensor(math.nan), torch.tensor(5.0), weights=(0.0, 1.0))) == 5.0
    assert float(join(torch.tensor(1.0), torch.tensor(5.0), weights=(0.0, 0.0))) == 3.0
    assert float(join(torch.tensor(1), torch.tensor(2), weights=(1.0, 1.0))) == 1.5
    assert join(1.0, 5.0, weights=(3.0, 1.0)) == 2.0
    assert join(0.1, 0.1) == 0.1


def test_containers() -> None:
    a, b = torch.randn(3), torch.randn(2)
    whole = torch.cat([a, b])
    assert torch.equal(join((a, 1), (b, 1))[0], whole)
    assert type(join(Pair(a, 1), Pair(b, 1))) is Pair
    output = join(Output(torch.tensor(1.0), a), Output(torch.tensor(1.0), b))
    assert type(output) is Output
    assert torch.equal(output.logits, whole)
    mapping = join(Mapping(x=a), Mapping(x=b))
    assert type(mapping) is Mapping
    assert torch.equal(mapping["x"], whole)


def test_lists() -> None:
    assert join(["a", "b", "c"], ["d", "e"]) == ["a", "b", "c", "d", "e"]
    hidden = join([torch.zeros(3, 2)] * 4, [torch.ones(2, 2)] * 4)
    assert [tuple(layer.shape) for layer in hidden] == [(5, 2)] * 4
    assert join([1, 2], [3]) == [[1, 2], [3]]
    assert join([], []) == []
    ragged = join([torch.zeros(i) for i in (1, 2, 3)], [torch.zeros(i) for i in (4, 5)])
    assert [len(row) for row in ragged] == [1, 2, 3, 4, 5]


def test_what_cannot_be_joined_is_listed_by_microbatch() -> None:
    assert join("a", "b") == ["a", "b"]
    assert join("a", "a") == "a"
    assert join(None, None) is None
    assert join(None, 1) == [None, 1]
    assert len(join(torch.zeros(7), torch.zeros(7))) == 2
    assert len(join(torch.zeros(3, 4), torch.zeros(2, 5))) == 2
    assert join({"a": 1}, {"b": 1}) == [{"a": 1}, {"b": 1}]


USES: list[Any] = [
    torch.sum,
    lambda value: value.shape,
    lambda value: value + 1,
    lambda value: 1 - value,
    lambda value: torch.cat([torch.zeros(1), value]),
    lambda value: value[0],
    len,
    list,
    float,
    bool,
    lambda value: value > 1,
    lambda value: value.cpu(),
    lambda value: setattr(value, "x", 1),
]


@pytest.mark.parametrize("use", USES)
def test_a_value_elsewhere_explains_itself(use: Any) -> None:
    output = for_other_stages({"loss": torch.tensor(1.0), "logits": [torch.zeros(3)]})
    with pytest.raises(PipelineRuntimeError, match=r"output\['logits'\]\[0\] is on the last stage"):
        use(output["logits"][0])


def test_a_value_elsewhere_can_be_kept_and_copied() -> None:
    value = ElsewhereValue("['x']")
    assert repr(copy.deepcopy(value)) == repr(pickle.loads(pickle.dumps(value))) == repr(value)
    assert isinstance(value, ElsewhereValue)


def test_what_other_stages_get() -> None:
    output = {"loss": torch.tensor(1.0), "count": 3, "name": "a", "none": None, "pair": (1.5, torch.zeros(2))}
    kept = for_other_stages(output)
    assert {key: kept[key] for key in ("count", "name", "none")} == {"count": 3, "name": "a", "none": None}
    assert float(kept["loss"]) == 1.0
    assert kept["pair"][0] == 1.5
    assert isinstance(kept["pair"][1], ElsewhereValue)
    assert isinstance(for_other_stages(Output(torch.tensor(1.0), torch.zeros(2))), ElsewhereValue)
