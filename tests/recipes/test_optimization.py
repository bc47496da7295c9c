"""Optimizer groups and learning-rate schedule."""

from __future__ import annotations

import math

import pytest
from torch import nn

from recipes.optimization import adamw, learning_rate_factor, warmup_cosine


def test_only_matrices_are_decayed() -> None:
    module = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    groups = adamw(module, learning_rate=0.1, weight_decay=0.3).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert [[p.ndim for p in group["params"]] for group in groups] == [[2, 2], [1, 1, 1]]


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    module = nn.Linear(4, 4).requires_grad_(False)
    module.bias.requires_grad_(True)
    (group,) = adamw(module, learning_rate=0.1, weight_decay=0.3).param_groups
    assert group["params"] == [module.bias]


def test_warm_up_then_cosine() -> None:
    factor = learning_rate_factor(4, 104, 0.1)
    assert [factor(step) for step in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert factor(4) == pytest.approx(1.0)
    assert factor(54) == pytest.approx(0.55)
    assert factor(104) == pytest.approx(0.1)
    assert factor(1000) == pytest.approx(0.1)


def test_training_without_an_end_stays_at_the_full_rate() -> None:
    factor = learning_rate_factor(4, math.inf, 0.1)
    assert [factor(step) for step in (4, 10_000)] == [1.0, 1.0]


def test_warm_up_longer_than_training() -> None:
    factor = learning_rate_factor(10, 5, 0.1)
    assert factor(5) < 1.0
    assert math.isfinite(factor(10))


def test_schedule_steps_the_optimizer() -> None:
    optimizer = adamw(nn.Linear(2, 2), learning_rate=1.0, weight_decay=0.0)
    schedule = warmup_cosine(optimizer, warmup_steps=1, total_steps=3, final_fraction=0.0)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.5, 1.0, 0.5, 0.0])
