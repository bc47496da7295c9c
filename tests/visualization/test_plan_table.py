from __future__ import annotations

from textwrap import dedent
from typing import Any

from rich.table import Table

from lightning_autopipe.core import (
    DeviceMapping,
    LayerProfile,
    ParallelLayout,
    Partition,
    PipelinePlan,
    ScheduleSpec,
    StagePrediction,
)
from lightning_autopipe.visualization import plan_table, plan_text


def a_layer(name: str, num_parameters: int, *, trainable: bool = True, **fields: Any) -> LayerProfile:
    return LayerProfile(
        name=name,
        forward_flops=1.0,
        num_parameters=num_parameters,
        num_trainable_parameters=num_parameters if trainable else 0,
        **fields,
    )


def a_plan(**changes: Any) -> PipelinePlan:
    fields: dict[str, Any] = {
        "module_fingerprint": "x",
        "layers": (
            a_layer("wte", 38_597_376, boundary_bytes=1 << 20, parameters=("wte.weight",)),
            a_layer("h[0]", 1_000, trainable=False, boundary_bytes=3 << 19),
            a_layer("h[1]", 99_999, boundary_bytes=512),
            a_layer("head", 0, parameters=("wte.weight",)),
        ),
        "partition": Partition(cut_points=(2, 3), num_layers=4),
        "mapping": DeviceMapping.of_layout(ParallelLayout(num_stages=3, num_replicas=2)),
        "schedule": ScheduleSpec(name="1f1b"),
        "num_microbatches": 8,
        "stage_work_shares": (0.5, 0.25, 0.25),
    }
    return PipelinePlan(**(fields | changes))


def test_the_text_shows_every_stage() -> None:
    expected = """
                         3 stages × 2 replicas, 1f1b, 8 micro-batches

         stage  ranks  from … to             layers  parameters  trainable    work  sends on
         ────────────────────────────────────────────────────────────────────────────────────
             0  2, 5   wte                        2      38.6 M     38.6 M  50.0 %   1.5 MiB
                       … h[0]
             1  1, 4   h[1]                       1      99,999     99,999  25.0 %     512 B
             2  0, 3   head                       1           0          0  25.0 %

           all                                    4      38.7 M     38.7 M

                    stage 2 holds a copy of wte.weight (tied; counted in stage 0)
    """
    assert [line.strip() for line in plan_text(a_plan()).splitlines()] == [
        line.strip() for line in dedent(expected).strip("\n").splitlines()
    ]


def test_the_text_stays_within_its_width_and_has_no_colours() -> None:
    for width in (80, 100, 200):
        text = plan_text(a_plan(), width=width)
        assert "\x1b" not in text
        assert max(len(line) for line in text.splitlines()) <= width
        assert text.endswith("\n")
    assert "sends on" in plan_text(a_plan(), width=90)


def test_predicted_time_and_memory_are_shown() -> None:
    bytes_each = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "working_bytes")
    stages = tuple(
        StagePrediction(forward_s=seconds, backward_s=seconds, buffer_bytes=0, **dict.fromkeys(bytes_each, 1 << 20))
        for seconds in (0.001, 0.02345, 1.5)
    )
    text = plan_text(a_plan(stage_predictions=stages), width=120)
    assert "µ-batch" in text
    assert "memory" in text
    for seconds in ("2 ms", "46.9 ms", "3.00 s"):
        assert f" {seconds}  5.0 MiB" in text


def test_one_stage_and_no_prediction() -> None:
    plan = a_plan(
        partition=Partition(cut_points=(), num_layers=4),
        mapping=DeviceMapping.of_layout(ParallelLayout(num_stages=1, num_replicas=40)),
        stage_work_shares=(),
        num_microbatches=1,
    )
    text = plan_text(plan)
    assert "1 stage × 40 replicas, 1f1b, 1 micro-batch\n" in text
    assert "0, 1, 2, 3, 4, 5, …, 39" in text
    assert "  ?\n" in text
    assert "copy" not in text


def test_the_table_is_a_rich_one_with_a_row_a_stage() -> None:
    table = plan_table(a_plan())
    assert isinstance(table, Table)
    assert table.row_count == 3
