from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_autopipe.core.errors import CheckpointError
from lightning_autopipe.strategy.checkpoint_loading import load_any


@pytest.mark.parametrize(
    ("path", "given", "asked"),
    [("https://x/a.ckpt", None, True), ("https://x/a.ckpt", False, False), ("a.ckpt", None, None), ("a", True, True)],
)
def test_nothing_is_unpickled_without_limits_unless_the_user_says_so(path: str, given: Any, asked: Any) -> None:
    calls: list[Any] = []

    def load(weights_only: bool | None) -> Any:
        calls.append(weights_only)
        return {"state_dict": {}}

    load_any(load, path, given)
    assert calls == [asked]


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"is no complete sharded checkpoint: it has no file checkpoint\.pt"):
        load_any(lambda _: {}, tmp_path, None)
