"""Random changes to good configurations: what no list of cases thought of."""

from __future__ import annotations

import random
import re

__all__ = ["mutated"]

NUMBERS = ("-2", "-1", "0", "1", "2", "3", "4", "5", "8", "9")
TYPES = ("TYPE_FP32", "TYPE_INT64", "TYPE_BOOL", "TYPE_STRING", "TYPE_INVALID")
FIELDS = (
    "dynamic_batching { preserve_ordering: true }",
    "dynamic_batching { priority_levels: 2 default_priority_level: 1 }",
    "dynamic_batching { max_queue_delay_microseconds: 100 preferred_batch_size: 4 }",
    "sequence_batching { max_sequence_idle_microseconds: 5000000 }",
    "response_cache { enable: true }",
    "model_transaction_policy { decoupled: true }",
    "optimization { graph { level: 1 } }",
    "version_policy { all { } }",
    "version_policy { specific { versions: 1 } }",
    'parameters { key: "k" value { string_value: "v" } }',
    'instance_group { name: "more" count: 1 kind: KIND_CPU }',
    "instance_group { kind: KIND_AUTO }",
    "instance_group { kind: KIND_MODEL }",
    "instance_group { count: 2 passive: true }",
    'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "t" data_type: TYPE_FP32 source_input: "x" }',
    'batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "logits" source_input: "x" }',
    "model_metrics { metric_control { histogram_options { buckets: 1 } } }",
    'model_operations { op_library_filename: "nothing.so" }',
    'cc_model_filenames { key: "9.0" value: "m" }',
    'default_model_filename: "model.onnx"',
    "max_batch_size: 8",
)


def mutated(text: str, name: str, generator: random.Random) -> str:
    """A configuration with one to three changes; the name stays.

    Args:
        text: of a config.pbtxt.
        name: of the model.
        generator: of the changes.
    """
    for _ in range(generator.randint(1, 3)):
        text = generator.choice((_number, _type, _without, _twice, _word, _more))(text, generator)
    return re.sub(r'^name: "[^"]*"', f'name: "{name}"', text, count=1)


def _swap(text: str, pattern: str, choices: tuple[str, ...], generator: random.Random) -> str:
    places = list(re.finditer(pattern, text))
    if not places:
        return text
    place = generator.choice(places)
    return text[: place.start()] + generator.choice(choices) + text[place.end() :]


def _number(text: str, generator: random.Random) -> str:
    return _swap(text, r"(?<=: )-?\d+", NUMBERS, generator)


def _type(text: str, generator: random.Random) -> str:
    return _swap(text, r"TYPE_\w+", TYPES, generator)


def _word(text: str, generator: random.Random) -> str:
    names = tuple(set(re.findall(r'(?<=")\w+(?=")', text)))
    return _swap(text, r'(?<=")\w+(?=")', names, generator)


def _without(text: str, generator: random.Random) -> str:
    """Take a field away: `name: value`, or a line."""
    if generator.random() < 0.5:
        return _swap(text, r"\b\w+: (?:\"\w*\"|[\w-]+)", ("",), generator)
    lines = [line for line in text.splitlines() if line.strip()]
    balanced = [number for number, line in enumerate(lines) if number and line.count("{") == line.count("}")]
    if balanced:
        del lines[generator.choice(balanced)]
    return "\n".join(lines) + "\n"


def _twice(text: str, generator: random.Random) -> str:
    lines = text.splitlines()
    balanced = [line for line in lines[1:] if line.count("{") == line.count("}") and line.strip()]
    return text + generator.choice(balanced) + "\n" if balanced else text


def _more(text: str, generator: random.Random) -> str:
    return text + generator.choice(FIELDS) + "\n"
