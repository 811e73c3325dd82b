"""Before and after the digits network when it is served: an image file in, a label and its probability out."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

REQUIREMENTS = ["pillow"]
MOST_PIXELS = 8_000_000  # of the images of one request: a small file may hold a picture that takes all time and memory
MOST_PARTS = 24  # scans of a JPEG, or texts and profiles of a PNG: each costs much, and takes a dozen bytes


class Prediction(NamedTuple):
    """The digit, and how sure the network is of it (0 to 1)."""

    label: str
    probability: np.float32


def admit(image: list[bytes]) -> None:
    """Refuse the images of a request that would keep others waiting, before any of them is decoded."""
    pixels = 0
    for file in image:
        marks = (b"zTXt", b"iTXt", b"iCCP") if file.startswith(b"\x89PNG") else (b"\xff\xda",)
        if (parts := sum(map(file.count, marks))) > MOST_PARTS:
            raise ValueError(f"the image has more than {MOST_PARTS} scans, texts and profiles")
        try:
            with Image.open(io.BytesIO(file), formats=("PNG", "JPEG")) as picture:  # its head alone
                pixels += picture.width * picture.height * max(1, parts // 3)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            pixels = MOST_PIXELS + 1
        except (OSError, SyntaxError) as err:
            raise ValueError("the image is neither a PNG nor a JPEG file, or it is damaged") from err
        if pixels > MOST_PIXELS:
            raise ValueError(f"the images of the request have more than {MOST_PIXELS:,} pixels")


def preprocess(image: bytes) -> np.ndarray[Any, Any]:
    """A PNG or JPEG file that was admitted, light strokes on dark -> float32[1, 8, 8], 0 to 1."""
    try:
        with Image.open(io.BytesIO(image), formats=("PNG", "JPEG")) as picture:
            small = picture.convert("L")
    except (OSError, SyntaxError) as err:
        raise ValueError("the image is neither a PNG nor a JPEG file, or it is damaged") from err
    if small.size != (8, 8):
        small = small.resize((8, 8), Image.Resampling.BOX)
    return np.asarray(small, np.float32)[None] / np.float32(255)


def postprocess(logits: np.ndarray[Any, Any]) -> Prediction:
    """float32[10] -> the most likely digit."""
    likely = np.exp(logits - logits.max())
    return Prediction(str(int(likely.argmax())), np.float32(likely.max() / likely.sum()))


def example() -> dict[str, bytes]:
    """A seven, for warm-up, documentation and load tests."""
    seven = np.zeros((8, 8), np.uint8)
    seven[1, 1:7] = seven[2, 5:7] = seven[3, 4:6] = seven[4, 3:5] = seven[5, 3:5] = seven[6, 2:4] = 230
    file = io.BytesIO()
    Image.fromarray(seven).save(file, "PNG")
    return {"image": file.getvalue()}
