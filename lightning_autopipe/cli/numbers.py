"""Numbers on the command line."""

from __future__ import annotations

from lightning_autopipe.core.errors import ConfigurationError


def whole_number(name: str, text: str, *, minimum: int = 1) -> int:
    """The number that an option gives.

    Raises:
        ConfigurationError: it is none, or below the minimum.
    """
    try:
        number = int(text)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise ConfigurationError(f"--{name} must be a whole number >= {minimum}, got {text!r}")
    return number
