"""What a profile is made of: layers, values that cross between them, times."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_autopipe.core._checks import check_int, check_number, check_text, check_tuple
from lightning_autopipe.core.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """What a layer keeps and hands on for one micro-batch."""

    activation_bytes: int
    """What autograd keeps from its forward for its backward; without parameters, buffers and the batch."""
    received_kept_bytes: int = 0
    """The part of `activation_bytes` that came from the layer before."""
    sent_kept_bytes: int = 0
    """The part of `activation_bytes` that goes on to the next layer."""
    peak_bytes: int
    """The most that forward and backward have alive at a time, besides parameters, their gradients and what came in."""
    sent_bytes: int
    """Bytes of the values that cross the cut after the layer; 0 after the last one."""
    gradient_bytes: int
    """Bytes of the gradients that come back across it."""

    def __post_init__(self) -> None:
        for field in fields(LayerBytes):
            check_int(type(self).__name__, field.name, getattr(self, field.name), minimum=0, error=PlanError)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMeasurement(LayerBytes):
    """What a layer takes for one micro-batch, measured by running it alone."""

    forward_s: float
    """Seconds of its forward."""
    backward_s: float
    """Seconds of its backward; 0 where nothing in it requires a gradient."""
    backward_weight_s: float = 0.0
    """The part of `backward_s` for the gradients of parameters; 0 where it has none, or was not measured apart."""
    backward_split_s: float = 0.0
    """What a backward in two parts takes more than a whole one."""

    def __post_init__(self) -> None:
        LayerBytes.__post_init__(self)  # slots make a new class, which super() does not know
        for name in ("forward_s", "backward_s", "backward_weight_s", "backward_split_s"):
            check_number("LayerMeasurement", name, getattr(self, name), error=PlanError)
        if self.backward_weight_s > self.backward_s:
            parts = f"backward_weight_s={self.backward_weight_s} is more than backward_s={self.backward_s}"
            raise PlanError(f"LayerMeasurement: {parts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedBytes:
    """What each layer keeps and hands on for one micro-batch of one size."""

    microbatch_size: float
    """Samples in the micro-batch."""
    layers: tuple[LayerBytes, ...]

    def __post_init__(self) -> None:
        check_number("SizedBytes", "microbatch_size", self.microbatch_size, error=PlanError, exclusive=True)
        check_tuple("SizedBytes", "layers", self.layers, LayerBytes, error=PlanError)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameter:
    """A parameter that a layer uses and an earlier layer counts."""

    name: str
    num_bytes: int
    is_trainable: bool

    def __post_init__(self) -> None:
        check_text("TiedParameter", "name", self.name, error=PlanError)
        check_int("TiedParameter", "num_bytes", self.num_bytes, minimum=0, error=PlanError)
        if not isinstance(self.is_trainable, bool):
            raise PlanError(f"TiedParameter: is_trainable must be true or false, got {self.is_trainable!r}")


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
    tied: tuple[TiedParameter, ...] = ()
    """Parameters that the layer uses and an earlier layer counts."""
    optimizer_bytes: int | None = None
    """Bytes that the optimizer remembers of the parameters counted in this layer; None where it was not tried."""
    measured: LayerMeasurement | None = None
    """Seconds and bytes for one micro-batch; None where nothing was measured."""

    def __post_init__(self) -> None:
        check_text("LayerProfile", "name", self.name, error=PlanError)
        owner = f"LayerProfile {self.name!r}"
        check_number(owner, "forward_flops", self.forward_flops, error=PlanError)
        for name in ("param_bytes", "trainable_bytes", "boundary_bytes", "num_parameters", "num_trainable_parameters"):
            check_int(owner, name, getattr(self, name), minimum=0, error=PlanError)
        if self.optimizer_bytes is not None:
            check_int(owner, "optimizer_bytes", self.optimizer_bytes, minimum=0, error=PlanError)
        check_tuple(owner, "parameters", self.parameters, str, error=PlanError)
        check_tuple(owner, "tied", self.tied, TiedParameter, error=PlanError)
        if self.measured is not None and not isinstance(self.measured, LayerMeasurement):
            raise PlanError(f"{owner}: measured must be a LayerMeasurement or None, got {self.measured!r}")
        for part, whole in (("trainable_bytes", "param_bytes"), ("num_trainable_parameters", "num_parameters")):
            if getattr(self, part) > getattr(self, whole):
                raise PlanError(
                    f"{owner}: {part}={getattr(self, part)} is more than {whole}={getattr(self, whole)}, which counts "
                    "the trainable ones too"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossingValue:
    """A value that one layer makes and later ones use: it crosses every cut in between.

    A cut after layer i lies between its producer and its last reader where ``producer <= i < last_reader``.
    """

    producer: int
    """Index of the layer that makes it."""
    last_reader: int
    """Index of the last layer that uses it."""
    forward_bytes: int
    """Bytes of the value for one micro-batch."""
    gradient_bytes: int
    """Bytes of its gradient; 0 where it has none."""
    fixed_forward_bytes: int = 0
    """The part of `forward_bytes` that does not grow with the micro-batch."""
    fixed_gradient_bytes: int = 0
    """The part of `gradient_bytes` alike."""

    def __post_init__(self) -> None:
        for name in ("producer", "forward_bytes", "gradient_bytes", "fixed_forward_bytes", "fixed_gradient_bytes"):
            check_int("CrossingValue", name, getattr(self, name), minimum=0, error=PlanError)
        for name in ("forward_bytes", "gradient_bytes"):
            part, whole = getattr(self, f"fixed_{name}"), getattr(self, name)
            if part > whole:
                raise PlanError(f"CrossingValue: fixed_{name}={part} is more than {name}={whole}")
        check_int("CrossingValue", "last_reader", self.last_reader, minimum=self.producer + 1, error=PlanError)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """What each layer takes on one device model, for one micro-batch of one size."""

    device_model: str
    microbatch_size: float
    """Samples in the micro-batch."""
    forward_s: tuple[float, ...]
    """Seconds of each layer's forward."""
    backward_s: tuple[float, ...]
    """Seconds of each layer's whole backward."""
    backward_weight_s: tuple[float, ...] = ()
    """The part of `backward_s` for the gradients of parameters; empty where it was not measured apart."""
    backward_split_s: tuple[float, ...] = ()
    """What a backward in two parts takes more than a whole one; empty where it was not measured."""
    optimizer_s: tuple[float, ...] = ()
    """Seconds of each layer's optimizer step; empty where it was not measured."""
    dtype: str = ""
    """In which numbers it computed; empty where unknown."""
    overhead_s: float = 0.0
    """What each forward and each backward of a stage takes besides its layers: the runtime's own work."""

    def __post_init__(self) -> None:
        check_text("DeviceTimes", "device_model", self.device_model, error=PlanError)
        owner = f"DeviceTimes {self.device_model!r}"
        if not isinstance(self.dtype, str):
            raise PlanError(f"{owner}: dtype must be a string, got {self.dtype!r}")
        check_number(owner, "microbatch_size", self.microbatch_size, error=PlanError, exclusive=True)
        check_number(owner, "overhead_s", self.overhead_s, error=PlanError)
        for name in ("forward_s", "backward_s", "backward_weight_s", "backward_split_s", "optimizer_s"):
            times = getattr(self, name)
            if not isinstance(times, tuple):
                raise PlanError(f"{owner}: {name} must be a tuple, got {type(times).__name__}")
            for index, seconds in enumerate(times):
                check_number(owner, f"{name}[{index}]", seconds, error=PlanError)
            if len(times) != len(self.forward_s) and (times or name == "backward_s"):
                raise PlanError(f"{owner}: {name} has {len(times)} values, forward_s has {len(self.forward_s)}")
        for index, (part, whole) in enumerate(zip(self.backward_weight_s, self.backward_s, strict=False)):
            if part > whole:
                raise PlanError(f"{owner}: backward_weight_s[{index}]={part} is more than backward_s[{index}]={whole}")
