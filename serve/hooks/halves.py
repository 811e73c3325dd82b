"""What `serve hooks new` writes before a network, by its input, and behind it, by its output, with tests."""

from __future__ import annotations

from serve.hooks.starting import Part

__all__ = ["images", "labels", "number", "rows", "texts", "token_ids"]


def images(*, name: str, channels: int, height: int, width: int, dtype: str, last: bool) -> Part:
    """An image file in, float32 or uint8 [C, H, W] or (last) [H, W, C] out."""
    shape = f"{height}, {width}, {channels}" if last else f"{channels}, {height}, {width}"
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
    scale = "" if dtype == "uint8" else " / 255"
    constants = (
        ""
        if dtype == "uint8"
        else f"""\
# What the network was trained with, for each channel: values of 0 to 1, less MEAN, divided by STD.
MEAN = np.array({[0.0] * channels}, np.float32)
STD = np.array({[1.0] * channels}, np.float32)
"""
    )
    turned = ("" if last else ".transpose(2, 0, 1)") + (".astype(np.float16)" if dtype == "float16" else "")
    result = f"pixels{turned}" if dtype == "uint8" else "(pixels - MEAN) / STD"
    if turned and dtype != "uint8":
        result = f"({result}){turned}"
    pixel = "uint8" if dtype == "uint8" else "float32"
    code = f'''
WIDTH, HEIGHT = {width}, {height}
MOST_PIXELS = 64_000_000  # of an image: a small file may hold a picture that takes up all memory
{constants}

def preprocess({name}: bytes) -> np.ndarray[Any, Any]:
    """A PNG or JPEG file -> {dtype}[{shape}]."""
    try:
        with Image.open(io.BytesIO({name}), formats=("PNG", "JPEG")) as picture:
            fitted = decoded(picture).convert("{mode}").resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as err:
        raise ValueError(f"the image has more than {{MOST_PIXELS:,}} pixels") from err
    except (OSError, SyntaxError) as err:
        raise ValueError("the image is neither a PNG nor a JPEG file, or it is damaged") from err
    pixels = np.asarray(fitted, np.{pixel}).reshape(HEIGHT, WIDTH, {channels}){scale}
    return {result}


def decoded(picture: Image.Image) -> Image.Image:
    """Turned as the camera was held, and of 8 bits."""
    if picture.width * picture.height > MOST_PIXELS:
        raise ValueError(f"the image has more than {{MOST_PIXELS:,}} pixels")
    try:
        turned = ImageOps.exif_transpose(picture)
    except Exception:  # Pillow raises all kinds where the EXIF is damaged; the picture itself need not be
        turned = picture
    if turned.mode.startswith("I"):  # 16 bits, of which convert() would make white of all but the darkest
        turned = Image.fromarray((np.asarray(turned) >> 8).astype(np.uint8))
    return turned


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


def test_an_image_of_too_many_pixels_is_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "MOST_PIXELS", 0)
    with pytest.raises(ValueError, match="more than 0 pixels"):
        hooks.preprocess(**hooks.example())
"""
    imports = ("import io", "from typing import Any", "import numpy as np", "from PIL import Image, ImageOps")
    return Part(
        "An image file in", code, test, imports, ("import numpy as np", "import pytest"), ("numpy", "pillow>=11")
    )


def rows(*, name: str, length: int | str, dtype: str) -> Part:
    """A row of numbers in, the same standardised out."""
    spec = f"{dtype}[{length}]"
    numbers = "rows" if isinstance(length, str) else str(length)
    real = dtype.startswith("float")
    shape = "" if isinstance(length, str) else f"\n    assert array.shape == ({length},)"
    size = 4 if isinstance(length, str) else length
    check = f"    return {name}\n"
    if real:
        check = f"""\
    standardised = (({name} - MEAN) / STD).astype({name}.dtype)
    if not np.isfinite(standardised).all():
        raise ValueError("{name} has a NaN or an infinity in it, or a number that is too large")
    return standardised
"""
    constants = "# What the network was trained with: a number for all, or an array with one for each.\n"
    constants = f"{constants}MEAN = 0.0\nSTD = 1.0\n" if real else ""
    code = f'''
{constants}

def preprocess({name}: Annotated[np.ndarray[Any, Any], "{spec}"]) -> np.ndarray[Any, Any]:
    """{numbers if numbers != "rows" else "Any number of"} numbers -> {spec}."""
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


def _text_example(name: str) -> str:
    return f'''
def example() -> dict[str, str]:
    """One sample, for warm-up, documentation and load tests."""
    return {{"{name}": "The quick brown fox jumps over the lazy dog."}}
'''.lstrip()


