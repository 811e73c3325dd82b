"""Hooks that `serve pack` writes around a network of tokens: texts in, embeddings or labels out.

Tokens are those that `compress` makes of the same texts when it judges the model: cut, filled up and marked alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compress.artifact import Artifact
from compress.errors import HookError
from compress.processor import EMBEDDINGS, PAIR, Columns
from compress.tokenizer.open import LONGEST_TEXT, Tokens, open_tokenizer
from compress.tokenizer.type_ids import NAME as TYPES
from compress.tokenizer.vocabulary import MEND, too_many
from serve.hooks.halves import list_of
from serve.hooks.tables import table_rows, tokenizer_ids
from serve.hooks.types import item_shape, outputs_of

__all__ = ["ARRAYS", "EMBEDDINGS", "NAME", "NoTextsError", "served_texts"]

CLASSES = "sequence-classification"
NAME = "text_hooks.py"
TOKENIZER = "tokenizer.json"
IDS, MASK = "input_ids", "attention_mask"
FIELDS = {IDS: "ids", MASK: "attention_mask", TYPES: "type_ids"}
MULTIPLE = 8  # of a batch's length, as `compress` fills up
MOST_LETTERS = 200_000  # of a text: 800 times what a model of 256 tokens reads of it
MOST_CLASSES = 10_000
FLOATS = ("float16", "float32", "float64")
BEYOND = """\
    if max(made.ids) >= ROWS:
        word = TOKENIZER.id_to_token(max(made.ids))
        raise ValueError(f"text {at} has the token {word!r} ({max(made.ids)}), and the model has rows for {ROWS}")
"""
ARRAYS = "or serve its tokens as arrays, with --no-text"


class NoTextsError(HookError):
    """This artifact's network can't be served to texts, whatever is installed here."""


@dataclass(frozen=True)
class _Front:
    """How texts become tokens.

    Attributes:
        tokens: the tokenizer as it was opened.
        names: of the network's inputs; `dtype` is that of all.
        length: tokens of a text at most; `fixed` is how many each has to have, None for as many as there are.
        pair: whether two texts make one sample.
        rows: of the network's table of tokens, where the tokenizer makes more ids than that; else None.
    """

    tokens: Tokens
    names: tuple[str, ...]
    dtype: str
    length: int
    fixed: int | None
    pair: bool
    sha256: str
    rows: int | None = None


def served_texts(source: Artifact, *, pair: bool | None = None) -> tuple[str, tuple[str, ...]]:
    """Source of the hooks, and what their user should know of the tokenizer's files.

    The served model takes `text` (and `text_pair`), gives what the network gives, or of a classifier `label`,
    `probability` and `scores`, and in `tokens` how many tokens each text was.

    Args:
        source: with the tokenizer's files.
        pair: whether two texts make one sample; None is what the artifact says.

    Raises:
        NoTextsError: the network takes or gives what no text becomes, or the tokenizer is missing.
        DatasetError: the tokenizer contradicts what stands beside it.
        MissingExtraError: tokenizers is not installed.
    """
    front = _front(source, pair)
    code = _back(source)
    parts = [part for part in (_preprocess(front), code) if part]
    needs = ["Annotated"] if "Annotated[" in code else []
    typing = ", ".join([*needs, "Any", "NamedTuple"])
    head = f'''"""Texts in, {"labels" if code else "what the network gives of them"} out: written by `serve pack`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import {typing}

import numpy as np
from tokenizers import Tokenizer

