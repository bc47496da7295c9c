"""Every stage keeps its own parameters, and no others."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autopipe.capture.absent import AbsentValueError, is_absent
from lightning_autopipe.runtime.placement import fill_parameters, release_parameters
from tests.runtime.pipelines import apart, assert_close, fresh, run_apart, run_plain
from tests.runtime.step_models import CausalLanguageModel, OwnPython, Unet

CPU = torch.device("cpu")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(4, 4, batch_first=True)
        self.second = nn.LSTM(4, 4, batch_first=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.second(self.first(batch)[0])[0], batch)

    @staticmethod
    def batch(num_samples: int) -> Tensor:
        return torch.randn(num_samples, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def num_held_bytes(module: nn.Module) -> int:
    return sum(p.untyped_storage().nbytes() for p in module.parameters() if not is_absent(p))


@pytest.mark.parametrize("model", [CausalLanguageModel, OwnPython, Recurrent])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_apart_hold_the_module_once_and_train_like_it(model: type[nn.Module], num_stages: int) -> None:
    if model is Recurrent and num_stages > 2:
        pytest.skip("it has two layers")
    torch.manual_seed(0)
    plain = model().double()
    batches = [plain.batch(size) for size in (5, 4, 5)]
    pipelines = apart(plain, (batches[0], 0), num_stages=num_stages, num_microbatches=2)
    held = sum(num_held_bytes(pipeline.module) for pipeline in pipelines)
    tied = plain.network.lm_head.weight.nbytes if model is CausalLanguageModel else 0
    assert held == num_held_bytes(plain) + tied
    for pipeline in pipelines:
        own = pipeline.ownership.owned_parameters(pipeline.stage_index)
        for name, parameter in pipeline.module.named_parameters(remove_duplicate=False):
            assert is_absent(parameter) == (name not in own), name
    optimizers = [
        torch.optim.AdamW([p for p in module.parameters() if not is_absent(p)], lr=1e-2)
        for module in (plain, *(pipeline.module for pipeline in pipelines))
    ]
    for step, batch in enumerate(batches):
        run = run_apart(pipelines, batch, step=step)
        assert_close(run, run_plain(plain, batch))
        for pipeline in pipelines:
            for name, parameter in pipeline.module.named_parameters():
                if not is_absent(parameter):
                    parameter.grad = run.gradients[name].clone() if name in run.gradients else None
        for optimizer in optimizers:
            optimizer.step()
    values = {
        name: parameter.detach().clone()
        for pipeline in pipelines
        for name, parameter in pipeline.module.named_parameters(remove_duplicate=False)
        if not is_absent(parameter)
    }
    whole = pipelines[0].module
    pipelines[0].restore(values)
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(parameter, plain.get_parameter(name), rtol=1e-8, atol=1e-12)
    assert_close(run_plain(whole, batches[0]), run_plain(plain, batches[0]))


def test_placeholders_are_parameters_that_name_their_stage() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2).requires_grad_(False))
    parameters = dict(module.named_parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    parameters["0.bias"].mark = "kept"
    release_parameters(module, {"1.weight"}, lambda name: f"stage 7 (has {name})", CPU)
    assert dict(module.named_parameters()).keys() == parameters.keys()
    for name, parameter in module.named_parameters():
        assert parameter is parameters[name]
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad == name.startswith("0")
        assert parameter.dtype is torch.float32
        assert parameter.device == CPU
    assert optimizer.param_groups[0]["params"][0] is module[0].weight
    assert module[0].bias.mark == "kept"
    assert module[0].weight.shape == (3, 2)
    assert "stage 7" in repr(module[0].weight)
    for read in (
        lambda p: p + 1,
        lambda p: p.tolist(),
        lambda p: p.sum().item(),
        lambda p: p.zero_(),
        lambda p: p.numpy(),
    ):
        with pytest.raises(AbsentValueError, match=r"stage 7 \(has 0\.bias\)"), torch.no_grad():
            read(module[0].bias)
    optimizer.zero_grad()
    assert torch.equal(module[1].weight, parameters["1.weight"])


def test_a_placed_module_can_be_copied_moved_and_listed() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    release_parameters(module, {"1.weight", "1.bias"}, lambda name: "stage 0", CPU)
    copied = copy.deepcopy(module)
    assert isinstance(copied[0].weight, nn.Parameter)
    assert is_absent(copied[0].weight)
    assert copied[0].weight is not module[0].weight
    assert torch.equal(copied[1].weight, module[1].weight)
    assert list(module.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    module.double()
    assert module[0].weight.dtype is torch.float64
    assert is_absent(module[0].weight)
    assert sum(p.numel() for p in module.parameters()) == 17


def test_ties_stay_ties() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight
    whole = copy.deepcopy(module)
    release_parameters(module, {"b.weight"}, lambda name: "stage 0", CPU)
    assert not is_absent(module["a"].weight)
    assert module["a"].weight is module["b"].weight
    assert is_absent(module["c"].weight)
    release_parameters(module, set(), lambda name: "stage 0", CPU)
    assert is_absent(module["a"].weight)
    assert module["a"].weight is module["b"].weight
    fill_parameters(module, {name: p.detach() for name, p in whole.named_parameters()})
    assert module["a"].weight is module["b"].weight
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name))


def test_an_lstm_gives_new_objects_that_it_uses() -> None:
    module = nn.LSTM(2, 2).double()
    whole = copy.deepcopy(module)
    release_parameters(module, {"bias_hh_l0"}, lambda name: "stage 0", CPU)
    assert is_absent(module.weight_ih_l0)
    fill_parameters(module, {name: p.detach().clone() for name, p in whole.named_parameters()})
    x = torch.randn(3, 1, 2, dtype=torch.float64)
    out = module(x)[0]
    assert torch.equal(out, whole(x)[0])
    out.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_batch_norm_statistics_belong_to_their_stage() -> None:
    torch.manual_seed(0)
    module = Unet().double()
    batch = module.batch(4)
    plain = fresh(module)
    run_plain(plain, batch)
    pipelines = apart(module, (batch, 0), num_stages=3, num_microbatches=1)
    run_apart(pipelines, batch)
    found = set()
    for pipeline in pipelines:
        for name in pipeline.ownership.owned_buffers(pipeline.stage_index):
            assert name not in found
            found.add(name)
            assert torch.equal(pipeline.module.get_buffer(name), plain.get_buffer(name)), name
    assert found == {name for name, _ in module.named_buffers()}
