"""Reads profiles from files: our own and those of public planners; imports no torch."""

from __future__ import annotations

from lightning_autopipe.profile_files.load import load_profile

__all__ = ["load_profile"]