def _no_text_test(name: str) -> str:
    return f"""
@pytest.mark.parametrize("text", ["", " \\n"])
def test_no_text_is_the_clients_fault(text: str) -> None:
    with pytest.raises(ValueError, match="{name} is empty"):
        hooks.preprocess(text)
""".lstrip()


def texts(*, name: str, shape: tuple[int, ...]) -> Part:
    """A text in, the same tidied out, for a network that takes strings."""
    code = f'''
LONGEST = 10_000  # characters


def preprocess({name}: str) -> np.ndarray[Any, Any]:
    """A text -> string{list(shape)}."""
    if not {name}.strip():
        raise ValueError("{name} is empty")
    return np.array({name}.strip()[:LONGEST], object).reshape({shape})


{_text_example(name)}'''
    test = f"""
def test_a_text_becomes_what_the_network_takes() -> None:
    array = hooks.preprocess(" a text ")
    assert array.shape == {shape}
    assert array.item() == "a text"


{_no_text_test(name)}"""
    imports = ("from typing import Any", "import numpy as np")
    return Part("A text in", code, test, imports, ("import pytest",), ("numpy",))


def token_ids(*, name: str, names: tuple[str, ...], dtype: str, length: int, tokenizer: str) -> Part:
    """A text in, token ids and masks of one length out, by a tokenizer.json."""
    fields = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    arrays = [f'        "{each}": np.array(tokens.{fields[each]}, np.{dtype}),' for each in names]
    result = "\n".join(["    return {", *arrays, "    }"])
    if len(names) == 1:
        result = f"    return np.array(tokens.{fields[names[0]]}, np.{dtype})"
    gives = "dict[str, np.ndarray[Any, Any]]" if len(names) > 1 else "np.ndarray[Any, Any]"
    code = f'''
# One length for every text: what has one shape is put together in a batch. Short texts cost as much as long ones.
LENGTH = {length}
TOKENIZER = Tokenizer.from_file(str(Path(__file__).with_name("{tokenizer}")))
TOKENIZER.enable_truncation(**{{**(TOKENIZER.truncation or {{}}), "max_length": LENGTH, "stride": 0}})
# As its own file pads, where that says how; else with the token that is usual for it.
PADS = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>")
PAD = next((word for word in PADS if TOKENIZER.token_to_id(word) is not None), PADS[0])
PADDING = TOKENIZER.padding or {{"pad_token": PAD, "pad_id": TOKENIZER.token_to_id(PAD) or 0}}
TOKENIZER.enable_padding(**{{**PADDING, "length": LENGTH, "pad_to_multiple_of": None}})


def preprocess({name}: str) -> {gives}:
    """A text -> {", ".join(names)}: {dtype}[{length}]."""
    if not {name}.strip():
        raise ValueError("{name} is empty")
    tokens = TOKENIZER.encode({name})
{result}


{_text_example(name)}'''
    arrays_of = "made.values()" if len(names) > 1 else "[made]"
    test = f"""
@pytest.mark.parametrize("text", ["a", "many words " * 1000])
def test_a_text_becomes_what_the_network_takes(text: str) -> None:
    made = hooks.preprocess(text)
    assert all(array.dtype == np.{dtype} and array.shape == ({length},) for array in {arrays_of})


{_no_text_test(name)}"""
    imports = (
        "from pathlib import Path", "from typing import Any", "import numpy as np", "from tokenizers import Tokenizer",
    )  # fmt: skip
    return Part(
        "A text in", code, test, imports, ("import numpy as np", "import pytest"), ("numpy", "tokenizers>=0.20"),
        (tokenizer,),
    )  # fmt: skip


def labels(*, output: str, classes: int, probabilities: bool) -> Part:
    """Class scores in, or probabilities already, the best label and its probability out."""
    says = "Scores before a softmax -> the likeliest label; of a network that ends in one, take them as they are."
    body = f"""\
    likely = np.exp({output} - {output}.max())
    return Answer(LABELS[int(likely.argmax())], float(likely.max() / likely.sum()))"""
    if probabilities:
        says = "The probability of each class, which the network gives itself -> the likeliest label."
        body = f"    return Answer(LABELS[int({output}.argmax())], float({output}.max()))"
    code = f'''
# The network's classes, in its order.
LABELS = [str(number) for number in range({classes})]


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
    answer = hooks.postprocess(scores)
    assert answer.label == hooks.LABELS[1]
    assert 0 < answer.probability <= 1
"""
    imports = ("from typing import Any, NamedTuple", "import numpy as np")
    says = "the likeliest label and its probability out"
    return Part(says, code, test, imports, ("import numpy as np",), results=("label", "probability"))


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
