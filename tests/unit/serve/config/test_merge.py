"""Edits of config.pbtxt by hand: a three-way merge with what the pack before wrote and what this one writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given

from serve.config.merge import Edits, merge
from serve.config.pbtxt import parse, text_of, to_message
from serve.pack.write import PackOptions, pack
from tests.serve_models import hook_file, tiny_artifact
from tests.unit.serve.config.test_pbtxt import configs


def merged(base: str, edited: str, packed: str) -> tuple[str, list[str], list[str]]:
    message = parse(packed)
    kept, conflicts = merge(parse(base), parse(edited), message)
    return text_of(message).replace("\n", " "), kept, [conflict.field for conflict in conflicts]


@pytest.mark.parametrize(
    ("base", "edited", "packed", "expected", "kept", "conflicts"),
    [
        ("max_batch_size: 8", "max_batch_size: 4", "max_batch_size: 8", "max_batch_size: 4", ["max_batch_size"], []),
        ("max_batch_size: 8", "max_batch_size: 8", "max_batch_size: 2", "max_batch_size: 2", [], []),
        ("max_batch_size: 8", "max_batch_size: 4", "max_batch_size: 4", "max_batch_size: 4", [], []),
        ("max_batch_size: 8", "max_batch_size: 4", "max_batch_size: 2", "max_batch_size: 2", [], ["max_batch_size"]),
        ("", "response_cache { enable: true }", "", "response_cache {   enable: true }", ["response_cache"], []),
        ("dynamic_batching { }", "", "dynamic_batching { }", "", ["dynamic_batching"], []),
        (
            "dynamic_batching { max_queue_delay_microseconds: 1 }",
            "dynamic_batching { max_queue_delay_microseconds: 1 preserve_ordering: true }",
            "dynamic_batching { max_queue_delay_microseconds: 9 }",
            "dynamic_batching {   max_queue_delay_microseconds: 9   preserve_ordering: true }",
            ["dynamic_batching.preserve_ordering"],
            [],
        ),
        (
            'parameters { key: "a" value { string_value: "1" } }',
            'parameters { key: "a" value { string_value: "2" } }',
            'parameters { key: "a" value { string_value: "1" } } parameters { key: "b" value { string_value: "3" } }',
            " ".join(f'parameters {{   key: "{k}"   value {{     string_value: "{v}"   }} }}' for k, v in ("a2", "b3")),
            ["parameters.a"],
            [],
        ),
        (
            'metric_tags { key: "a" value: "1" }',
            "",
            'metric_tags { key: "a" value: "2" }',
            'metric_tags {   key: "a"   value: "2" }',
            [],
            ["metric_tags.a"],
        ),
    ],
)
def test_a_field_that_only_one_side_changed_is_that_sides(
    base: str, edited: str, packed: str, expected: str, kept: list[str], conflicts: list[str]
) -> None:
    assert merged(base, edited, packed) == (f"{expected} " if expected else "", kept, conflicts)


@given(configs(), configs())
def test_with_nothing_new_in_the_pack_every_edit_stays(base: object, edited: object) -> None:
    before, now = to_message(base), to_message(edited)  # type: ignore[arg-type]
    packed = to_message(base)  # type: ignore[arg-type]
    _, conflicts = merge(before, now, packed)
    assert not conflicts
    assert packed == now


@given(configs(), configs())
def test_without_edits_the_pack_is_written_as_it_is(base: object, new: object) -> None:
    packed = to_message(new)  # type: ignore[arg-type]
    assert merge(to_message(base), to_message(base), packed) == ([], [])  # type: ignore[arg-type]
    assert packed == to_message(new)  # type: ignore[arg-type]


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    """A packed model whose network was edited by hand: three instances, and a comment."""
    tiny_artifact(tmp_path / "artifact")
    pack(tmp_path / "artifact", repository=tmp_path / "models", name="tiny", hooks=hook_file(tmp_path))
    path = tmp_path / "models/tiny_network/config.pbtxt"
    path.write_text("# for the large machine\n" + path.read_text().replace("count: 2", "count: 3"))
    return tmp_path


def again(folder: Path, options: PackOptions, edits: Edits = "merge") -> tuple[str, ...]:
    models = folder / "models"
    hooks = hook_file(folder)
    return pack(folder / "artifact", repository=models, name="tiny", hooks=hooks, options=options, edits=edits).kept
