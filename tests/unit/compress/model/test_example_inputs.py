"""Random inputs for a signature that may be anybody's are bounded all together, before any is made."""

from __future__ import annotations

import pytest

from compress.errors import SignatureError
from compress.model.inputs import LARGEST_BYTES, example_inputs
from compress.signature import TensorSpec


def specs(count: int, size: int, dtype: str = "float32") -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"x{number}", dtype, ("batch", size)) for number in range(count))


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.model.inputs.memory_left", lambda: 1 << 50)


@pytest.mark.usefixtures("plenty")
@pytest.mark.parametrize("count", [1, 3, 1000])
def test_all_together_are_bounded(count: int) -> None:
    size = LARGEST_BYTES // 4 // count + 1
    with pytest.raises(SignatureError, match="can't make an input") as caught:
        example_inputs(specs(count, size), {"batch": 1})
    assert "4.3 GB" in caught.value.why


def test_what_the_memory_that_is_left_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.model.inputs.memory_left", lambda: 1000)
    for count, size in ((1, 300), (2, 100), (1, 90)):  # the last is drawn in 8 bytes each, and kept in 4
        with pytest.raises(SignatureError, match="can't make an input") as caught:
            example_inputs(specs(count, size), {"batch": 1})
        assert "of memory that are left" in caught.value.why
    assert example_inputs(specs(2, 40), {"batch": 1})["x1"].shape == (1, 40)


def test_no_text_is_made_up() -> None:
    with pytest.raises(SignatureError, match="can't make an input") as caught:
        example_inputs(specs(1, 4, "string"), {"batch": 1})
    assert "text" in caught.value.why
