"""What each layer of a module costs."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_autopipe.core._checks import check_int, check_number, check_text, check_tuple
from lightning_autopipe.core.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer: the piece of the step between two neighbouring cuts.

    A parameter that several layers use (a tie) has one name, the first one that the module gives it, and is listed in
    each of them; it is *counted* in the first of them only, so that sums over all layers are the module's totals.
    """

    name: str
    """Where the layer begins: a module path, with the position inside it where that is cut, too."""
    forward_flops: float
    """Floating-point operations of one forward over the traced batch (a multiplication and an addition are two)."""
    param_bytes: int = 0
    """Bytes of the parameters counted in this layer."""
    trainable_bytes: int = 0
    """Bytes of those that require a gradient."""
    boundary_bytes: int = 0
    """Bytes of the traced batch's values that cross the cut after this layer; 0 after the last layer."""
    parameters: tuple[str, ...] = ()
    """Names of all parameters that the layer uses."""
    num_parameters: int = 0
    """Number of elements of the parameters counted in this layer."""
    num_trainable_parameters: int = 0
    """Number of elements of those that require a gradient."""

    def __post_init__(self) -> None:
        check_text("LayerProfile", "name", self.name, error=PlanError)
        owner = f"LayerProfile {self.name!r}"
        check_number(owner, "forward_flops", self.forward_flops, error=PlanError)
        for name in ("param_bytes", "trainable_bytes", "boundary_bytes", "num_parameters", "num_trainable_parameters"):
            check_int(owner, name, getattr(self, name), minimum=0, error=PlanError)
        check_tuple(owner, "parameters", self.parameters, str, error=PlanError)
        for part, whole in (("trainable_bytes", "param_bytes"), ("num_trainable_parameters", "num_parameters")):
            if getattr(self, part) > getattr(self, whole):
                raise PlanError(
                    f"{owner}: {part}={getattr(self, part)} is more than {whole}={getattr(self, whole)}, which counts "
                    "the trainable ones too"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """The layers of a module in the order in which its step runs them."""

    layers: tuple[LayerProfile, ...]

    def __post_init__(self) -> None:
        check_tuple("ModelProfile", "layers", self.layers, LayerProfile, error=PlanError)
        if not self.layers:
            raise PlanError("ModelProfile: layers is empty; a module has at least one layer")

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)
