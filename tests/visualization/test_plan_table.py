from __future__ import annotations

from dataclasses import replace
from textwrap import dedent
from typing import Any

import pytest
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

         stage  ranks  from … to  layers  param. trained    work  sends on
         ──────────────────────────────────────────────────────────────────
             0  2, 5   wte             2          38.6 M  50.0 %   1.5 MiB
                       … h[0]                     38.6 M
             1  1, 4   h[1]            1          99,999  25.0 %     512 B
                                                  99,999
             2  0, 3   head            1               0  25.0 %
                                                       0

           all                         4          38.7 M
                                                  38.7 M

        stage 2 holds a copy of wte.weight (tied; counted in stage 0)
    """
    assert [line.strip() for line in plan_text(a_plan()).splitlines()] == [
        line.strip() for line in dedent(expected).strip("\n").splitlines()
    ]


def test_what_is_trained_is_shown_where_some_is_frozen() -> None:
    layers = (a_layer("a", 5, trainable=False), a_layer("b", 7))
    options: dict[str, Any] = {
        "partition": Partition(cut_points=(1,), num_layers=2),
        "mapping": DeviceMapping.of_layout(ParallelLayout(num_stages=2)),
        "stage_work_shares": (),
    }
    assert "trained" in plan_text(a_plan(layers=layers, **options))
    assert "trained" not in plan_text(a_plan(layers=layers[1:] * 2, **options))


BYTES_EACH = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "working_bytes")


def some_predictions(num_bytes: int, kept: tuple[float, ...] = (3, 2, 1)) -> tuple[StagePrediction, ...]:
    return tuple(
        StagePrediction(
            forward_s=seconds,
            backward_s=seconds,
            stash_size=stash_size,
            plain_stash_size=3 - stage_index,
            stash_bytes=num_bytes,
            buffer_bytes=0,
            **dict.fromkeys(BYTES_EACH, num_bytes),
        )
        for stage_index, (seconds, stash_size) in enumerate(zip((0.001, 0.02345, 1.5), kept, strict=True))
    )


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_text_stays_within_its_width_with_whole_headers_and_no_colours(width: int) -> None:
    """All columns, each as wide as they get."""
    widest = a_plan(
        stage_predictions=some_predictions(200 << 20),
        layers=tuple(replace(layer, boundary_bytes=1000 << 10) for layer in a_plan().layers),
    )
    text = plan_text(widest, width=width)
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= width
    assert text.endswith("\n")
    words = ("stage", "ranks", "from … to", "layers", "param.", "trained", "sends", "on", "µ-batch", "memory")
    for word in (*words, "1000 MiB", "1000 KiB"):
        assert word in text
    assert "…" not in text.replace("from … to", "").replace("… h[0]", "")


def test_predicted_time_and_memory_are_shown() -> None:
    text = plan_text(a_plan(stage_predictions=some_predictions(1 << 20)), width=120)
    for seconds in ("2 ms", "46.9 ms", "3 s"):
        assert f" {seconds}   5 MiB" in text


def test_one_stage_and_no_prediction() -> None:
    plan = a_plan(
        partition=Partition(cut_points=(), num_layers=4),
        mapping=DeviceMapping.of_layout(ParallelLayout(num_stages=1, num_replicas=40)),
        stage_work_shares=(),
        num_microbatches=1,
    )
    text = plan_text(plan)
    assert text.startswith("1 stage × 40 replicas, 1f1b, 1 micro-batch\n")
    assert "0, 1, 2, 3, 4, 5, …, 39" in text
    assert "  ?\n" in text
    assert "copy" not in text


def test_the_table_is_a_rich_one_with_a_row_a_stage() -> None:
    table = plan_table(a_plan())
    assert isinstance(table, Table)
    assert table.row_count == 3


def test_the_module_that_all_layers_are_in_is_named_once() -> None:
    names = ("model.net.wte", "model.net.h.0.mlp", "model.net.h.1", "model.net.ln_f")
    text = plan_text(a_plan(layers=tuple(a_layer(name, 7) for name in names)), width=80)
    assert "… h.0.mlp" in text
    assert text.count("model.net") == 1
    assert "in model.net" in text
    elsewhere = plan_text(a_plan(layers=tuple(a_layer(name, 7) for name in (*names[:3], "head"))), width=80)
    assert elsewhere.count("model.net") == 3
