"""The command ``autopipe``; starting it imports neither torch nor Lightning."""

from __future__ import annotations

from lightning_autopipe.cli.main import main

__all__ = ["main"]
