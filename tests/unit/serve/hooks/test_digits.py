"""The demo's own hooks: what is no image of a sane size is the client's fault."""

from __future__ import annotations

import io
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from serve.hooks.module import import_module, read_source

HOOKS = Path(__file__).parents[4] / "examples" / "digits" / "hooks.py"


def declaring(side: int) -> bytes:
    """A PNG of one pixel that says it has more."""
    file = io.BytesIO()
    Image.new("L", (1, 1)).save(file, "PNG")
    whole = file.getvalue()
    size = b"IHDR" + side.to_bytes(4, "big") * 2 + whole[24:29]
    return whole[:12] + size + zlib.crc32(size).to_bytes(4, "big") + whole[33:]


@pytest.mark.parametrize("side", [8_001, 12_000, 60_000])
@pytest.mark.parametrize("told", ["ignore", "error"])
def test_an_image_of_too_many_pixels_is_not_decoded(side: int, told: str) -> None:
    hooks = import_module(read_source(HOOKS))
    with warnings.catch_warnings():
        warnings.simplefilter(told)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="more than 64,000,000 pixels"):
            hooks.preprocess(declaring(side))


@pytest.mark.parametrize("image", [b"", b"no image", declaring(8)[:40]])
def test_what_is_no_image_is_the_clients_fault(image: bytes) -> None:
    with pytest.raises(ValueError, match="neither a PNG nor a JPEG"):
        import_module(read_source(HOOKS)).preprocess(image)


def test_an_image_is_what_the_network_takes() -> None:
    hooks = import_module(read_source(HOOKS))
    array = hooks.preprocess(**hooks.example())
    assert (array.dtype, array.shape, array.max() <= 1) == (np.float32, (1, 8, 8), True)
