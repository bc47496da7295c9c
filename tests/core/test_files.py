from __future__ import annotations

from pathlib import Path

import pytest

from lightning_autopipe.core import ConfigurationError
from lightning_autopipe.core.files import write_whole


def test_text_and_bytes_are_written_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_whole(tmp_path / "new" / "a.txt", "µ\n")
    write_whole(tmp_path / "new" / "a.txt", "ä\n")
    write_whole(tmp_path / "new" / "b", b"\x00\r\n")
    assert (tmp_path / "new" / "a.txt").read_bytes() == "ä\n".encode()
    assert (tmp_path / "new" / "b").read_bytes() == b"\x00\r\n"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a.txt", "b"]


@pytest.mark.parametrize("name", ["file/below", "folder"])
def test_what_cannot_be_written_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("as before")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigurationError, match=f"{name}: cannot be written: "):
        write_whole(tmp_path / name, "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "as before"
