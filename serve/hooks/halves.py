"""What `serve hooks new` writes before a network, by its input, and behind it, by its output, with tests.

`alone` is a network that takes one sample a call, as a batch of 1: preprocess gives that batch, postprocess opens it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from serve.hooks.image_settings import ImageSettings
from serve.hooks.starting import Part

__all__ = ["images", "labels", "list_of", "number", "rows"]

LINE = 120 - len("LABELS = ")  # letters


def images(
    *, name: str, channels: int, height: int, width: int, dtype: str, last: bool, settings: ImageSettings,
    alone: bool = False,
) -> Part:  # fmt: skip
    """An image file in, float32 or uint8 [C, H, W] or (last) [H, W, C] out."""
    shape = f"{height}, {width}, {channels}" if last else f"{channels}, {height}, {width}"
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
    scale = "" if dtype == "uint8" else " / 255"
    constants = (
        ""
        if dtype == "uint8"
        else f"""\
# {"As the model's own processor" if settings.mean else "What the network was trained with"}, \
for each channel: values of 0 to 1, less MEAN, divided by STD.
MEAN = np.array({list(settings.mean) or [0.0] * channels}, np.float32)
STD = np.array({list(settings.std) or [1.0] * channels}, np.float32)
"""
    )
    resized = f"resize((WIDTH, HEIGHT), Image.Resampling.{settings.filter})"
    fitted, centre = f'fitted = decoded(picture).convert("{mode}").{resized}', ""
    if settings.shorter is not None:
        says = "pixels of an image's shorter side before its centre is cut out"
        constants = f"SHORTER = {settings.shorter}  # {says}\n{constants}"
        fitted = f'fitted = centre(decoded(picture).convert("{mode}"))'
        centre = f'''
def centre(whole: Image.Image) -> Image.Image:
    """What of an image is looked at: it is made smaller as a whole, and then cut, to whole pixels each time."""
    short = min(whole.size)
    wide, high = (int(SHORTER * side / short) for side in whole.size)
    if wide * high > MOST_PIXELS:
        raise ValueError("the image is too long for its width")
    left, upper = (wide - WIDTH) // 2, (high - HEIGHT) // 2
    fitted = whole.resize((wide, high), Image.Resampling.{settings.filter})
    return fitted.crop((left, upper, left + WIDTH, upper + HEIGHT))

'''
    turned = ("" if last else ".transpose(2, 0, 1)") + (".astype(np.float16)" if dtype == "float16" else "")
    result = f"pixels{turned}" if dtype == "uint8" else "(pixels - MEAN) / STD"
    if turned and dtype != "uint8":
        result = f"({result}){turned}"
    if alone:
        shape = f"1, {shape}"
        result = f"{result if turned or dtype == 'uint8' else f'({result})'}[None]"
    pixel = "uint8" if dtype == "uint8" else "float32"
    code = f'''
WIDTH, HEIGHT = {width}, {height}
MOST_PIXELS = 64_000_000  # of the images of one request: a small file may hold a picture that takes all time and memory
MOST_PARTS = 24  # scans of a JPEG, or texts and profiles of a PNG: each costs much, and takes a dozen bytes
{constants}

def admit({name}: list[bytes]) -> None:
    """Refuse the images of a request that would keep others waiting, before any of them is decoded."""
    pixels = 0
    for file in {name}:
        marks = (b"zTXt", b"iTXt", b"iCCP") if file.startswith(b"\\x89PNG") else (b"\\xff\\xda",)
        if (parts := sum(map(file.count, marks))) > MOST_PARTS:
            raise ValueError(f"the image has more than {{MOST_PARTS}} scans, texts and profiles")
        try:
            with Image.open(io.BytesIO(file), formats=("PNG", "JPEG")) as picture:  # its head alone
                pixels += picture.width * picture.height * max(1, parts // 3)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            pixels = MOST_PIXELS + 1
        except (OSError, SyntaxError) as err:
            raise ValueError("the image is neither a PNG nor a JPEG file, or it is damaged") from err
        if pixels > MOST_PIXELS:
            raise ValueError(f"the images of the request have more than {{MOST_PIXELS:,}} pixels")


def preprocess({name}: bytes) -> np.ndarray[Any, Any]:
    """A PNG or JPEG file that was admitted -> {dtype}[{shape}]."""
    try:
        with Image.open(io.BytesIO({name}), formats=("PNG", "JPEG")) as picture:
            {fitted}
    except (OSError, SyntaxError) as err:
        raise ValueError("the image is neither a PNG nor a JPEG file, or it is damaged") from err
    pixels = np.asarray(fitted, np.{pixel}).reshape(HEIGHT, WIDTH, {channels}){scale}
    return {result}


def decoded(picture: Image.Image) -> Image.Image:
    """Turned as the camera was held, and of 8 bits."""
    try:
        turned = ImageOps.exif_transpose(picture)
    except Exception:  # Pillow raises all kinds where the EXIF is damaged; the picture itself need not be
        turned = picture
    if turned.mode.startswith("I"):  # 16 bits, of which convert() would make white of all but the darkest
        turned = Image.fromarray((np.asarray(turned) >> 8).astype(np.uint8))
    return turned

{centre}
def example() -> dict[str, bytes]:
    """One sample, for warm-up, documentation and load tests."""
    file = io.BytesIO()
    Image.new("{mode}", (WIDTH, HEIGHT)).save(file, "PNG")
    return {{"{name}": file.getvalue()}}
'''
    test = f"""
