from __future__ import annotations

import inspect
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lightning_autopipe import ConfigurationError, PlanError
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.mapping import DeviceMapping
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.profile import LayerProfile
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.strategy import AutoPipeStrategy
from lightning_autopipe.strategy.environment import settings_as_text
from lightning_autopipe.strategy.options import StrategyOptions


def plan() -> PipelinePlan:
    layers = tuple(LayerProfile(name=str(index), forward_flops=1.0) for index in range(4))
    return PipelinePlan(
        module_fingerprint="some module",
        layers=layers,
        partition=Partition(cut_points=(2,), num_layers=4),
        mapping=DeviceMapping.of_layout(ParallelLayout(num_stages=2)),
        schedule=ScheduleSpec(name="gpipe"),
        num_microbatches=3,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_stages": 2, "num_replicas": 2, "num_microbatches": 8},
        {"schedule": "gpipe"},
        {"partition": "uniform"},
        {"partition": "parameters"},
        {"partition": [1, 2]},
        {"partition": (1, 2)},
        {"partition": Partition(cut_points=(1,), num_layers=3)},
        {"plan": plan()},
        {"timeout": 20},
        {"timeout": timedelta(seconds=20)},
        {"process_group_backend": "gloo"},
        {"deferred_batch_norm": True},
        {"shard_optimizer": True, "checkpoint_format": "sharded_async"},
        {"recompute": False, "verify": False, "gather_after_fit": False},
        {"verify": True, "cut_after": ["net.3"], "split_batch": {"x": 0, "weights": None}},
    ],
)
def test_allowed(options: dict[str, Any]) -> None:
    assert StrategyOptions(**options) == StrategyOptions(**options)


@pytest.mark.parametrize("name", [field.name for field in fields(StrategyOptions)])
def test_auto_is_allowed_wherever_something_is_chosen(name: str) -> None:
    chosen = {"process_group_backend", "gather_after_fit", "timeout", "plan", "cut_after", "split_batch"}
    if name not in chosen:
        StrategyOptions(**{name: "auto"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 0}, "num_stages must be an integer >= 1"),
        ({"num_replicas": True}, "num_replicas must be an integer"),
        ({"num_microbatches": 2.0}, "num_microbatches must be an integer"),
        ({"schedule": "interleaved"}, "schedule must be one of 'auto', '1f1b', 'gpipe', .*; got 'interleaved'"),
        ({"partition": "even"}, "partition must be"),
        ({"partition": [1.5]}, "partition must be"),
        ({"process_group_backend": "mpi"}, "process_group_backend must be one of None, 'gloo', 'nccl'"),
        ({"gather_after_fit": "auto"}, "gather_after_fit must be True or False"),
        ({"timeout": 0}, "timeout must be a finite time > 0"),
        ({"timeout": "1h"}, "timeout must be a timedelta"),
        ({"timeout": float("inf")}, "timeout must be a finite time"),
        ({"plan": 3}, "plan must be a file's path"),
        ({"plan": "no/such/file.json"}, "plan='no/such/file.json' is not a file"),
        ({"plan": plan(), "num_stages": 2, "schedule": "1f1b"}, "a plan decides num_stages, schedule itself"),
        ({"plan": plan(), "partition": [1]}, "a plan decides partition itself"),
        ({"cut_after": "net.3"}, "cut_after must be a list of module paths or None; got 'net.3'"),
        ({"cut_after": []}, "cut_after must be a list of module paths"),
        ({"cut_after": ["net.3"], "num_stages": 3}, "1 cuts, which make 2 stages, but num_stages is 3"),
        ({"cut_after": ["net.3"], "partition": [1]}, "cut_after and partition both say where the stages begin"),
        ({"plan": plan(), "cut_after": ["net.3"]}, "a plan decides cut_after itself"),
        ({"plan": plan(), "cluster": "rtx4090_8"}, "a plan decides cluster itself"),
        ({"cluster": "rtx4090_8", "profile": "flops"}, "cluster= needs measured seconds, but profile='flops'"),
        ({"cluster": 3}, "cluster must be a ClusterTopology, a file's path, the name of an example"),
        ({"split_batch": ["x"]}, r"split_batch must map leaves of the batch .* got \['x'\]"),
        ({"split_batch": {"x": -1}}, "split_batch must map leaves"),
        ({"loss_over": "sample"}, "loss_over must be one of 'microbatch', 'batch', 'auto'; got 'sample'"),
        ({"loss_over": "batch", "schedule": "1f1b"}, "loss_over='batch' needs .* schedule='gpipe'; got '1f1b'"),
        ({"verify": 1}, "verify must be one of 'auto', True, False; got 1"),
        ({"deferred_batch_norm": 1}, "deferred_batch_norm must be one of 'auto', True, False; got 1"),
        ({"shard_optimizer": 1}, "shard_optimizer must be one of 'auto', True, False; got 1"),
        ({"checkpoint_format": "folder"}, "checkpoint_format must be one of 'auto', 'consolidated', 'sharded', 'sh"),
        ({"recompute": True}, "recompute=True is not supported yet"),
        ({"trace": 3}, "trace must be a folder's path or None; got 3"),
        ({"trace": __file__}, "must be a folder, but it is a file"),
        ({"replan": True}, "replan must be one of 'auto', 'warn', False; got True"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AutoPipeStrategy(**options)


def test_the_strategy_takes_every_option_with_the_same_default() -> None:
    parameters = inspect.signature(AutoPipeStrategy).parameters
    for field in fields(StrategyOptions):
        assert parameters[field.name].default == field.default, field.name
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert f"        {field.name}: " in (AutoPipeStrategy.__doc__ or ""), field.name


def test_timeout_in_seconds() -> None:
    assert StrategyOptions(timeout=timedelta(minutes=2)).timeout_s == 120.0
    assert StrategyOptions(timeout=3).timeout_s == 3.0


def test_a_plans_file_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan().save(path)
    assert AutoPipeStrategy(plan=path).plan_to_run == plan()
    path.write_text("{}")
    with pytest.raises(PlanError, match=r"plan\.json"):
        AutoPipeStrategy(plan=str(path))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (ScheduleSpec(name="forward_only"), "schedule 'forward_only' is none that trains"),
        (ScheduleSpec(name="gpipe", num_sliced_first=1), "schedule 'gpipe' runs micro-batches whole"),
    ],
)
def test_a_plan_that_does_not_train_is_refused_at_once(schedule: ScheduleSpec, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AutoPipeStrategy(plan=replace(plan(), schedule=schedule))


def test_settings_are_told_as_text_to_the_other_processes() -> None:
    options = StrategyOptions(num_stages=2)
    known = settings_as_text(options, None)
    assert (known["num_stages"], known["plan"]) == ("2", "None")
    assert known == settings_as_text(StrategyOptions(num_stages=2), None)
    first, other = (settings_as_text(options, replace(plan(), num_microbatches=number))["plan"] for number in (3, 4))
    assert first != other
    assert len(first) < 100
