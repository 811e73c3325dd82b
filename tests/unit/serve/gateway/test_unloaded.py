"""What is said of a candidate that is not loaded: the line to type, or that there is none of that name."""

from __future__ import annotations

import pytest

from serve.gateway.release.unloaded import how_to_load

MANY = [f"model{number}" for number in range(9)]


@pytest.mark.parametrize(
    ("model", "known", "told"),
    [
        ("digits_next", [], ""),
        ("digits_next", ["digits", "digits_next"], ": `serve models load digits_next`, where `serve up` was started"),
        ("digits_nxet", ["digits", "digits_next"], ": Triton has no model of that name, is it digits_next?"),
        ("other", ["digits"], ": Triton has no model of that name, it has digits"),
        ("other", MANY, "it has model0, model1, model2, model3, model4, …"),
    ],
)
def test_it_is_told_how_the_candidate_gets_loaded(model: str, known: list[str], told: str) -> None:
    found = how_to_load(model, known)
    assert told in found
    assert bool(told) == bool(found)
