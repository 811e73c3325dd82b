"""Before and after the digits network when it is served: an image file in, a label and its probability out."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

REQUIREMENTS = ["pillow"]
MOST_PIXELS = 64_000_000  # of an image: a small file may hold a picture that takes up all memory


class Prediction(NamedTuple):
    """The digit, and how sure the network is of it (0 to 1)."""

    label: str
    probability: np.float32


def preprocess(image: bytes) -> np.ndarray[Any, Any]:
    """A PNG or JPEG file, light strokes on dark -> float32[1, 8, 8], 0 to 1."""
    try:
        with Image.open(io.BytesIO(image), formats=("PNG", "JPEG")) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                raise ValueError(f"the image has more than {MOST_PIXELS:,} pixels")
            small = picture.convert("L")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as err:
        raise ValueError(f"the image has more than {MOST_PIXELS:,} pixels") from err
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
