"""The tokenizer that came with a model: tokenizer.json alone makes tokens, here as where they are served.

What the folder's other files say otherwise is followed where it is about lengths and padding, and refused by name where
it would need another tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.errors import DatasetError, MissingExtraError, first_line
from compress.processor import LARGEST_FILE, Processor
from compress.tokenizer.keys import contradicted, padding_of, prefixes, side_of
from compress.tokenizer.parts import dropped, growth_of, refuse_parts, spread_of
from compress.tokenizer.type_ids import passes_type_ids
from compress.vetting.files import is_there
from compress.vetting.texts import parse_json, read_bytes, read_json

__all__ = ["LONGEST_TEXT", "TOKENIZER", "Tokens", "open_tokenizer", "tokenizer_of"]

TOKENIZER, _CONFIG, _SENTENCES = "tokenizer.json", "tokenizer_config.json", "sentence_bert_config.json"
_PROMPTS = "config_sentence_transformers.json"
_AGAIN = "copy or download the folder again"
MOST_VALUES = 8_000_000  # of a tokenizer.json: those of 260,000 tokens have a quarter
# Letters that are looked at in one call, after all that a normalizer may make of them; and of a text alone, after what
# its own texts make of them.
AT_ONCE, LONGEST_TEXT = 16_000_000, 4_000_000


@dataclass(frozen=True)
class Tokens:
    """A tokenizer that cuts texts to the model's length.

    Attributes:
        longest: tokens of a text at most.
        pad: the number that fills up.
        side: of a longer text that is cut off, "left" or "right".
        place: of its files.
        notes: what its user should know of keys that are not followed.
        growth, spread: letters that it makes of one, see `compress.tokenizer.parts`.
        drops: whether the file asks for dropout, which is turned off here.
        takes_words: whether a word by itself makes the tokens that it makes in a text.
        type_ids: whether the model is given the token_type_ids that `tokenizer` makes, and no zeros; None where the
            files don't say.
    """

    tokenizer: Any
    longest: int
    pad: int
    side: str
    place: Path
    notes: tuple[str, ...] = ()
    growth: float = 1.0
    spread: float = 1.0
    drops: bool = False
    type_ids: bool | None = None
    takes_words: bool = True

    def encoded(self, texts: Sequence[Any], *, split: bool = False) -> Iterator[Any]:
        """What `tokenizers` makes of texts, or of pairs, a few at a time: what is cut off takes memory, too.

        Args:
            texts: of a model.
            split: whether each is a list of words.

        Raises:
            DatasetError: the tokenizer fails at them, or one is too long.
        """
        for few in self._few(texts):
            with _guarded(self.place, "use"):
                found = self.tokenizer.encode_batch(few, is_pretokenized=split)
                longest = max(len(each.ids) for each in found)
                if longest > self.longest:
                    raise ValueError(
                        f"it makes {longest:,} tokens of a text, and was told to cut it to {self.longest:,}"
                    )
            yield from found

    def _few(self, texts: Sequence[Any]) -> Iterator[list[Any]]:
        """The texts in parts of not too many letters."""
        few: list[Any] = []
        room = AT_ONCE / self.spread
        for text in texts:
            letters = len(text) if isinstance(text, str) else sum(map(len, text))
            if letters * self.growth > LONGEST_TEXT:
                raise DatasetError(
                    f"can't make tokens of a text of {letters:,} letters",
                    why=f"{LONGEST_TEXT / self.growth:,.0f} are looked at, and the model takes {self.longest:,} tokens",
                    mend="cut it to what the model takes",
                )
            if few and letters > room:
                yield few
                few, room = [], AT_ONCE / self.spread
            few.append(text)
            room -= letters
        if few:
            yield few


def open_tokenizer(processor: Processor, extra: str = "hf") -> Tokens:
    """The tokenizer of a model's texts.

    Args:
        processor: whose files it is made of.
        extra: of this project, that brings `tokenizers` to who asks.

    Raises:
        DatasetError: it is missing or damaged, contradicts what stands beside it, or can't make what the model takes.
        MissingExtraError: tokenizers is not installed.
    """
    place = processor.folder
    if TOKENIZER not in processor.files:
        raise DatasetError(
            f"can't read texts for {place}",
            why=f"there is no {TOKENIZER} in it",
            mend="download it, or write it: AutoTokenizer.from_pretrained(folder).save_pretrained(folder); or give "
            "tokens as arrays in an .npz",
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as err:
        raise MissingExtraError("read texts", module="tokenizers", extra=extra) from err
    longest = processor.max_length or 512
    with _guarded(place, "read"):
        told = tokenizer_of(place / TOKENIZER)
        config = _table(place / _CONFIG) if _CONFIG in processor.files else {}
        sentences = _table(place / _SENTENCES) if _SENTENCES in processor.files else {}
        refuse_parts(told)
        tokenizer = Tokenizer.from_file(str(place / TOKENIZER))
        if dropped(told) > 0:
            tokenizer.model.dropout = None
        own = tokenizer.truncation
        cut = side_of(config.get("truncation_side"), own)
        padded = side_of(config.get("padding_side"), tokenizer.padding)
        pad, named = padding_of(tokenizer, config, _map_of(processor))
        tokenizer.no_padding()  # before anything is made: it may be to any length
        faults = list(contradicted(tokenizer, told, config, sentences))
        special = tokenizer.num_special_tokens_to_add(processor.joined)
        if special < longest:
            tokenizer.enable_truncation(longest, direction=cut)
    if faults:
        raise DatasetError(
            f"can't make tokens as the model in {place} takes them",
            why=f"its {TOKENIZER} does not do what stands beside it: {'; '.join(faults)[:300]}",
            mend="write it anew: AutoTokenizer.from_pretrained(folder).save_pretrained(folder); or mend the key",
        )
    if special >= longest:
        raise DatasetError(
            f"can't make tokens as the model in {place} takes them",
            why=f"texts are cut to {longest}, and its special tokens alone are {special}",
            mend=f"mend model_max_length in its {_CONFIG}, or max_seq_length in its {_SENTENCES}",
        )
    notes = tuple(_notes(place, padded, cut, own, dropped(told)))
    types = processor.type_ids if processor.type_ids is not None else passes_type_ids(config)
    return Tokens(
        tokenizer, longest, _agreed(processor, pad, named), cut, place, notes, growth_of(told), spread_of(told),
        dropped(told) > 0, types, all(prefixes(told.get("pre_tokenizer"))),
    )  # fmt: skip


def _agreed(processor: Processor, pad: int, named: bool) -> int:
    """The number that the model takes for padding: its configuration's, before the tokenizer's."""
    wanted = processor.pad_token_id
    if wanted is not None and named and wanted != pad:
        raise DatasetError(
            f"can't fill up texts for the model in {processor.folder}",
            why=f"its config.json says pad_token_id {wanted}, and its tokenizer's pad token has the number {pad}",
            mend=f"give both the one of the training: pad_token_id in config.json, pad_token in {_CONFIG}",
        )
    return pad if wanted is None else wanted


def _notes(place: Path, padded: str, cut: str, own: Mapping[str, Any] | None, dropout: float) -> Iterator[str]:
    """Of keys that change tokens, where they are followed nowhere or not where the texts are served."""
    if dropout > 0:
        yield (
            f"the dropout {dropout:g} in {place / TOKENIZER} is left out: it makes other tokens of a text each time; "
            "hooks of your own read the file as it is: write null there"
        )
    if padded == "left":
        yield f"padding_side left in {place} is not followed: texts are filled up on the right, which the mask hides"
    if cut == "left" and side_of(None, own) != "left":
        yield (
            f"truncation_side left in {place} stands beside {TOKENIZER}, which hooks of your own read alone: write it "
            'there, too: tokenizer.enable_truncation(length, direction="left"), tokenizer.save(path)'
        )
    for folder in (place, *([place.parent] if (place.parent / "modules.json").is_file() else [])):
        with _guarded(place, "read"):
            prompts = _table(folder / _PROMPTS) if is_there(folder / _PROMPTS) else None
        if prompts is not None:
            name, known = str(prompts.get("default_prompt_name")), prompts.get("prompts")
            if isinstance(known, dict) and known.get(name):
                yield (
                    f"default_prompt_name {name[:40]!r} in {folder / _PROMPTS} is not followed: where texts are to "
                    f"begin with {str(known[name])[:60]!r}, write it into the data"
                )


def _map_of(processor: Processor) -> Mapping[str, Any]:
    name = "special_tokens_map.json"
    return _table(processor.folder / name) if name in processor.files else {}


def _table(path: Path) -> dict[str, Any]:
    data: Any = read_json(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path.name} is no table of keys")
    return data


def tokenizer_of(path: Path) -> dict[str, Any]:
    """What a tokenizer.json says.

    Raises:
        OSError: it can't be read.
        ValueError: it is no file, no JSON, no table of keys, or holds too much.
    """
    data = read_bytes(path, LARGEST_FILE)
    try:
        found: Any = parse_json(data, most=MOST_VALUES)
    except ValueError as err:
        raise ValueError(f"{path.name} {err}") from err
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is no table of keys")
    return found


@contextmanager
def _guarded(place: Path, verb: str) -> Iterator[None]:
    """tokenizers raises plain Exceptions for files that it can't use, and panics of Rust, which are none, for some."""
    try:
        yield
    except (DatasetError, MemoryError):
        raise
    except BaseException as err:
        if not isinstance(err, Exception) and type(err).__name__ != "PanicException":
            raise
        raise DatasetError(f"can't {verb} the tokenizer of {place}", why=first_line(err)[:300], mend=_AGAIN) from err
