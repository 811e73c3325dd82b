"""What a folder says about its inputs: which token fills up texts, and how large an image gets on its way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compress.formats.checkpoint import load
from compress.processor import Processor
from tests.hub_models import bert_folder, with_config


def test_the_token_that_fills_up_texts_goes_with_the_model(tmp_path: Path) -> None:
    found = load(with_config(bert_folder(tmp_path), pad_token_id=3)).processor
    assert found is not None
    assert found.pad_token_id == 3
    again = Processor.from_dict(json.loads(json.dumps(found.to_dict())), found.folder)
    assert (again, again.digest) == (found, found.digest)
    without = {key: value for key, value in found.to_dict().items() if key != "pad_token_id"}
    older = Processor.from_dict(without, found.folder)
    assert older.pad_token_id is None
    assert older.digest != found.digest
    with pytest.raises(ValueError, match="pad_token_id"):
        Processor.from_dict(without | {"pad_token_id": -1}, found.folder)
