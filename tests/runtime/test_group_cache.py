"""Groups of earlier layouts are closed; those of the last ones are kept."""

from __future__ import annotations

import itertools
import os

import torch
import torch.distributed as dist

from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.runtime import group_cache
from lightning_autopipe.runtime.process_groups import create_process_groups
from tests.harness import run_processes


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def make_many() -> tuple[list[int], bool]:
    counts = []
    for timeout_s in range(20, 20 + 3 * group_cache._MAX_PURPOSES):
        groups = create_process_groups(ParallelLayout(num_stages=2), timeout_s=timeout_s)
        total = torch.ones(1)
        dist.all_reduce(total, group=groups.pipeline)
        counts.append(num_open_files())
    return counts, create_process_groups(ParallelLayout(num_stages=2), timeout_s=timeout_s) is groups


def test_groups_of_earlier_layouts_are_closed() -> None:
    for counts, is_kept in run_processes(2, make_many):
        assert is_kept
        growth = [after - before for before, after in itertools.pairwise(counts)]
        assert growth[0] > 0  # so that the figure shows what it is to show
        assert max(counts[group_cache._MAX_PURPOSES :]) <= counts[group_cache._MAX_PURPOSES - 1] + growth[0], counts
