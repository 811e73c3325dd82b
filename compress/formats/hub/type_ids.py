"""Whether transformers' own tokenizer of a folder would pass token_type_ids: its class is looked up, and never made."""

from __future__ import annotations

import inspect
import re
from typing import Any

from compress.formats.hub.folder import HubFolder, has, inside, json_of
from compress.tokenizer.open import TOKENIZER, tokenizer_of
from compress.tokenizer.parts import gives_types
from compress.tokenizer.type_ids import NAME

__all__ = ["gives_a_text_types", "type_ids_of"]

_CONFIG = "tokenizer_config.json"
_NAMES = re.compile(r"[A-Za-z0-9_]{1,100}")


def type_ids_of(transformers: Any, folder: HubFolder, config: Any) -> bool | None:
    """As `AutoTokenizer.from_pretrained(folder)` would; None where this release of transformers does not show it.

    Its choice of a class is followed in `transformers.models.auto.tokenization_auto`: the one that the folder names,
    else the model type's, and the generic one where it has neither. `model_input_names` stand above any class's.

    Args:
        transformers: the library.
        folder: with its tokenizer's files.
        config: of `config_of`.
    """
    told = json_of(folder.path, _CONFIG, folder.root) if has(folder.path, _CONFIG) else {}
    told = told if isinstance(told, dict) else {}
    names = told.get("model_input_names")
    if isinstance(names, list):
        return NAME in names
    named = told.get("tokenizer_class") or getattr(config, "tokenizer_class", None)
    try:
        names = _class_of(transformers, named, getattr(config, "model_type", None)).model_input_names
    except Exception:  # the library's tables are its own, and a class may need what is not installed
        return None
    return NAME in names if isinstance(names, list | tuple) else None


def gives_a_text_types(folder: HubFolder) -> bool:
    """Whether its tokenizer.json gives tokens of a single text other types than 0.

    False where it has none, or one that can't be read: what makes tokens of it says so.

    Args:
        folder: with its tokenizer's files.
    """
    try:
        place = next(each for each in (folder.path, folder.root) if has(each, TOKENIZER))
        return gives_types(tokenizer_of(inside(place, TOKENIZER, folder.root)))
    except (StopIteration, OSError, ValueError, RecursionError):
        return False


def _class_of(transformers: Any, named: Any, model_type: Any) -> Any:
    auto = transformers.models.auto.tokenization_auto
    generic = transformers.PreTrainedTokenizerFast  # TokenizersBackend, by its old name

    def found(name: Any) -> Any:
        kind: Any = auto.tokenizer_class_from_name(name) if isinstance(name, str) and _NAMES.fullmatch(name) else None
        tokenizer = inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedTokenizerBase)
        return kind if tokenizer and kind.__name__ != "PythonBackend" else generic

    usual = auto.TOKENIZER_MAPPING_NAMES.get(model_type)
    wrong = model_type in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    return found(usual if wrong or not named else named)