def test_an_image_becomes_what_the_network_takes() -> None:
    array = hooks.preprocess(**hooks.example())
    assert array.dtype == np.{dtype}
    assert array.shape == ({shape})


@pytest.mark.parametrize("image", [b"", b"no image", hooks.example()["{name}"][:40]])
def test_what_is_no_image_is_the_clients_fault(image: bytes) -> None:
    with pytest.raises(ValueError, match="neither a PNG nor a JPEG"):
        hooks.preprocess(image)


def test_images_of_too_many_pixels_or_parts_are_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    image = hooks.example()["{name}"]
    monkeypatch.setattr(hooks, "MOST_PIXELS", hooks.WIDTH * hooks.HEIGHT)
    hooks.admit([image])
    with pytest.raises(ValueError, match="pixels"):
        hooks.admit([image, image])
    with pytest.raises(ValueError, match="scans, texts and profiles"):
        hooks.admit([image + b"zTXt" * 100])
"""
    imports = ("import io", "from typing import Any", "import numpy as np", "from PIL import Image, ImageOps")
    return Part(
        "An image file in", code, test, imports, ("import numpy as np", "import pytest"), ("numpy", "pillow>=11")
    )


def rows(*, name: str, length: int | str, dtype: str, alone: bool = False) -> Part:
    """A row of numbers in, the same standardised out."""
    one = "[None]" if alone else ""
    spec = f"{dtype}[{length}]"
    made = f"{dtype}[1, {length}]" if alone else spec
    numbers = "rows" if isinstance(length, str) else str(length)
    real = dtype.startswith("float")
    shape = (
        ""
        if isinstance(length, str)
        else f"\n    assert array.shape == ({'1, ' if alone else ''}{length}{'' if alone else ','})"
    )
    size = 4 if isinstance(length, str) else length
    check = f"    return {name}{one}\n"
    if real:
        check = f"""\
    standardised = (({name} - MEAN) / STD).astype({name}.dtype)
    if not np.isfinite(standardised).all():
        raise ValueError("{name} has a NaN or an infinity in it, or a number that is too large")
    return standardised{one}
"""
    constants = "# What the network was trained with: a number for all, or an array with one for each.\n"
    constants = f"{constants}MEAN = 0.0\nSTD = 1.0\n" if real else ""
    code = f'''
{constants}

def preprocess({name}: Annotated[np.ndarray[Any, Any], "{spec}"]) -> np.ndarray[Any, Any]:
    """{numbers if numbers != "rows" else "Any number of"} numbers -> {made}."""
{check}

def example() -> dict[str, list[int]]:
    """One sample, for warm-up, documentation and load tests."""
    return {{"{name}": [0] * {size}}}
'''
    test = f"""
