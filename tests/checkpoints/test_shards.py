from __future__ import annotations

import io
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from lightning_autopipe.checkpoints import consolidation
from lightning_autopipe.checkpoints.mapped_shards import MappedFiles
from lightning_autopipe.checkpoints.placing import partial_path
from lightning_autopipe.checkpoints.shard_reader import ShardFolder, _MetadataUnpickler
from lightning_autopipe.checkpoints.shard_writer import ShardWriter
from lightning_autopipe.checkpoints.structure import names_in, stands_for, take_tensors
from lightning_autopipe.cli import main
from lightning_autopipe.core.errors import CheckpointError

WEIGHT = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
STATE = {0: {"step": torch.tensor(2.0), "exp_avg": torch.ones(2, 3), "nested": (torch.ones(1), [3, None])}}


def write_folder(target: Path, *, without: str = "") -> None:
    tensors: dict[str, Any] = {"state_dict.w": WEIGHT}
    states = take_tensors(STATE, "optimizer_states.0.state", tensors)
    rest = {
        "state_dict": {"w": stands_for("state_dict.w"), "tied": stands_for("state_dict.w")},
        "optimizer_states": [{"state": states, "param_groups": [{"params": [0], "lr": 0.1}]}],
        "epoch": 3,
        "callbacks": {"x": {"best": torch.tensor(1.5)}},
    }
    content = io.BytesIO()
    torch.save(rest, content)
    names = names_in([rest["state_dict"], rest["optimizer_states"]])
    tensors.pop(without, None)
    partial_path(target).mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(partial_path(target), target, rest=content.getvalue(), names=names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors, storage_writer=writer, no_dist=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards") / "a.ckpt"
    write_folder(path)
    return path


def assert_whole(checkpoint: dict[str, Any]) -> None:
    assert torch.equal(checkpoint["state_dict"]["w"], WEIGHT)
    assert checkpoint["state_dict"]["tied"] is checkpoint["state_dict"]["w"] or torch.equal(
        checkpoint["state_dict"]["tied"], WEIGHT
    )
    (optimizer,) = checkpoint["optimizer_states"]
    assert optimizer["param_groups"] == [{"params": [0], "lr": 0.1}]
    assert torch.equal(optimizer["state"][0]["exp_avg"], torch.ones(2, 3))
    assert optimizer["state"][0]["nested"] == (torch.ones(1), [3, None])
    assert (checkpoint["epoch"], checkpoint["callbacks"]["x"]["best"]) == (3, 1.5)


def test_a_folder_is_read_and_made_a_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_whole(ShardFolder(folder).checkpoint())
    monkeypatch.setattr(consolidation, "_BYTES_AT_ONCE", 8)
    file = tmp_path / "plain.ckpt"
    assert main(["consolidate", str(folder), str(file)]) == 0
    assert_whole(torch.load(file, weights_only=True))
    assert [entry.name for entry in tmp_path.iterdir()] == ["plain.ckpt"]
    assert main(["consolidate", str(folder), str(file)]) == 2
    assert "is there already; name a new file" in capsys.readouterr().err
    assert main(["consolidate", str(file), str(tmp_path / "b")]) == 2
    assert "is not a folder" in capsys.readouterr().err


TENSORS = {
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "with gaps": torch.arange(24.0).view(4, 6)[:, 1:3],
    "channels last": torch.arange(32.0).view(1, 2, 4, 4).to(memory_format=torch.channels_last),
    "a number": torch.tensor(7, dtype=torch.int64),
    "nothing": torch.empty(0, 4, dtype=torch.float64),
    "halves": torch.arange(5, dtype=torch.bfloat16),
    "truths": torch.tensor([True, False]),
    "complex": torch.complex(torch.ones(3), torch.zeros(3)),
}


@pytest.fixture
def odd_folder(tmp_path: Path) -> Path:
    target = tmp_path / "odd.ckpt"
    content = io.BytesIO()
    torch.save({"state_dict": {name: stands_for(name) for name in TENSORS}}, content)
    partial_path(target).mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = ShardWriter(partial_path(target), target, rest=content.getvalue(), names=TENSORS)
        dcp.save(TENSORS, storage_writer=writer, no_dist=True)
    return target


def test_tensors_stay_in_the_files_until_they_are_used(odd_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardFolder, "_read", None)
    before = {path: path.read_bytes() for path in odd_folder.iterdir()}
    loaded = ShardFolder(odd_folder).checkpoint()["state_dict"]
    for name, tensor in TENSORS.items():
        assert torch.equal(loaded[name], tensor), name
        packed = tensor.clone()  # as it is stored
        assert (loaded[name].stride(), loaded[name].dtype) == (packed.stride(), packed.dtype), name
        loaded[name].zero_()
    assert {path: path.read_bytes() for path in odd_folder.iterdir()} == before
    assert str(odd_folder) in Path("/proc/self/maps").read_text()
    del loaded
    assert str(odd_folder) not in Path("/proc/self/maps").read_text()


def test_reading_keeps_nothing_in_the_process(odd_folder: Path) -> None:
    before = FakeTensorMode.cache_info().size
    ShardFolder(odd_folder).checkpoint()
    assert FakeTensorMode.cache_info().size == before


def test_what_cannot_be_mapped_is_read(odd_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MappedFiles, "tensor", lambda self, place: None)
    loaded = ShardFolder(odd_folder).checkpoint()["state_dict"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def remove(name: str, path: Path) -> None:
    (path / name).unlink()


def cut(name: str, path: Path) -> None:
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: len(content) // 2])


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/autopipe-must-not-be-made",)


def with_a_command(path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))


class Attribute:
    def __init__(self, of: Any, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> Any:
        return getattr, (self.of, self.name)


def with_an_attribute(path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Attribute(Metadata, "__init__")))


def test_members_of_enums_are_read_as_older_pythons_write_them() -> None:
    """Python 3.11.0 to 3.11.3 pickle them by ``getattr``."""
    written = pickle.dumps(Attribute(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST"))
    assert _MetadataUnpickler(io.BytesIO(written)).load() is _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST


def with_a_path(path: Path) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../elsewhere"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def without_a_tensor(path: Path) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    del metadata.state_dict_metadata["state_dict.w"]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def without_a_place(path: Path) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for index in [index for index in metadata.storage_data if index.fqn == "state_dict.w"]:
        del metadata.storage_data[index]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def of_weights(path: Path) -> None:
    torch.save({"w": 1}, path / "checkpoint.pt")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: remove(".metadata", path), "it has no file .metadata"),
        (lambda path: remove("checkpoint.pt", path), "it has no file checkpoint.pt"),
        (lambda path: remove("__0_0.distcp", path), "__0_0.distcp"),
        (lambda path: cut("checkpoint.pt", path), "checkpoint.pt cannot be read"),
        (lambda path: cut(".metadata", path), ".metadata cannot be read"),
        (lambda path: cut("__0_0.distcp", path), "is no complete sharded checkpoint"),
        (with_a_command, "it holds (posix|nt).mkdir, which metadata of a checkpoint never does"),
        (with_an_attribute, "it asks for '__init__' of"),
        (with_a_path, "it names a file elsewhere"),
        (without_a_tensor, "the values of state_dict.w .1 in all. are missing"),
        (without_a_place, "is no complete sharded checkpoint"),
        (of_weights, "holds no checkpoint of a LightningModule"),
    ],
)
def test_damaged_folders(folder: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    damage(copy)
    with pytest.raises(CheckpointError, match=message):
        consolidation.consolidate(copy, tmp_path / "file")
    assert not (tmp_path / "file").exists()
    if damage is not of_weights:
        with pytest.raises(CheckpointError, match=message):
            ShardFolder(copy).checkpoint()
    assert not Path("/tmp/autopipe-must-not-be-made").exists()


def test_a_folder_without_all_values_is_not_completed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"no process has given the values of state_dict.w"):
        write_folder(tmp_path / "a.ckpt", without="state_dict.w")
    assert not (tmp_path / "a.ckpt").exists()
