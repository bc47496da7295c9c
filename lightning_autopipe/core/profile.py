"""What each layer of a module costs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_autopipe.core import _json
from lightning_autopipe.core._checks import check_number, check_tuple
from lightning_autopipe.core._profile_json import profile_fields_from_json, profile_to_json
from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.files import write_whole
from lightning_autopipe.core.profile_parts import (
    CrossingValue,
    DeviceTimes,
    LayerBytes,
    LayerMeasurement,
    LayerProfile,
    SizedBytes,
    TiedParameter,
)

__all__ = [
    "CrossingValue",
    "DeviceTimes",
    "LayerBytes",
    "LayerMeasurement",
    "LayerProfile",
    "ModelProfile",
    "SizedBytes",
    "TiedParameter",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """The layers of a module in the order in which its step runs them."""

    layers: tuple[LayerProfile, ...]
    values: tuple[CrossingValue, ...] = ()
    """What crosses cuts; empty: what was measured at each cut by itself."""
    times: tuple[DeviceTimes, ...] = ()
    """Seconds by device model and size; empty: what was measured of the layers, on one model at one size."""
    microbatch_size: float | None = None
    """Samples in the micro-batch that layers and values were measured with; None where unknown."""
    other_sizes: tuple[SizedBytes, ...] = ()
    """What the layers keep and hand on for micro-batches of other sizes; empty: bytes grow with the size."""
    module_fingerprint: str = ""
    """Identifies the module, so that a plan made from the profile can run; empty where nothing here has traced it."""

    def __post_init__(self) -> None:
        check_tuple("ModelProfile", "layers", self.layers, LayerProfile, error=PlanError)
        if not self.layers:
            raise PlanError("ModelProfile: layers is empty; a module has at least one layer")
        check_tuple("ModelProfile", "values", self.values, CrossingValue, error=PlanError)
        check_tuple("ModelProfile", "times", self.times, DeviceTimes, error=PlanError)
        for position, value in enumerate(self.values):
            if value.last_reader >= self.num_layers:
                raise PlanError(
                    f"ModelProfile: values[{position}] is read by layer {value.last_reader}, but layers are 0 to "
                    f"{self.num_layers - 1}"
                )
        for table in self.times:
            if len(table.forward_s) != self.num_layers:
                raise PlanError(
                    f"ModelProfile: times of {table.device_model!r} are of {len(table.forward_s)} layers, not of "
                    f"{self.num_layers}"
                )
        keys = [(table.device_model, table.dtype, table.microbatch_size) for table in self.times]
        if len(set(keys)) < len(keys):
            raise PlanError(f"ModelProfile: times has a device model, dtype and size twice: {keys}")
        if self.microbatch_size is not None:
            check_number("ModelProfile", "microbatch_size", self.microbatch_size, error=PlanError, exclusive=True)
        check_tuple("ModelProfile", "other_sizes", self.other_sizes, SizedBytes, error=PlanError)
        if not isinstance(self.module_fingerprint, str):
            raise PlanError(f"ModelProfile: module_fingerprint must be a string, got {self.module_fingerprint!r}")
        for sized in self.other_sizes:
            if len(sized.layers) != self.num_layers:
                raise PlanError(
                    f"ModelProfile: bytes for micro-batches of {sized.microbatch_size:g} are of {len(sized.layers)} "
                    f"layers, not of {self.num_layers}"
                )
        sizes = [self.microbatch_size, *(sized.microbatch_size for sized in self.other_sizes)]
        if len(set(sizes)) < len(sizes) or (self.other_sizes and self.microbatch_size is None):
            raise PlanError(
                f"ModelProfile: microbatch_size and those of other_sizes must be numbers, each once; got {sizes}"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def with_measurements(self, measurements: Sequence[LayerMeasurement]) -> ModelProfile:
        """The same layers with what was measured of each.

        Raises:
            PlanError: there is not one for each layer.
        """
        if len(measurements) != self.num_layers:
            raise PlanError(f"ModelProfile: {len(measurements)} measurements for {self.num_layers} layers")
        return replace(
            self,
            layers=tuple(
                replace(layer, measured=measured) for layer, measured in zip(self.layers, measurements, strict=True)
            ),
        )

    def to_json(self) -> str:
        """The profile as JSON text; `from_json` gives an equal profile."""
        return profile_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> ModelProfile:
        """The profile that `to_json` wrote.

        Raises:
            PlanError: the text is no JSON, a field is missing, unknown or of the wrong type, or contradicts another.
        """
        return cls(**profile_fields_from_json(text, cls))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile to a file, whole or not at all.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ModelProfile:
        """Reads a profile from a file.

        Raises:
            PlanError: the file cannot be read or holds no valid profile; the message names it.
        """
        return _json.read_file(path, cls.from_json, what="profile")