def given(value: float) -> Any:
    return np.array([value] * {size}, np.{dtype})


def test_a_row_becomes_what_the_network_takes() -> None:
    array = hooks.preprocess(given(1))
    assert array.dtype == np.{dtype}{shape}
"""
    if real:
        test += """

@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_numbers_are_the_clients_fault(value: float) -> None:
    with pytest.raises(ValueError, match="a NaN or an infinity"):
        hooks.preprocess(given(value))
"""
    imports = ("from typing import Annotated, Any", "import numpy as np")
    test_imports = ("from typing import Any", "import numpy as np", "import pytest")[: 3 if real else 2]
    return Part("A row of numbers in", code, test, imports, test_imports, ("numpy",))


def labels(*, output: str, classes: int, probabilities: bool, names: Sequence[str] = (), alone: bool = False) -> Part:
    """Class scores in, or probabilities already, the best label and its probability out.

    Args:
        output: of the network.
        classes: that it knows; `names` are theirs, as far as somebody says.
        probabilities: whether it ends in a softmax of its own.
        alone: see the module.
    """
    says = "Scores before a softmax -> the likeliest label; of a network that ends in one, take them as they are."
    body = f"""\
    likely = np.exp({output} - {output}.max())
    return Answer(LABELS[int(likely.argmax())], float(likely.max() / likely.sum()))"""
    if probabilities:
        says = "The probability of each class, which the network gives itself -> the likeliest label."
        body = f"    return Answer(LABELS[int({output}.argmax())], float({output}.max()))"
    if alone:
        body = f"    {output} = {output}[0]  # the network's batch is of one\n{body}"
    held = list_of(names) if names else f"[str(number) for number in range({classes})]"
    code = f'''
# The network's classes, in its order.
LABELS = {held}


class Answer(NamedTuple):
    """The likeliest label, and how likely it is (0 to 1)."""

    label: str
    probability: float


def postprocess({output}: np.ndarray[Any, Any]) -> Answer:
    """{says}"""
{body}
'''
    test = f"""
def test_the_highest_score_is_the_answer() -> None:
    scores = np.zeros({classes}, np.float32)
    scores[1] = {0.75 if probabilities else 9}
    answer = hooks.postprocess(scores{"[None]" if alone else ""})
    assert answer.label == hooks.LABELS[1]
    assert 0 < answer.probability <= 1
"""
    imports = ("from typing import Any, NamedTuple", "import numpy as np")
    says = "the likeliest label and its probability out"
    return Part(says, code, test, imports, ("import numpy as np",), results=("label", "probability"))


def list_of(words: Sequence[str]) -> str:
    """A list in Python's source: JSON's escapes are Python's, and what can't be seen is escaped, too."""
    told = [
        "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in quoted)
        for quoted in (json.dumps(word, ensure_ascii=False) for word in words)
    ]
    line = f"[{', '.join(told)}]"
    return line if len(line) <= LINE else "\n".join(("[", *(f"    {each}," for each in told), "]"))


def number(*, output: str, shape: tuple[int, ...]) -> Part:
    """One number of each sample out, under a name."""
    code = f'''
class Answer(NamedTuple):
    """What the network says of the sample."""

    value: float


def postprocess({output}: np.ndarray[Any, Any]) -> Answer:
    """One number, in the unit that the network was trained with."""
    return Answer(float({output}.item()))
'''
    test = f"""
def test_the_number_is_the_answer() -> None:
    assert hooks.postprocess(np.full({shape}, 0.5, np.float32)).value == 0.5
"""
    imports = ("from typing import Any, NamedTuple", "import numpy as np")
    return Part("a number out", code, test, imports, ("import numpy as np",), results=("value",))
