from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.runtime.gradient_reduction import GradientReducer
from lightning_autopipe.runtime.process_groups import create_process_groups
from lightning_autopipe.runtime.tied_parameters import TiedParameters
from tests.harness import run_processes


def reduce_mixed_gradients(bucket_bytes: int) -> tuple[dict[str, Any], int, int]:
    """Gradients that exist on all, some or no ranks, dense and sparse, of several dtypes and memory orders."""
    rank = dist.get_rank()
    parameters = {
        "all": nn.Parameter(torch.zeros(3, 2)),
        "rank 1 only": nn.Parameter(torch.zeros(4)),
        "nobody": nn.Parameter(torch.zeros(5)),
        "double": nn.Parameter(torch.zeros(2, dtype=torch.float64)),
        "channels last": nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        "sparse": nn.Parameter(torch.zeros(6, 2)),
        "sparse or none": nn.Parameter(torch.zeros(6, 2)),
        "scalar": nn.Parameter(torch.zeros(())),
        "empty": nn.Parameter(torch.zeros(0, 3)),
    }
    for name, parameter in parameters.items():
        if name == "nobody" or (name in ("rank 1 only", "sparse or none") and rank != 1):
            continue
        generator = torch.Generator().manual_seed(rank)
        gradient = torch.rand(parameter.shape, dtype=parameter.dtype, generator=generator)
        if name.startswith("sparse"):
            gradient[1:4] = 0
            gradient = gradient.to_sparse(1)
        parameter.grad = gradient.contiguous(memory_format=torch.channels_last) if gradient.dim() == 4 else gradient
    reducer = GradientReducer(dist.group.WORLD, name="everybody", bucket_bytes=bucket_bytes)
    reducer.reduce(parameters)
    result = {
        name: None if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad
        for name, p in parameters.items()
    }
    assert parameters["sparse"].grad is not None
    assert parameters["sparse"].grad.is_sparse
    return result, reducer.num_reductions, reducer.num_collectives


@pytest.mark.parametrize("bucket_bytes", [16, 25 * 2**20])
def test_sums_what_exists_and_leaves_none(bucket_bytes: int) -> None:
    results = run_processes(2, reduce_mixed_gradients, bucket_bytes)
    shapes = {name: (g.shape, g.dtype) for name, g in results[0][0].items() if g is not None}
    assert results[0][0]["nobody"] is None
    for name, (shape, dtype) in shapes.items():
        parts = [
            torch.rand(shape, dtype=dtype, generator=torch.Generator().manual_seed(rank))
            for rank in ((1,) if name in ("rank 1 only", "sparse or none") else (0, 1))
        ]
        if name.startswith("sparse"):
            for part in parts:
                part[1:4] = 0
        for result, num_reductions, _ in results:
            torch.testing.assert_close(result[name], sum(parts), rtol=0, atol=0)
            assert num_reductions == 1
    num_collectives = {result[2] for result in results}
    # the bitmap, two sparse ones, and one bucket a dtype or one a gradient (the scalar and the empty one fit in one)
    assert num_collectives == ({5} if bucket_bytes > 16 else {1 + 2 + 1 + 4})


