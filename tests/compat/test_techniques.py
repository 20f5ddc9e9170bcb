"""Each technique on the installed versions: it does something, and the gradients are those of the untiled model."""

from __future__ import annotations

import pytest
import torch

from seqtile.cli import doctor_checks
from seqtile.devices import package_version

TECHNIQUES = [
    pytest.param(name, marks=[pytest.mark.slow] if name == "compiled block" else [])  # the compiler
    for name in doctor_checks.FEATURES
]


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_has_its_effect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    feature = doctor_checks.FEATURES[name]
    if package_version(feature.library) is None:
        pytest.skip(f"{feature.library} is not installed")
    monkeypatch.setattr(doctor_checks, "FEATURES", {name: feature})
    results = [*doctor_checks.run_features(torch.device("cpu"))]
    if not results:
        pytest.skip(f"{name} needs a newer {feature.library} than {package_version(feature.library)}")
    assert [result.problem for result in results] == [""]
