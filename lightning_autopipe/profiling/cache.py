"""Measured profiles on disk, so that the next run of the same module need not measure."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_autopipe.core.errors import ConfigurationError, PlanError
from lightning_autopipe.core.profile import ModelProfile

CACHE_VARIABLE = "LIGHTNING_AUTOPIPE_CACHE"
"""Environment variable that names another folder; empty or ``off``: nothing is read or written."""

_FORMAT = 1  # another one where what is measured, or how, has changed


def cache_folder() -> Path | None:
    """Give the folder of measured profiles: ``profiles`` in the user's cache folder (XDG), or what the variable names.

    None where the variable says that there is none.
    """
    told = os.environ.get(CACHE_VARIABLE)
    if told is not None:
        return Path(told).expanduser() if told.strip() not in ("", "off") else None
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # no home
        return None
    return Path(home) / "lightning_autopipe" / "profiles"


class ProfileCache:
    """One file for each key, as `ModelProfile.save` writes it.

    Args:
        folder: where; None: nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def load(self, key: Mapping[str, Any], profile: ModelProfile) -> ModelProfile | None:
        """Give what was kept under a key; None where there is nothing, or, with a warning, nothing that can be used.

        Args:
            key: all that measurements depend on, as JSON.
            profile: of the traced layers, without measurements: the kept one must be of the same.
        """
        path = self._path(key)
        if path is None or not os.path.exists(path):  # Path.exists raises where the folder is not ours
            return None
        try:
            found = ModelProfile.load(path)
            if _unmeasured(found) != profile.layers:
                raise PlanError(f"the profile file {os.fspath(path)!r} is of other layers than the step's")
        except PlanError as error:
            warnings.warn(f"{error}. It is not used: the layers are measured again", stacklevel=2)
            return None
        return found

    def save(self, key: Mapping[str, Any], profile: ModelProfile) -> None:
        """Keep a profile; warns where that is not possible."""
        path = self._path(key)
        if path is None:
            return
        try:
            profile.save(path)
        except ConfigurationError as error:
            warnings.warn(
                f"the measured profile is not kept for the next run: {error}. Set {CACHE_VARIABLE} to a folder that "
                'can be written to, or to "off"',
                stacklevel=2,
            )

    def _path(self, key: Mapping[str, Any]) -> Path | None:
        if self._folder is None:
            return None
        text = json.dumps({"format": _FORMAT, **key}, sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _unmeasured(profile: ModelProfile) -> tuple[Any, ...]:
    return tuple(replace(layer, measured=None, optimizer_bytes=None) for layer in profile.layers)
