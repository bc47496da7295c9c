"""The profiles that benchmarks plan with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import convert_profiles
from lightning_autopipe.profile_files import load_profile

NODE = "{} -- op -- forward_compute_time=1, backward_compute_time=2, activation_size=10, parameter_size=4\n"


def test_every_profile_of_the_repository_is_read() -> None:
    paths = sorted(convert_profiles.FOLDER.glob("*.json"))
    assert len(paths) == 12
    for path in paths:
        profile = load_profile(path)
        (times,) = profile.times
        assert 0.05 < sum(times.forward_s) + sum(times.backward_s) < 1, f"{path.name}: seconds of a micro-batch"
        assert "PipeDream" in times.device_model or "DAPPLE" in times.device_model or "Piper" in times.device_model
        assert path.name in (convert_profiles.FOLDER / "README.md").read_text()


def test_files_are_converted_with_their_source_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in" / "dapple").mkdir(parents=True)
    (tmp_path / "in" / "dapple" / "small-pbs-4.txt").write_text(NODE.format("a") + NODE.format("b") + " a -- b\n")
    (tmp_path / "in" / "other").mkdir()
    (tmp_path / "in" / "other" / "tiny.txt").write_text(NODE.format("a"))
    arguments = [
        "convert_profiles",
        str(tmp_path / "in"),
        "--to",
        str(tmp_path / "out"),
        "--time-unit",
        "other/tiny=us",
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    assert convert_profiles.main() == 0
    small, tiny = (load_profile(tmp_path / "out" / name) for name in ("dapple-small-pbs-4.json", "other-tiny.json"))
    assert (small.times[0].device_model, small.microbatch_size) == ("V100 (DAPPLE)", 4)
    assert (tiny.times[0].device_model, tiny.times[0].forward_s) == ("GPU of other", (1e-6,))
    assert "AlibabaPAI/DAPPLE" in (tmp_path / "out" / "README.md").read_text()


def test_a_damaged_file_ends_the_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.txt").write_text("a,b\n")
    monkeypatch.setattr(sys, "argv", ["convert_profiles", str(tmp_path), "--to", str(tmp_path / "out")])
    assert convert_profiles.main() == 1
    assert "bad.txt: no profile" in capsys.readouterr().err
