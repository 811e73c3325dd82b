"""What `serve hooks new` writes before a network that takes texts, or the tokens of texts, with tests."""

from __future__ import annotations

from serve.hooks.starting import Part

__all__ = ["texts", "token_ids"]


def _text_example(name: str) -> str:
    return f'''
def example() -> dict[str, str]:
    """One sample, for warm-up, documentation and load tests."""
    return {{"{name}": "The quick brown fox jumps over the lazy dog."}}
'''.lstrip()


def _no_text_test(name: str, given: str = "text") -> str:
    return f"""
@pytest.mark.parametrize("text", ["", " \\n"])
def test_no_text_is_the_clients_fault(text: str) -> None:
    with pytest.raises(ValueError, match="{name} is empty"):
        hooks.preprocess({given})
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


def token_ids(
    *, name: str, names: tuple[str, ...], dtype: str, length: int, varies: bool, tokenizer: str, alone: bool = False,
    types: bool = True,
) -> Part:  # fmt: skip
    """Texts in, token ids and masks out, by a tokenizer.json.

    Args:
        name: of the hook's argument.
        names: of the network's inputs.
        dtype: of all of them.
        length: tokens at most.
        varies: whether a batch is as long as its longest text; otherwise every text has `length` tokens.
        tokenizer: the file's name.
        alone: whether the network takes one text a call, as a batch of 1.
        types: whether the network is given the tokenizer's token_type_ids, and no zeros.
    """
    fields = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    made = {each: f"tokens.{field}" for each, field in fields.items()}
    says = "One length for every text, so that a batch can hold any of them. Short texts cost as much as long ones."
    shape, padded = "LENGTH", '"length": LENGTH, "pad_to_multiple_of": None'
    takes, empty, encoded = "str", f"not {name}.strip()", f"encode({name})"
    if varies:
        made = {each: f"[each.{field} for each in tokens]" for each, field in fields.items()}
        says = "A batch is as long as its longest text, up to a multiple of 8; LENGTH is what the model takes at most."
        shape, padded = "batch, length", '"length": None, "pad_to_multiple_of": None if LENGTH % 8 else 8'
        takes, empty, encoded = "list[str]", f"not all(each.strip() for each in {name})", f"encode_batch({name})"
    elif alone:
        made = {each: f"[{tokens}]" for each, tokens in made.items()}
        shape = "1, LENGTH"
    if not types:  # which transformers hands on for this tokenizer neither
        row = "[0] * len({}.ids)"
        every = f"[{row.format('each')} for each in tokens]" if varies else row.format("tokens")
        made["token_type_ids"] = f"[{every}]" if alone and not varies else every
    result = "\n".join(
        ["    return {", *(f'        "{each}": np.array({made[each]}, np.{dtype}),' for each in names), "    }"]
    )
    if len(names) == 1:
        result = f"    return np.array({made[names[0]]}, np.{dtype})"
    gives = "dict[str, np.ndarray[Any, Any]]" if len(names) > 1 else "np.ndarray[Any, Any]"
    code = f'''
# {says}
LENGTH = {length}
TOKENIZER = Tokenizer.from_file(str(Path(__file__).with_name("{tokenizer}")))
TOKENIZER.enable_truncation(**{{**(TOKENIZER.truncation or {{}}), "max_length": LENGTH, "stride": 0}})
# As its own file pads, where that says how; else with the token that is usual for it.
PADS = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>")
PAD = next((word for word in PADS if TOKENIZER.token_to_id(word) is not None), PADS[0])
PADDING = TOKENIZER.padding or {{"pad_token": PAD, "pad_id": TOKENIZER.token_to_id(PAD) or 0}}
TOKENIZER.enable_padding(**{{**PADDING, {padded}}})


def preprocess({name}: {takes}) -> {gives}:
    """{"Texts" if varies else "A text"} -> {", ".join(names)}: {dtype}[{shape}]."""
    if {empty}:
        raise ValueError("{name} is empty")
    tokens = TOKENIZER.{encoded}
{result}


{_text_example(name)}'''
    arrays_of = "made.values()" if len(names) > 1 else "[made]"
    if varies:
        test = f"""
@pytest.mark.parametrize(("text", "longest"), [("a", 8), ("many words " * 1000, hooks.LENGTH)])
def test_a_batch_is_as_long_as_its_longest_text(text: str, longest: int) -> None:
    made = hooks.preprocess([text, "a"])
    assert len({{array.shape for array in {arrays_of}}}) == 1
    assert all(array.dtype == np.{dtype} and array.shape[0] == 2 for array in {arrays_of})
    assert max(array.shape[1] for array in {arrays_of}) <= min(longest, hooks.LENGTH)


{_no_text_test(name, '["a", text]')}"""
    else:
        shown = "(1, hooks.LENGTH)" if alone else "(hooks.LENGTH,)"
        test = f"""
@pytest.mark.parametrize("text", ["a", "many words " * 1000])
def test_a_text_becomes_what_the_network_takes(text: str) -> None:
    made = hooks.preprocess(text)
    assert all(array.dtype == np.{dtype} and array.shape == {shown} for array in {arrays_of})


{_no_text_test(name)}"""
    imports = (
        "from pathlib import Path", "from typing import Any", "import numpy as np", "from tokenizers import Tokenizer",
    )  # fmt: skip
    return Part(
        "A text in", code, test, imports, ("import numpy as np", "import pytest"), ("numpy", "tokenizers>=0.20"),
        (tokenizer,),
    )  # fmt: skip
