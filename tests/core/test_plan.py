from __future__ import annotations

import contextlib
import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from lightning_autopipe.core import (
    Device,
    DeviceMapping,
    LayerProfile,
    ParallelLayout,
    Partition,
    PipelinePlan,
    PlanError,
    RunnerUp,
    ScheduleSpec,
    StepPrediction,
)


def a_plan(**changes: Any) -> PipelinePlan:
    layers = tuple(
        LayerProfile(
            name=f"net.{index}",
            forward_flops=1e9 * index,
            param_bytes=400,
            trainable_bytes=400,
            boundary_bytes=64,
            parameters=(f"net.{index}.weight",),
            num_parameters=100,
            num_trainable_parameters=100,
        )
        for index in range(4)
    )
    fields: dict[str, Any] = {
        "module_fingerprint": "sha256:00",
        "layers": layers,
        "partition": Partition(cut_points=(3,), num_layers=4),
        "mapping": DeviceMapping.of_layout(ParallelLayout(num_stages=2, num_replicas=2)),
        "schedule": ScheduleSpec(name="1f1b"),
        "num_microbatches": 8,
        "stage_work_shares": (0.5, 0.5),
    }
    return PipelinePlan(**(fields | changes))


def edited(**changes: Any) -> str:
    document = json.loads(a_plan().to_json())
    for path, value in changes.items():
        *outer, last = path.split("__")
        place = document
        for key in outer:
            place = place[int(key) if key.isdigit() else key]
        if value is Ellipsis:
            del place[last]
        else:
            place[last] = value
    return json.dumps(document)


def test_a_plan_comes_back_from_json_equal() -> None:
    plan = a_plan()
    assert PipelinePlan.from_json(plan.to_json()) == plan
    assert [layer.name for layer in plan.stage_layers(1)] == ["net.3"]
    with pytest.raises(FrozenInstanceError):
        plan.num_microbatches = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "schema_version is None"),
        (edited(schema_version=1), "schema_version is 1, this version of lightning_autopipe reads 4"),
        (edited(schema_version=True), "schema_version is True"),
        (edited(surprise=1), r"unknown: \['surprise'\]"),
        (edited(mapping=...), r"missing: \['mapping'\]"),
        (edited(mapping=[]), "mapping: expected an object, got list"),
        (edited(mapping__stage_ranks=[[1, 3], 0]), r"mapping.stage_ranks\[1\]: expected a list"),
        (edited(mapping__stage_ranks=[[1, 3], [2, 0]]), "mapping: .*rank 0 must be the first one of the last stage"),
        (edited(mapping__stage_ranks=[[2], [1], [0]]), "2 stages, but the mapping has ranks for 3"),
        (edited(partition__cut_points=[4]), "partition: .*allowed are 1 to 3"),
        (edited(partition__cut_points=None), "partition.cut_points: expected a list"),
        (edited(partition__num_layers=5), "covers 5 layers, but the plan lists 4"),
        (edited(num_microbatches=2.0), "num_microbatches must be an integer"),
        (edited(num_microbatches=True), "num_microbatches must be an integer"),
        (edited(module_fingerprint=""), "module_fingerprint must be a non-empty string"),
        (edited(schedule__name=None), "schedule: .*name must be a non-empty string"),
        (edited(schedule__depths=[0, 1]), r"schedule: .*depths\[1\]=1 is more than the 0 of the stage before"),
        (edited(schedule__depths=[1]), "schedule.depths has 1 values for 2 stages"),
        (edited(replica_microbatches=[8]), "replica_microbatches has 1 values, but there are 2 replicas"),
        (edited(step_prediction={}), "step_prediction: fields missing"),
        (edited(runners_up=[{"schedule": {}}]), r"runners_up\[0\].schedule: fields missing"),
        (edited(devices=[{}]), r"devices\[0\]: fields missing"),
        (edited(stage_work_shares=[1.0]), "1 values for 2 stages"),
        (edited(stage_work_shares=["a", 1]), r"stage_work_shares\[0\]"),
        (edited(layers__2__name=3), r"layers\[2\]: .*name must be"),
        (edited(layers__2__forward_flops=-1), r"layers\[2\]: .*forward_flops must be a finite number"),
        (edited(layers__2__trainable_bytes=500), r"trainable_bytes=500 is more than param_bytes=400"),
        (edited(layers__2__parameters=[1]), r"parameters\[0\] must be str"),
        (edited(layers={}), "layers: expected a list"),
        (a_plan().to_json().replace("1000000000.0", "NaN"), "NaN is not a number"),
        (a_plan().to_json().replace('"num_microbatches"', '"schedule"'), "given twice"),
    ],
)
def test_json_that_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PipelinePlan.from_json(text)


