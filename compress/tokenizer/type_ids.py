"""Whether a tokenizer passes token_type_ids, which tell a first text's tokens from a second's.

`tokenizers` makes them of every pair; transformers hands them on only where its tokenizer names them among the model's
inputs, and a network that is not given them takes zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["NAME", "passes_type_ids"]

NAME = "token_type_ids"
# Classes of transformers that have said the same in all of its releases; a generic class did in 4, and does not in 5.
_PASSING = {"Bert", "Deberta", "DebertaV2"}
_OTHERS = {
    "Bart", "Camembert", "DistilBert", "Gemma", "Llama", "MPNet", "Qwen2", "Roberta", "T5", "XLMRoberta",
}  # fmt: skip


def passes_type_ids(config: Mapping[str, Any]) -> bool | None:
    """What a tokenizer_config.json says; None where it does not, and its class's releases differ or it names none.

    Args:
        config: of tokenizer_config.json.
    """
    names = config.get("model_input_names")
    if isinstance(names, list):
        return NAME in names
    kind = config.get("tokenizer_class")
    name = kind.removesuffix("Fast").removesuffix("Tokenizer") if isinstance(kind, str) else ""
    return name in _PASSING if name in _PASSING | _OTHERS else None