REQUIREMENTS = ["numpy", "tokenizers>=0.22"]
FILES = ["{TOKENIZER}"]
'''
    notes = (*front.tokens.notes, *_told_of_types(source, front), *_told_of_rows(source, front))
    return head + "\n" + "\n\n\n".join(part.strip("\n") for part in parts) + "\n", notes


def _front(source: Artifact, pair: bool | None) -> _Front:
    processor, specs = source.processor, source.signature.inputs
    if processor is None or processor.kind != "text":
        raise _refused(
            source, "it came with no tokenizer", "export the Hugging Face folder that has its tokenizer.json"
        )
    if TOKENIZER not in processor.files:
        mend = "write it before the export: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        raise _refused(source, f"it came without a {TOKENIZER}", mend)
    names, takes = tuple(spec.name for spec in specs), ", ".join(map(str, specs))
    if not source.signature.batched:
        raise _refused(source, f"its batch is not of any size: it takes {takes}", "export it with a free batch")
    shapes = {item_shape(spec, batched=True) for spec in specs}
    dtypes = {spec.dtype for spec in specs}
    plain = len(shapes) == 1 and all(len(shape) == 1 for shape in shapes) and dtypes in ({"int64"}, {"int32"})
    if not plain or IDS not in names or not set(names) <= set(FIELDS):
        raise _refused(source, f"it takes {takes}, and not {', '.join(FIELDS)} of one length", "write hooks for it")
    ((length,),) = shapes
    if MASK not in names and isinstance(length, str):
        why = f"it takes no {MASK}: what fills a text up to its neighbours' length would change its answer"
        raise _refused(source, why, f"export it with {MASK}")
    made_for = processor.joined
    pair = made_for if pair is None else pair
    if pair and not made_for and TYPES not in names and processor.task != CLASSES:
        mend = "leave --text-pair out, or export the Hugging Face folder with --text-pair-column"
        raise _refused(source, "it takes one text at a time", mend)
    tokens = open_tokenizer(replace(processor, columns=Columns(pair=PAIR if pair else None)), extra="text")
    fixed = None if isinstance(length, str) else length
    longest = tokens.longest if fixed is None else min(tokens.longest, fixed)
    if tokens.tokenizer.num_special_tokens_to_add(pair) >= longest:
        why = f"it takes {longest} tokens, and the special ones alone are as many"
        raise _refused(source, why, "export it with a free length, or a larger one")
    rows = table_rows(source.model_path).get(IDS)
    short = rows if rows is not None and tokenizer_ids(source) > rows else None
    return _Front(tokens, names, dtypes.pop(), longest, fixed, pair, processor.files[TOKENIZER], short)


def _told_of_rows(source: Artifact, front: _Front) -> tuple[str, ...]:
    """What to know of a tokenizer that makes ids that the network's table lacks."""
    if front.rows is None:
        return ()
    return (f"{too_many(tokenizer_ids(source), front.rows)}, and is refused (400): {MEND}",)


def _told_of_types(source: Artifact, front: _Front) -> tuple[str, ...]:
    """What to know of token_type_ids, where pairs have none or the tokenizer makes other numbers than zeros."""
    passed, sample = front.tokens.type_ids, ("a", "a") if front.pair else "a"
    task = "" if source.processor is None else source.processor.task
    if front.pair and TYPES not in front.names and task != CLASSES:
        told = (
            f"the network takes no {TYPES}, so that a second text differs from a first by what stands between them "
            "alone. If it was trained with them, export the Hugging Face folder again with --text-pair-column"
        )
        return (told,)
    if passed or TYPES not in front.names:
        return ()
    (made,) = front.tokens.encoded([sample])
    if not any(made.type_ids):
        return ()
    if passed is None:
        told = (
            f"{source.folder} does not say whether its tokenizer passes {TYPES}: the network is given those that "
            f"{TOKENIZER} makes. Hold some answers against the original's, or export the Hugging Face folder again, "
            "which asks transformers"
        )
    else:
        told = (
            f"the network takes {TYPES}, and its tokenizer passes none (model_input_names of tokenizer_config.json, or "
            "else the default of its class): it is given zeros, as in transformers. If it was trained with them, name "
            "them there and export again"
        )
    return (told,)


def _preprocess(front: _Front) -> str:
    texts = ("text", "text_pair") if front.pair else ("text",)
    fields = "\n".join(f"    {name}: np.ndarray[Any, Any]" for name in front.names)
    shape = f"batch, {front.fixed or 'length'}"
    given = ", ".join(f"{name}: list[str]" for name in texts)
    width = str(front.fixed) if front.fixed else f"min(LENGTH, -(-longest // {MULTIPLE}) * {MULTIPLE})"
    says = (
        f"# All are filled up to {front.fixed}, which the network takes."
        if front.fixed
        else f"# A batch is as long as its longest text, up to a multiple of {MULTIPLE}."
    )
    arrays = [f"    {name} = np.zeros((len(found), width), np.{front.dtype})" for name in front.names]
    arrays[front.names.index(IDS)] = f"    {IDS} = np.full((len(found), width), PAD, np.{front.dtype})"
    # Zeros stay where the tokenizer passes no token_type_ids, as a network has it that is given none.
    filled = [name for name in front.names if name != TYPES or front.tokens.type_ids is not False]
    rows = [f"        {name}[at, : len(each)] = each.{FIELDS[name]}" for name in filled]
    example = ", ".join(f'"{name}": "The quick brown fox jumps over the lazy dog."' for name in texts)
    drops = (
        "TOKENIZER.model.dropout = None  # it would make other tokens of a text each time\n"
        if front.tokens.drops
        else ""
    )
    told = (
        f"ROWS = {front.rows}  # of the network's table, of which the tokenizer makes more ids\n" if front.rows else ""
    )
    beyond = BEYOND if front.rows else ""
    letters = min(MOST_LETTERS, int(LONGEST_TEXT / front.tokens.growth))
    return f'''
# As `compress` makes tokens of the same texts: what is longer is cut off on the {front.tokens.side}.
LENGTH = {front.length}
PAD = {front.tokens.pad}
MOST_LETTERS = {letters:_}  # of a text, which is read whole before it is cut
{told}SHA256 = "{front.sha256}"
CONTENT = Path(__file__).with_name("{TOKENIZER}").read_bytes()
if hashlib.sha256(CONTENT).hexdigest() != SHA256:
    raise ValueError("{TOKENIZER} is not the file that the model was packed with (its sha256 differs)")