def train_tied() -> list[dict[str, Tensor]]:
    """Three AdamW steps with ties over (0, 2), (0, 1, 2) and (1, 2); copies of every step."""
    groups = create_process_groups(
        ParallelLayout(num_stages=3, num_replicas=2), timeout_s=20, tied_stages=[[2, 0], [0, 1, 2], [1, 2], [1, 2]]
    )
    stages_by_name = {"wide": [2, 0], "all": [0, 1, 2], "b": [1, 2], "a": [1, 2], "alone": [1], "unused": [0, 2]}
    tied = TiedParameters(stages_by_name, groups)
    rank = dist.get_rank()
    parameters = {
        name: nn.Parameter(torch.linspace(0, 1, 1001, dtype=torch.float64))
        for name, stages in reversed(stages_by_name.items())
        if groups.stage_index in stages
    }
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    steps = []
    for step in range(3):
        for name, parameter in parameters.items():
            generator = torch.Generator().manual_seed(100 * step + rank)
            parameter.grad = None if name == "unused" else torch.rand(1001, generator=generator, dtype=torch.float64)
        tied.reduce(parameters)
        optimizer.step()
        steps.append({name: parameter.detach().clone() for name, parameter in parameters.items()})
    assert [name for name in parameters if tied.is_counted(name)] == {
        0: ["unused", "all", "wide"],
        1: ["alone", "a", "b"],
        2: [],
    }[groups.stage_index]
    assert ("alone" in tied, "all" in tied) == (False, True)
    assert all(reducer.num_reductions == 3 for reducer in tied.reducers.values())
    return steps


def test_tied_copies_are_summed_once_and_stay_identical() -> None:
    by_rank = run_processes(6, train_tied)
    layout = ParallelLayout(num_stages=3, num_replicas=2)
    for name, stages in {"wide": [2, 0], "all": [0, 1, 2], "b": [1, 2], "a": [1, 2], "unused": [0, 2]}.items():
        ranks = [rank for rank in range(6) if layout.stage_index(rank) in stages]
        expected = nn.Parameter(torch.linspace(0, 1, 1001, dtype=torch.float64))
        optimizer = torch.optim.AdamW([expected], lr=0.1)
        for step in range(3):
            parts = [
                torch.rand(1001, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)
                for rank in ranks
            ]
            expected.grad = None if name == "unused" else torch.stack(parts).sum(0)
            optimizer.step()
            for rank in ranks:
                assert torch.equal(by_rank[rank][step][name], by_rank[ranks[0]][step][name]), (name, step, rank)
            torch.testing.assert_close(by_rank[ranks[0]][step][name], expected.detach(), rtol=1e-12, atol=1e-12)


def meet_twice() -> tuple[bool, bool, bool]:
    layout = ParallelLayout(num_stages=2)
    first = create_process_groups(layout, timeout_s=20)
    again = create_process_groups(layout, timeout_s=20)
    other = create_process_groups(layout, timeout_s=20, tied_stages=[(0, 1)])
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=rank, world_size=2)
    second = create_process_groups(layout, timeout_s=20)
    total = torch.ones(1)
    dist.all_reduce(total, group=second.control)
    assert total.item() == 2
    with pytest.raises(ConfigurationError, match="need 6 processes; there are 2"):
        create_process_groups(ParallelLayout(num_stages=2, num_replicas=3), timeout_s=20)
    return again is first, other is first, second is first


def test_groups_are_reused_only_within_one_default_group() -> None:
    assert run_processes(2, meet_twice) == [(True, False, False)] * 2


def describe_groups() -> tuple[int, int, list[list[int]], list[int] | None]:
    groups = create_process_groups(ParallelLayout(num_stages=2, num_replicas=2), timeout_s=20)
    names = (groups.control, groups.pipeline, groups.stage, groups.forward_traffic, groups.backward_traffic)
    last = None if groups.last_stages is None else dist.get_process_group_ranks(groups.last_stages)
    assert len({id(group) for group in names}) == len(names)
    return groups.stage_index, groups.replica_index, [dist.get_process_group_ranks(group) for group in names], last


def test_groups_of_a_layout() -> None:
    all_ranks = [0, 1, 2, 3]
    assert run_processes(4, describe_groups) == [
        (1, 0, [all_ranks, [0, 1], [0, 2], [0, 1], [0, 1]], [0, 2]),
        (0, 0, [all_ranks, [0, 1], [1, 3], [0, 1], [0, 1]], None),
        (1, 1, [all_ranks, [2, 3], [0, 2], [2, 3], [2, 3]], [0, 2]),
        (0, 1, [all_ranks, [2, 3], [1, 3], [2, 3], [2, 3]], None),
    ]
