"""A key that stands twice in a table of anybody's JSON is refused: of its values each reader takes another."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.artifact import Artifact
from compress.errors import ToolkitError
from compress.formats.checkpoint import load
from compress.processor import IMAGE_SETTINGS, Processor
from compress.tokenizer.open import open_tokenizer
from compress.vetting.tables import rows_of
from compress.vetting.texts import parse_json, read_json
from tests.hostile.onnx_files import artifact, model
from tests.hub_models import bert_folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("hub") / "bert")


@pytest.fixture
def folder(bert: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bert, tmp_path / "bert"))


def doubled(path: Path) -> None:
    """Its first key once more, in front."""
    text = path.read_text(encoding="utf-8")
    key = text[text.index('"') + 1 :].partition('"')[0]
    path.write_text(f'{{"{key}": null, ' + text.lstrip().removeprefix("{"), encoding="utf-8")


def _tokenizer(folder: Path) -> Any:
    files = dict.fromkeys(("tokenizer.json", "tokenizer_config.json"), "")
    return open_tokenizer(Processor("text", "logits", files, (), 8, folder))


READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": load,
    "tokenizer.json": _tokenizer,
    "tokenizer_config.json": _tokenizer,
}


@pytest.mark.parametrize("name", READERS)
def test_in_a_hub_folder(folder: Path, name: str) -> None:
    READERS[name](folder)
    doubled(folder / name)
    with pytest.raises(ToolkitError) as caught:
        READERS[name](folder)
    assert "twice" in caught.value.why


def test_in_an_artifact(tmp_path: Path) -> None:
    artifact(tmp_path, model().SerializeToString())
    Artifact.load(tmp_path)
    doubled(tmp_path / "artifact.json")
    with pytest.raises(ToolkitError) as caught:
        Artifact.load(tmp_path)
    assert "has the key 'schema_version' twice" in caught.value.why


def test_in_an_image_processors_settings(tmp_path: Path) -> None:
    (tmp_path / IMAGE_SETTINGS).write_text('{"size": 4, "size": 8}')
    with pytest.raises(ValueError, match="has the key 'size' twice"):
        read_json(tmp_path / IMAGE_SETTINGS)


@pytest.mark.parametrize(
    "text", ['{"text": "a", "text": "b"}', '{"text": "a", "t\\u0065xt": "b"}', '{"x": [{"b": 1, "b": 2}]}']
)
def test_in_a_row(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n{text}\n')
    with pytest.raises(ToolkitError) as caught:
        list(rows_of(tmp_path / "a.jsonl"))
    assert caught.value.why.startswith("line 2 has the key ")


def test_one_key_in_several_tables_is_none_twice() -> None:
    assert parse_json(b'[{"a": {"a": 1}}, {"a": 2}]') == [{"a": {"a": 1}}, {"a": 2}]