TOKENIZER = Tokenizer.from_buffer(CONTENT)
{drops}TOKENIZER.enable_truncation(LENGTH, direction="{front.tokens.side}")
TOKENIZER.no_padding()


class Made(NamedTuple):
    """Tokens: {front.dtype}[{shape}] each, and how many of them were made of each text."""

{fields}
    tokens: list[np.int32]


def preprocess({given}) -> Made:
    """Texts -> {", ".join(front.names)}."""
    found = [encoded(at, *each) for at, each in enumerate(zip({", ".join(texts)}, strict=True))]
    longest = max(map(len, found))
    {says}
    width = {width}
{chr(10).join(arrays)}
    for at, each in enumerate(found):
{chr(10).join(rows)}
    return Made({", ".join(front.names)}, [np.int32(len(each)) for each in found])


def encoded(at: int, *texts: str) -> Any:
    """The tokens of one sample.

    Raises:
        ValueError: a text is empty, too long, or nothing that the tokenizer takes.
    """
    for name, text in zip({texts!r}, texts, strict=True):
        if not text.strip():
            raise ValueError(f"{{name}} {{at}} is empty")
        if len(text) > MOST_LETTERS:
            raise ValueError(f"{{name}} {{at}} has {{len(text):,}} characters, and {{MOST_LETTERS:,}} are allowed")
    try:
        made = TOKENIZER.encode(*texts)
    except BaseException as err:  # what fails in Rust is no Exception
        if not isinstance(err, Exception) and type(err).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer fails at text {{at}}") from err
    if not len(made):
        raise ValueError(f"text {{at}} holds nothing that the model has a token for")
{beyond}    return made


def example() -> dict[str, str]:
    """One sample, for warm-up, documentation and load tests."""
    return {{{example}}}
'''


def _back(source: Artifact) -> str:
    """What stands behind the network; "" where its own outputs are served."""
    signature, processor = source.signature, source.processor
    for spec in signature.outputs:
        shape = item_shape(spec, batched=True)
        if not all(isinstance(side, int) for side in shape):
            why = f"it gives {spec}: something for each token, and a client that sends texts sees no tokens"
            mend = "write a postprocess for it (serve hooks new --task text)"
            if processor is not None and processor.task in ("features", "logits"):
                mend = f"for embeddings, export the Hugging Face folder with --pooling mean, cls or max; or {mend}"
            raise _refused(source, why, mend)
    if processor is None or processor.task != CLASSES or len(signature.outputs) != 1:
        return ""
    (spec,), (tensor,) = signature.outputs, outputs_of(signature)
    shape = item_shape(spec, batched=True)
    if len(shape) != 1 or spec.dtype not in FLOATS or int(shape[0]) > MOST_CLASSES:
        return ""
    classes = int(shape[0])
    name = tensor.name if tensor.name == "logits" else f"{tensor.name}_"  # it may be a name of the module's
    if not name.isidentifier():
        return ""
    if classes == 1:
        return f'''
class Answer(NamedTuple):
    """One number for each text, as the network gives it."""

    value: float


def postprocess({name}: np.ndarray[Any, Any]) -> list[Answer]:
    """Numbers [batch, 1] -> answers."""
    return [Answer(float(row[0])) for row in {name}]
'''
    labels = processor.labels if len(processor.labels) == classes else tuple(f"LABEL_{at}" for at in range(classes))
    likely = "exp = np.exp(shifted)\n    scores = exp / exp.sum(1, keepdims=True)"
    says, shifted = "of all classes together", f"{name} - {name}.max(1, keepdims=True)"
    if processor.multi_label:
        says, shifted = "each by itself: a text may have several labels, or none", f"np.clip({name}, -80, 80)"
        likely = "scores = 1 / (1 + np.exp(-shifted))"
    return f'''
# The network's classes, in its order.
LABELS = {list_of(labels)}


class Answer(NamedTuple):
    """The likeliest label, how likely it is (0 to 1), and the same of each of LABELS, {says}."""

    label: str
    probability: float
    scores: Annotated[np.ndarray[Any, Any], "float32[{classes}]"]


def postprocess({name}: np.ndarray[Any, Any]) -> list[Answer]:
    """Scores [batch, {classes}] -> answers."""
    shifted = ({shifted}).astype(np.float32)
    {likely}
    return [Answer(LABELS[int(row.argmax())], float(row.max()), row) for row in scores]
'''


def _refused(source: Artifact, why: str, mend: str) -> NoTextsError:
    return NoTextsError(f"can't serve the network of {source.folder} to texts", why=why, mend=f"{mend}; {ARRAYS}")