def test_saving_replaces_the_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plans" / "plan.json"
    a_plan().save(path)
    assert PipelinePlan.load(path) == a_plan()
    a_plan(num_microbatches=2).save(path)
    assert PipelinePlan.load(path).num_microbatches == 2
    monkeypatch.setattr("os.fsync", lambda descriptor: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        a_plan(num_microbatches=3).save(path)
    assert PipelinePlan.load(path).num_microbatches == 2
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


def test_loading_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"missing\.json.*cannot be read"):
        PipelinePlan.load(tmp_path / "missing.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(PlanError, match=r"broken\.json.*not valid: not JSON"):
        PipelinePlan.load(broken)


def test_a_plan_is_refused_for_another_module_or_world_size() -> None:
    plan = a_plan()
    plan.require_module("sha256:00")
    plan.require_world(4)
    with pytest.raises(PlanError, match="made for another module"):
        plan.require_module("sha256:01")
    with pytest.raises(PlanError, match=r"4 processes \(2 stages x 2 replicas\), but 2 were started"):
        plan.require_world(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mapping": DeviceMapping(stage_ranks=((1, 2, 3), (0,)))}, r"unlike numbers of replicas \(\[3, 1\]\)"),
        ({"mapping": DeviceMapping(stage_ranks=((1, 3), (0, 4)))}, "leaves others idle"),
    ],
)
def test_a_plan_that_cannot_be_run_yet_is_refused(changes: dict[str, Any], message: str) -> None:
    plan = a_plan(**changes)
    assert PipelinePlan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match=message):
        plan.require_world(4)


def test_replicas_may_take_unlike_numbers_of_microbatches() -> None:
    plan = a_plan(replica_microbatches=(9, 7))
    plan.require_world(4)
    assert plan.has_unlike_replicas
    assert [plan.microbatches_of(index) for index in (0, 1)] == [9, 7]
    equal = a_plan()
    assert not equal.has_unlike_replicas
    assert equal.microbatches_of(1) == equal.num_microbatches


def cluster(*servers: str, model: str = "V100", memory_bytes: int = 16 * 2**30) -> tuple[Device, ...]:
    return tuple(
        Device(global_rank=rank, server=server, model=model, memory_bytes=memory_bytes)
        for rank, server in enumerate(servers)
    )


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (cluster("x", "x", "y", "y"), None),
        (cluster("x", "x", "y", "y", memory_bytes=15 * 2**30 + 2**29), None),  # 97 %
        (cluster("x", "x", "y", "y", model="T4"), "rank 0 is planned for 'V100'.* here it is 'T4'"),
        (cluster("x", "x", "y", "y", memory_bytes=8 * 2**30), "with 16.0 GiB.* with 8.0 GiB"),
        (cluster("x", "y", "x", "y"), r"\[\[0, 1\], \[2, 3\]\], but here they have \[\[0, 2\], \[1, 3\]\]"),
    ],
)
def test_a_plan_is_refused_on_another_cluster(found: tuple[Device, ...], message: str | None) -> None:
    plan = a_plan(devices=cluster("a", "a", "b", "b"))
    a_plan().require_devices(found)
    if message is None:
        plan.require_devices(found)
        return
    with pytest.raises(PlanError, match=message):
        plan.require_devices(found)


@pytest.mark.parametrize(
    ("planned", "found", "is_same"),
    [
        ("RTX 3090", "NVIDIA GeForce RTX 3090", True),
        ("rtx3090", "NVIDIA GeForce RTX 3090", False),
        ("RTX 3090", "NVIDIA GeForce RTX 3090 Ti", False),
        ("RTX 2080 Ti", "NVIDIA GeForce RTX 2080 Ti", True),
        ("V100", "Tesla V100-SXM2-32GB", True),
        ("A100 80GB", "NVIDIA A100-SXM4-40GB", False),
        ("Tesla V100-SXM2-32GB", "V100", False),
        ("GPU", "GPU Laptop", False),
        ("…", "NVIDIA GeForce RTX 3090", False),
        ("…", "…", True),
    ],
)
def test_models_are_named_as_people_or_as_drivers_do(planned: str, found: str, is_same: bool) -> None:
    plan = a_plan(devices=cluster("a", "a", "b", "b", model=planned))
    with contextlib.nullcontext() if is_same else pytest.raises(PlanError, match="another cluster"):
        plan.require_devices(cluster("x", "x", "y", "y", model=found))


def test_what_was_predicted_comes_back_from_json_equal() -> None:
    plan = a_plan(
        mapping=DeviceMapping(stage_ranks=((3, 1), (0, 2))),
        schedule=ScheduleSpec(name="1f1b", depths=(3, 0)),
        step_prediction=StepPrediction(step_s=0.5, num_samples=64, bubble_fraction=0.25, plain_step_s=0.75),
        runners_up=(
            RunnerUp(
                replica_counts=(4,),
                schedule=ScheduleSpec(name="1f1b"),
                num_microbatches=2,
                step_s=1.0,
                samples_per_s=32.0,
            ),
        ),
        devices=cluster("a", "a", "b", "b"),
    )
    assert PipelinePlan.from_json(plan.to_json()) == plan
    assert plan.step_prediction is not None
    assert plan.step_prediction.samples_per_s == 128
    assert [plan.layout.stage_index(rank) for rank in range(4)] == [1, 0, 1, 0]
    assert [plan.layout.replica_index(rank) for rank in range(4)] == [0, 1, 1, 0]
