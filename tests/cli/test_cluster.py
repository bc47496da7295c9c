from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_autopipe.cli import main
from lightning_autopipe.cluster import find_cluster_file, load_topology

HEAVY = ("torch", "lightning", "hydra")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def test_an_example_is_shown_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "rtx3090_v100"]) == 0
    output = capsys.readouterr().out
    assert "12 devices in 2 servers" in output
    assert "│   │   │   └── rank 0–3: RTX 3090 · PCIe 24 GB/s 5 µs" in output


def test_a_file_is_shown_and_written_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "all.json"
    assert main(["cluster", str(find_cluster_file("uneven_1_2_1")), "--output", str(written)]) == 0
    assert "4 devices in 3 servers" in capsys.readouterr().out
    assert load_topology(written) == load_topology(find_cluster_file("uneven_1_2_1"))


@pytest.mark.parametrize("columns", ["", "80"])
def test_headers_are_whole_in_a_pipe_and_in_a_narrow_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["cluster", "rtx3090_v100"]) == 0
    output = capsys.readouterr().out
    for words in ("server ranks devices memory speed to others", "from to kind bandwidth latency duplex sharing"):
        assert words in " ".join(output.split())
    assert "…" not in output
    tables = output[: output.index("cluster\n├")]
    assert max(map(len, tables.splitlines())) <= 80 or not columns
    if not columns:  # one line a link
        assert "volta/socket 0  network" in output


def test_without_a_file_it_is_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster"]) == 0
    assert "in 1 server" in capsys.readouterr().out


def test_wrong_input_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.yaml").write_text("schema_version: 1\nservers: []\n")
    for file, problem in ((tmp_path / "bad.yaml", "bad.yaml:2: servers: expected a list"), ("none", "no such file")):
        assert main(["cluster", str(file)]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("autopipe: error: ")
        assert problem in output.err
        assert output.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["cluster", "--nothing"]])
def test_a_wrong_command_line_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: autopipe" in capsys.readouterr().err


def test_it_runs_without_torch() -> None:
    script = (
        "import sys; from lightning_autopipe.cli import main; main(['cluster', 'slow_network']);"
        f"sys.stderr.write(str([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "[]")
