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


@pytest.mark.parametrize("side", [2_829, 12_000, 60_000])
@pytest.mark.parametrize("told", ["ignore", "error"])
def test_an_image_of_too_many_pixels_is_not_decoded(side: int, told: str) -> None:
    hooks = import_module(read_source(HOOKS))
    with warnings.catch_warnings():
        warnings.simplefilter(told)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="more than 8,000,000 pixels"):
            hooks.admit([declaring(side)])


def test_the_images_of_a_request_are_counted_together() -> None:
    hooks = import_module(read_source(HOOKS))
    hooks.admit([declaring(500)] * 32)
    with pytest.raises(ValueError, match="images of the request have more than 8,000,000 pixels"):
        hooks.admit([declaring(500)] * 33)


def test_scans_texts_and_profiles_without_end_are_not_read() -> None:
    """A scan of a dozen bytes costs a pass over the picture, and a kilobyte of text a megabyte to unpack."""
    hooks = import_module(read_source(HOOKS))
    file = io.BytesIO()
    Image.new("L", (100, 100)).save(file, "JPEG", progressive=True)
    jpeg = file.getvalue()
    assert jpeg.count(b"\xff\xda") == 6
    hooks.admit([jpeg] * 400)
    with pytest.raises(ValueError, match="more than 8,000,000 pixels"):  # each three of them count as a picture
        hooks.admit([jpeg] * 401)
    scan = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    text = zlib.compress(bytes(1 << 20))
    png = declaring(8)
    chunk = len(text).to_bytes(4, "big") + (b"iCCPa\0\0" + text)
    for image in (jpeg[:-2] + scan * 100 + jpeg[-2:], png[:33] + chunk * 100 + png[33:]):
        with pytest.raises(ValueError, match="more than 24 scans, texts and profiles"):
            hooks.admit([image])


@pytest.mark.parametrize("image", [b"", b"no image", declaring(8)[:40]])
def test_what_is_no_image_is_the_clients_fault(image: bytes) -> None:
    with pytest.raises(ValueError, match="neither a PNG nor a JPEG"):
        import_module(read_source(HOOKS)).preprocess(image)
    with pytest.raises(ValueError, match="neither a PNG nor a JPEG"):
        import_module(read_source(HOOKS)).admit([image])


def test_an_image_is_what_the_network_takes() -> None:
    hooks = import_module(read_source(HOOKS))
    array = hooks.preprocess(**hooks.example())
    assert (array.dtype, array.shape, array.max() <= 1) == (np.float32, (1, 8, 8), True)
