"""What stands beside a tokenizer.json, held against what it does: keys that change tokens, and what pads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["contradicted", "padding_of", "prefixes", "side_of", "text_of"]

# Classes that take tokenizer.json as it is, whatever the keys of a class's own normalizer say.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
_PROBES = {"do_lower_case": ("A", "a"), "strip_accents": ("é", "e"), "tokenize_chinese_chars": ("中", " 中 ")}


def side_of(key: Any, own: Mapping[str, Any] | None) -> str:
    """ "left" or "right": tokenizer_config's key, else tokenizer.json's own direction."""
    side = key if isinstance(key, str) else str((own or {}).get("direction", "right"))
    if side.lower() not in ("left", "right"):
        raise ValueError(f"it has the side {side[:40]!r}, and there are left and right")
    return side.lower()


def text_of(token: Any) -> str | None:
    """A token as tokenizer_config.json writes it: a text, or a table with its content."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def padding_of(tokenizer: Any, config: Mapping[str, Any], special: Mapping[str, Any]) -> tuple[int, bool]:
    """The number that pads, and whether the tokenizer's files name it; else it is the usual one."""
    own = tokenizer.padding or {}
    for token in (config.get("pad_token"), special.get("pad_token"), own.get("pad_token")):
        number = tokenizer.token_to_id(text_of(token)) if text_of(token) else None
        if number is not None:
            return int(number), True
    usual = (tokenizer.token_to_id(each) for each in ("[PAD]", "<pad>"))
    return next((int(each) for each in usual if each is not None), 0), False


def contradicted(
    tokenizer: Any, told: Mapping[str, Any], config: Mapping[str, Any], sentences: Mapping[str, Any]
) -> Iterator[str]:
    """Each key that asks for other tokens than the tokenizer makes, in words.

    Args:
        tokenizer: of `tokenizers`, as tokenizer.json says.
        told: tokenizer.json.
        config: tokenizer_config.json.
        sentences: sentence_bert_config.json.
    """
    if config.get("tokenizer_class") not in _GENERIC:
        for key, (text, changed) in _PROBES.items():
            wanted = config.get(key)
            if isinstance(wanted, bool) and wanted != (_normalized(tokenizer, text) == changed):
                yield f"{key} is {wanted}"
        wanted = config.get("add_prefix_space")
        if isinstance(wanted, bool) and any(each != wanted for each in prefixes(told.get("pre_tokenizer"))):
            yield f"add_prefix_space is {wanted}"
    if sentences.get("do_lower_case") is True and _normalized(tokenizer, "A") != "a":
        yield "do_lower_case of sentence_bert_config.json is True"
    for key, token, at in (("add_bos_token", "bos_token", 0), ("add_eos_token", "eos_token", -1)):
        number = tokenizer.token_to_id(text_of(config.get(token)) or "")
        if isinstance(config.get(key), bool) and number is not None:
            ids = tokenizer.encode("").ids
            if config[key] != (bool(ids) and ids[at] == number):
                yield f"{key} is {config[key]}"
    if config.get("split_special_tokens") is True:
        yield "split_special_tokens is True"
    added = config.get("added_tokens_decoder")
    for number, token in added.items() if isinstance(added, dict) else ():
        if tokenizer.token_to_id(text_of(token) or "") != (int(number) if str(number).isdecimal() else None):
            yield f"added_tokens_decoder has {str(text_of(token))[:40]!r} as {str(number)[:20]}"
    for key in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(key)
        for token in listed if isinstance(listed, list) else ():
            if tokenizer.token_to_id(text_of(token) or "") is None:
                yield f"{key} has {str(text_of(token))[:40]!r}"


def _normalized(tokenizer: Any, text: str) -> str:
    return text if tokenizer.normalizer is None else str(tokenizer.normalizer.normalize_str(text))


def prefixes(part: Any) -> Iterator[bool]:
    """What each ByteLevel of a pre-tokenizer does."""
    if isinstance(part, dict):
        if part.get("type") == "ByteLevel":
            yield bool(part.get("add_prefix_space"))
        parts = part.get("pretokenizers")
        for each in parts if isinstance(parts, list) else ():
            yield from prefixes(each)
