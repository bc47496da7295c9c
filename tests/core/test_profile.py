"""Profiles as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_autopipe.core import (
    CrossingValue,
    DeviceTimes,
    LayerBytes,
    LayerMeasurement,
    LayerProfile,
    ModelProfile,
    PlanError,
    SizedBytes,
    TiedParameter,
)

_BYTES: dict[str, int] = {"activation_bytes": 8, "peak_bytes": 16, "sent_bytes": 4, "gradient_bytes": 4}


def a_profile() -> ModelProfile:
    measured = LayerMeasurement(forward_s=0.1, backward_s=0.2, backward_weight_s=0.05, received_kept_bytes=1, **_BYTES)
    layers = (
        LayerProfile(name="a", forward_flops=1.0, parameters=("w",), measured=measured, optimizer_bytes=8),
        LayerProfile(
            name="b",
            forward_flops=2.0,
            parameters=("w",),
            tied=(TiedParameter(name="w", num_bytes=4, is_trainable=True),),
            measured=measured,
        ),
    )
    times = DeviceTimes(
        device_model="gpu",
        microbatch_size=2,
        forward_s=(0.1, 0.1),
        backward_s=(0.2, 0.2),
        backward_weight_s=(0.1, 0.0),
        optimizer_s=(0.0, 0.1),
        dtype="bfloat16",
    )
    return ModelProfile(
        layers=layers,
        values=(CrossingValue(producer=0, last_reader=1, forward_bytes=4, gradient_bytes=4, fixed_forward_bytes=1),),
        times=(times,),
        microbatch_size=2,
        other_sizes=(SizedBytes(microbatch_size=1, layers=(LayerBytes(**_BYTES), LayerBytes(**_BYTES))),),
    )


def edited(place: str, value: Any) -> str:
    document = json.loads(a_profile().to_json())
    *outer, last = (int(key) if key.isdigit() else key for key in place.split("."))
    inner: Any = document
    for key in outer:
        inner = inner[key]
    if value is Ellipsis:
        del inner[last]
    else:
        inner[last] = value
    return json.dumps(document)


def test_a_profile_comes_back_from_its_file_equal(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    a_profile().save(path)
    assert ModelProfile.load(path) == a_profile()
    bare = ModelProfile(layers=(LayerProfile(name="a", forward_flops=0.5),))
    assert ModelProfile.from_json(bare.to_json()) == bare


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object with the profile's fields, got list"),
        ("{}", "schema_version is None, this version of lightning_autopipe reads 2; make the profile again"),
        (edited("schema_version", 3), "schema_version is 3"),
        (edited("surprise", 1), r"unknown: \['surprise'\]"),
        (edited("values", ...), r"missing: \['values'\]"),
        (edited("layers", []), "layers is empty"),
        (edited("layers.0.measured.forward_s", "x"), r"layers\[0\].measured: .*forward_s must be a finite number"),
        (edited("layers.1.optimizer_bytes", -1), r"layers\[1\]: .*optimizer_bytes must be an integer >= 0"),
        (edited("values.0.last_reader", 2), "is read by layer 2, but layers are 0 to 1"),
        (edited("values.0.producer", ...), r"values\[0\]: fields missing: \['producer'\]"),
        (edited("times.0.forward_s", 1.0), r"times\[0\].forward_s: expected a list"),
        (edited("times.0.forward_s", [1.0]), r"times\[0\]: .*backward_s has 2 values, forward_s has 1"),
        (edited("times.0.dtype", 3), r"times\[0\]: .*dtype must be a string, got 3"),
        (edited("other_sizes.0.layers", {}), r"other_sizes\[0\].layers: expected a list"),
        (edited("other_sizes.0.layers.1.peak_bytes", 0.5), r"other_sizes\[0\].layers\[1\]: .*peak_bytes must be"),
        (edited("other_sizes.0", []), r"other_sizes\[0\]: expected an object"),
        (edited("other_sizes.0.microbatch_size", 2), "each once"),
        (a_profile().to_json().replace("0.05", "NaN"), "NaN is not a number of JSON"),
    ],
)
def test_what_is_no_profile_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ModelProfile.from_json(text)


def test_loading_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"profile file .*missing\.json.*cannot be read"):
        ModelProfile.load(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text(a_profile().to_json()[:-9])
    with pytest.raises(PlanError, match=r"profile file .*broken\.json.*not valid: not JSON"):
        ModelProfile.load(tmp_path / "broken.json")


def test_a_profile_says_which_module_it_is_of_and_those_from_elsewhere_need_not() -> None:
    profile = ModelProfile(layers=(LayerProfile(name="a", forward_flops=1.0),), module_fingerprint="x")
    assert ModelProfile.from_json(profile.to_json()) == profile
    document = json.loads(profile.to_json())
    del document["module_fingerprint"]
    assert ModelProfile.from_json(json.dumps(document)).module_fingerprint == ""
    document["module_fingerprint"] = 3
    with pytest.raises(PlanError, match="module_fingerprint must be a string, got 3"):
        ModelProfile.from_json(json.dumps(document))
