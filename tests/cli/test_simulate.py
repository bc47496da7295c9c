from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_autopipe.cli import main

HEAVY = ("torch", "lightning", "hydra", "matplotlib", "jinja2")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate", "--stages", "3", "--microbatches", "4", *arguments]) == 0
    return capsys.readouterr().out


def test_a_schedule_is_simulated_with_the_times_given(capsys: pytest.CaptureFixture[str]) -> None:
    output = simulated(capsys, "--forward", "10")
    assert output.startswith("stage 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3\n")
    # (M + S - 1) micro-batches of 30 ms.
    assert "step 180 ms, bubble 33.3 %" in output
    assert "memory" not in output


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        (("--forward", "10", "--backward", "10"), "120 ms"),
        (("--forward", "10,20,10", "--backward", "0"), "100 ms"),
        (("--forward", "10", "--optimizer", "5"), "185 ms"),
        (("--forward", "10", "--schedule", "gpipe"), "180 ms"),
        (("--forward", "10", "--transfer", "1", "--schedule", "gpipe"), "184 ms"),
        (("--forward", "10", "--schedule", "forward_only"), "60 ms"),
        # Two halves reach the last stage after 10 ms instead of 20 ms.
        (("--forward", "10", "--schedule", "sliced_1f1b", "--sliced", "4"), "150 ms"),
        (("--forward", "10", "--depths", "3,2,1"), "180 ms"),
        (("--forward", "10", "--schedule", "zero_bubble"), "140 ms"),
        (("--forward", "10", "--schedule", "zero_bubble", "--weight-gradients", "0"), "180 ms"),
        (("--forward", "10", "--schedule", "sliced_1f1b", "--sliced", "2,2"), "150 ms"),
        (("--forward", "10", "--stages", "6", "--schedule", "interleaved_1f1b", "--stages-per-rank", "2"), "300 ms"),
        (("--forward", "0", "--optimizer", "1500"), "1.5 s"),
    ],
)
def test_options_change_the_step(arguments: tuple[str, ...], step: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"step {step}, " in simulated(capsys, *arguments)


def test_depths_are_those_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert "stage 2 | .  .  F0 F1 B0" in simulated(capsys, "--forward", "1", "--depths", "3,2,1")


def test_picture_and_trace_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulated(capsys, "--forward", "10", "--picture", str(tmp_path / "a.svg"), "--trace", str(tmp_path / "a.json"))
    assert "1f1b · 3 stages · 4 micro-batches" in (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert len(json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["traceEvents"]) > 24


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("", "give a plan, or --stages, --microbatches and --forward; --stages is missing"),
        ("--stages 2 --microbatches 2", "--forward is missing"),
        ("--stages 0 --microbatches 2 --forward 1", "--stages must be a whole number >= 1, got '0'"),
        ("--stages 2 --microbatches 2.5 --forward 1", "--microbatches must be a whole number >= 1, got '2.5'"),
        ("--stages 2 --microbatches 2 --forward=-1", "--forward must be milliseconds >= 0"),
        ("--stages 2 --microbatches 2 --forward nan", "--forward must be milliseconds >= 0"),
        ("--stages 2 --microbatches 2 --forward 1 --backward 1,2,3", "--backward gives 3 times for 2"),
        (
            "--stages 2 --microbatches 2 --forward 1 --schedule zigzag",
            "there is no schedule 'zigzag'; set schedule= to one",
        ),
        ("--stages 2 --microbatches 2 --forward 1 --depths 0,1", "depths[1]=1 is more than the 0 of the stage before"),
        ("--stages 2 --microbatches 2 --forward 1 --depths 1", "1 warm-up depths are given for 2 stages"),
        (
            "--stages 2 --microbatches 2 --forward 1 --schedule gpipe --depths 1,0",
            "schedule 'gpipe' takes no warm-up depths",
        ),
        (
            "--stages 2 --microbatches 2 --forward 1 --schedule sliced_1f1b --sliced 3",
            "--sliced 3,0 is more than the 2 micro-batches",
        ),
        ("--stages 1000 --microbatches 1000000 --forward 1", "is more than 200000, which takes too long"),
        ("--stages 2 --microbatches 2 --forward 1 --cluster x", "--cluster goes with a plan"),
        ("--stages 2 --microbatches 2 --forward 1 --picture a.gif", "ends in .png or .svg"),
    ],
)
def test_wrong_input_is_told_in_one_line(arguments: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("autopipe: error: ")
    assert problem in error
    assert error.count("\n") == 1


def test_it_runs_without_torch_and_without_what_it_does_not_need() -> None:
    script = (
        "import sys; from lightning_autopipe.cli import main;"
        "main(['simulate', '--stages', '2', '--microbatches', '2', '--forward', '1']);"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules], 'end')"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=root)
    assert result.stdout.splitlines()[-1].strip() == "end", result.stderr
    # A pipe gets tables whole.
    assert "…" not in result.stdout
