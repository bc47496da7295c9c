from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from lightning_autopipe.core import LayerProfile, ParallelLayout, Partition, PipelinePlan, PlanError


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
        "layout": ParallelLayout(num_stages=2, num_replicas=2),
        "schedule_name": "1f1b",
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
        (edited(schema_version=1), "schema_version is 1, this version of lightning_autopipe reads 2"),
        (edited(schema_version=True), "schema_version is True"),
        (edited(surprise=1), r"unknown: \['surprise'\]"),
        (edited(layout=...), r"missing: \['layout'\]"),
        (edited(layout=[]), "layout: expected an object, got list"),
        (edited(layout__num_stages="2"), "layout: .*num_stages must be an integer"),
        (edited(layout__num_stages=3), "2 stages, but the layout has 3"),
        (edited(partition__cut_points=[4]), "partition: .*allowed are 1 to 3"),
        (edited(partition__cut_points=None), "partition.cut_points: expected a list"),
        (edited(partition__num_layers=5), "covers 5 layers, but the plan lists 4"),
        (edited(num_microbatches=2.0), "num_microbatches must be an integer"),
        (edited(num_microbatches=True), "num_microbatches must be an integer"),
        (edited(module_fingerprint=""), "module_fingerprint must be a non-empty string"),
        (edited(schedule_name=None), "schedule_name must be a non-empty string"),
        (edited(stage_work_shares=[1.0]), "1 values for 2 stages"),
        (edited(stage_work_shares=["a", 1]), r"stage_work_shares\[0\]"),
        (edited(layers__2__name=3), r"layers\[2\]: .*name must be"),
        (edited(layers__2__forward_flops=-1), r"layers\[2\]: .*forward_flops must be a finite number"),
        (edited(layers__2__trainable_bytes=500), r"trainable_bytes=500 is more than param_bytes=400"),
        (edited(layers__2__parameters=[1]), r"parameters\[0\] must be str"),
        (edited(layers={}), "layers: expected a list"),
        (a_plan().to_json().replace("1000000000.0", "NaN"), "NaN is not a number"),
        (a_plan().to_json().replace('"num_microbatches"', '"schedule_name"'), "given twice"),
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
    plan.require(module_fingerprint="sha256:00", world_size=4)
    with pytest.raises(PlanError, match="made for another module"):
        plan.require(module_fingerprint="sha256:01", world_size=4)
    with pytest.raises(PlanError, match=r"4 processes \(2 stages x 2 replicas\), but 2 were started"):
        plan.require(module_fingerprint="sha256:00", world_size=2)
