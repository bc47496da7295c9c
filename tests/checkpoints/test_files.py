from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_autopipe.checkpoints.files import write_file
from lightning_autopipe.checkpoints.placing import partial_path, put_in_place, replacing
from lightning_autopipe.checkpoints.spool import Spool
from lightning_autopipe.core.errors import CheckpointError

LIMIT_BYTES = 20_000


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file of this process may become larger, which a write is told like that a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_is_new_or_as_before(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.ckpt"
    write_file({"a": torch.ones(3), "n": 1}, path)
    write_file({"a": torch.zeros(3), "n": 2}, path)
    assert torch.load(path, weights_only=True)["n"] == 2
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()
    with pytest.raises(RuntimeError, match="stop"):
        write_half(path)
    assert torch.load(path, weights_only=True)["n"] == 2
    assert names(path.parent) == ["a.ckpt"]


def write_half(path: Path) -> None:
    with replacing(path) as partial:
        partial.write_text("half")
        raise RuntimeError("stop")


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("num_values", [2_000_000, LIMIT_BYTES // 8])
def test_a_full_disk_is_said_and_leaves_the_last_file(tmp_path: Path, full_disk: None, num_values: int) -> None:
    path = tmp_path / "a.ckpt"
    write_file({"n": 1}, path)
    with pytest.raises(
        CheckpointError, match=r"a\.ckpt' cannot be written, and .* untouched: File too large\. Make room"
    ):
        write_file({"a": torch.zeros(num_values, dtype=torch.float64), "b": [torch.ones(9)] * 3}, path)
    assert torch.load(path, weights_only=True) == {"n": 1}
    assert names(tmp_path) == ["a.ckpt"]
    spool = Spool([tmp_path])
    with pytest.raises(CheckpointError, match=r"temporary file.*File too large"):
        spool.add(torch.zeros(num_values, dtype=torch.float64))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Make room, or set another folder"):
        write_file({}, tmp_path / "file" / "a.ckpt")


@pytest.mark.parametrize("can_exchange", [True, False])
def test_folders_files_and_links_take_each_others_place(
    tmp_path: Path, can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    target = tmp_path / "last.ckpt"
    best = tmp_path / "best.ckpt"
    best.mkdir()

    def placed(kind: str) -> None:
        new = partial_path(target)
        if kind == "folder":
            new.mkdir()
            (new / "x").write_text("new")
        else:
            new.write_text("new")
        put_in_place(new, target)

    for kind in ("folder", "folder", "file", "folder"):
        placed(kind)
        assert target.is_dir() == (kind == "folder")
    placed("file")
    target.unlink()
    for kind in ("folder", "file"):
        if target.exists():
            placed("file")
            target.unlink()
        target.symlink_to(best.name)
        placed(kind)
        assert not target.is_symlink()
    assert names(tmp_path) == ["best.ckpt", "last.ckpt"]


def test_an_error_of_another_kind_is_not_taken_for_a_name_that_is_in_use(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        put_in_place(tmp_path / "nothing", tmp_path / "target")


def test_a_spool_gives_what_it_was_given(tmp_path: Path) -> None:
    tensors: list[Any] = [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(3),
        torch.zeros(0, 4),
        torch.ones(5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
    ]
    spool = Spool([tmp_path / "not there", tmp_path])
    assert spool.folder == tmp_path
    for tensor in tensors:
        spool.add(tensor)
    views = spool.tensors()
    for tensor, view in zip(tensors, views, strict=True):
        assert view.dtype is tensor.dtype
        assert torch.equal(view, tensor)
    views[0].add_(1)
    views[3].mul_(2)
    assert torch.equal(views[0], tensors[0] + 1)
    assert names(tmp_path) == []
    assert [tuple(view.shape) for view in empty_spool()] == [(0,)]


def empty_spool() -> list[torch.Tensor]:
    spool = Spool()
    spool.add(torch.zeros(0))
    return spool.tensors()
