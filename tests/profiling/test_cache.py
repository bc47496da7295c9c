"""Where measured profiles are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_autopipe.core import LayerProfile, ModelProfile
from lightning_autopipe.profiling.cache import ProfileCache, cache_folder

PROFILE = ModelProfile(layers=(LayerProfile(name="a", forward_flops=1.0),))


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "/home/me/.cache/lightning_autopipe/profiles"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/lightning_autopipe/profiles"),
        ({"LIGHTNING_AUTOPIPE_CACHE": "/p", "XDG_CACHE_HOME": "/c"}, "/p"),
        ({"LIGHTNING_AUTOPIPE_CACHE": "~/p"}, "/home/me/p"),
        ({"LIGHTNING_AUTOPIPE_CACHE": "off"}, None),
        ({"LIGHTNING_AUTOPIPE_CACHE": ""}, None),
    ],
)
def test_the_folder_is_the_users_cache_or_what_the_variable_names(
    variables: dict[str, str], folder: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "LIGHTNING_AUTOPIPE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == (None if folder is None else Path(folder))


def test_each_key_has_a_file_of_its_own(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path / "new")
    assert cache.load({"a": 1}, PROFILE) is None
    cache.save({"a": 1, "b": 2}, PROFILE)
    assert cache.load({"b": 2, "a": 1}, PROFILE) == PROFILE
    assert cache.load({"a": 1, "b": 3}, PROFILE) is None


def test_without_a_folder_nothing_is_kept() -> None:
    cache = ProfileCache(None)
    cache.save({}, PROFILE)
    assert cache.load({}, PROFILE) is None
