"""Which artifacts are packed to take texts, and what is said of the others."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from compress.artifact import Artifact, sha256_of
from compress.errors import DatasetError, HookError, RepositoryError, ToolkitError
from compress.processor import Columns, Processor
from serve.config.pbtxt import parse
from serve.hooks.load import load_hooks
from serve.hooks.served_texts import served_texts
from serve.pack.write import Packed, PackOptions, pack
from tests.serve_models import HOOKS, artifact_of, hook_file, tiny_artifact
from tests.starting_models import ids, tokenizer_file

TOKENS = ("input_ids", "attention_mask")


def artifact_of_texts(
    folder: Path, names: tuple[str, ...] = TOKENS, length: str = "length", task: str = "sequence-classification",
    output: str = "logits", **changes: Any,
) -> Path:  # fmt: skip
    """Sums of tokens as the scores of two classes, with a tokenizer of words."""
    place = ids(folder, names, length, output)
    return with_tokenizer(place, task, **changes)


def with_tokenizer(place: Path, task: str, **changes: Any) -> Path:
    (place / "processor").mkdir()
    words = tokenizer_file(place / "processor").rename(place / "processor/tokenizer.json")
    files = {words.name: sha256_of(words)}
    processor = Processor("text", task, files, ("dull", "bright"), 20, place / "processor", **changes)
    dataclasses.replace(Artifact.load(place), processor=processor).save()
    return place


def packed(artifact: Path, **options: Any) -> Packed:
    return pack(artifact, repository=artifact.parent / "models", name="words", **options)


def names(found: Packed) -> tuple[list[str], list[str]]:
    return [tensor.name for tensor in found.inputs], [tensor.name for tensor in found.outputs]


def test_an_artifact_that_came_with_its_tokenizer_takes_texts(tmp_path: Path) -> None:
    found = packed(artifact_of_texts(tmp_path / "artifact"))
    assert names(found) == (["text"], ["label", "probability", "scores", "tokens"]), found.warnings
    config = parse((tmp_path / "models/words/config.pbtxt").read_text())
    assert config.parameters["task"].string_value == "sequence-classification"


def test_it_can_be_left_to_take_tokens(tmp_path: Path) -> None:
    found = packed(artifact_of_texts(tmp_path / "artifact"), text=False)
    assert names(found) == (list(TOKENS), ["logits"])
    assert "task" not in (tmp_path / "models/words/config.pbtxt").read_text()


def test_hooks_of_the_users_own_stand_alone(tmp_path: Path) -> None:
    artifact = artifact_of_texts(tmp_path / "artifact")
    own = tmp_path / "own.py"
    own.write_text("def postprocess(logits) -> int:\n    return int(logits.argmax())\n")
    assert names(packed(artifact, hooks=own)) == (list(TOKENS), ["result"])
    with pytest.raises(RepositoryError, match="both would stand before the network"):
        packed(artifact, hooks=hook_file(tmp_path, HOOKS), text=True)


def test_users_hooks_can_be_told_to_give_embeddings(tmp_path: Path) -> None:
    artifact = tiny_artifact(tmp_path / "artifact")
    own = PackOptions(models={"ensemble": {"parameters": {"task": "embeddings"}}})
    packed(artifact, hooks=hook_file(tmp_path, HOOKS), options=own)
    parameters = parse((tmp_path / "models/words/config.pbtxt").read_text()).parameters
    assert parameters["task"].string_value == "embeddings"
    assert parameters["part_of"].string_value == "words"


def test_pairs_are_taken_where_the_artifact_or_the_user_says_so(tmp_path: Path) -> None:
    told = artifact_of_texts(tmp_path / "told", columns=Columns(pair="other"))
    assert names(packed(told))[0] == ["text", "text_pair"]
    silent = artifact_of_texts(tmp_path / "silent")
    assert names(packed(silent, text_pair=True))[0] == ["text", "text_pair"]


REFUSED = [
    ({"names": ("input_ids",)}, "takes no attention_mask"),
    ({"task": "embeddings", "pair": True}, "one text at a time"),
    ({"names": (*TOKENS, "other")}, "and not input_ids, attention_mask, token_type_ids of one length"),
]  # fmt: skip


@pytest.mark.parametrize(("made", "why"), REFUSED)
def test_what_no_text_becomes_is_left_to_tokens_and_refused_where_texts_are_asked_for(
    tmp_path: Path, made: dict[str, Any], why: str
) -> None:
    pair = made.pop("pair", None)
    artifact = artifact_of_texts(tmp_path / "artifact", **made)
    with pytest.raises(HookError, match=why):
        packed(artifact, text=True, text_pair=pair)
    if pair is None:
        found = packed(artifact)
        assert "text" not in names(found)[0]
        assert any(why in warning for warning in found.warnings)


def test_a_tokenizer_of_parts_without_number_is_refused_and_nothing_is_packed(tmp_path: Path) -> None:
    artifact = artifact_of_texts(tmp_path / "artifact")
    made = Artifact.load(artifact)
    assert made.processor is not None
    file = artifact / "processor/tokenizer.json"
    parts = {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}] * 250_000}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pre_tokenizer": parts}))
    processor = dataclasses.replace(made.processor, files={file.name: sha256_of(file)})
    dataclasses.replace(made, processor=processor).save()
    with pytest.raises(DatasetError) as caught:
        packed(artifact)
    assert "over 64 parts" in caught.value.why
    assert all((caught.value.what, caught.value.mend))
    assert not (tmp_path / "models").exists()


def test_answers_for_each_token_are_none_for_texts(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["real"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["real", "mask"], ["kept"]),
        helper.make_node("Unsqueeze", ["kept", "last"], ["logits"]),
    ]
    specs = [f"{name}:int64[batch,length]" for name in TOKENS]
    last = {"last": np.array([2], np.int64)}
    artifact = artifact_of(tmp_path / "artifact", nodes, specs, ["logits:float32[batch,length,1]"], last)
    with_tokenizer(artifact, "token-classification")
    with pytest.raises(HookError, match="something for each token"):
        packed(artifact, text=True)
    found = packed(artifact)
    assert names(found) == (list(TOKENS), ["logits"])
    assert any("takes tokens as arrays" in warning for warning in found.warnings)


def test_an_encoder_without_a_pooling_is_told_how_to_give_embeddings(tmp_path: Path) -> None:
    specs = [f"{name}:int64[batch,length]" for name in TOKENS]
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["real"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["real", "mask"], ["kept"]),
        helper.make_node("Unsqueeze", ["kept", "last"], ["last_hidden_state"]),
    ]
    outputs = ["last_hidden_state:float32[batch,length,1]"]
    last = {"last": np.array([2], np.int64)}
    artifact = with_tokenizer(artifact_of(tmp_path / "artifact", nodes, specs, outputs, last), "features")
    (told,) = [warning for warning in packed(artifact).warnings if "takes tokens as arrays" in warning]
    assert "--pooling mean, cls or max" in told
    assert "--no-text" not in told


def test_a_model_without_a_tokenizer_takes_no_texts(tmp_path: Path) -> None:
    artifact = ids(tmp_path / "artifact", TOKENS, "length")
    with pytest.raises(HookError, match="came with no tokenizer"):
        packed(artifact, text=True)


def hooks_of(artifact: Path, folder: Path) -> Any:
    """The module that is written for an artifact, imported."""
    source = Artifact.load(artifact)
    folder.mkdir()
    (folder / "text_hooks.py").write_text(served_texts(source)[0])
    (folder / "tokenizer.json").write_bytes((artifact / "processor/tokenizer.json").read_bytes())
    return load_hooks(folder / "text_hooks.py", source.signature).module


def test_a_batch_is_as_long_as_its_longest_text_up_to_a_multiple_of_8(tmp_path: Path) -> None:
    hooks = hooks_of(artifact_of_texts(tmp_path / "artifact"), tmp_path / "hooks")
    made = hooks.preprocess(["a b c", "a " * 9, "a"])
    assert made.input_ids.shape == made.attention_mask.shape == (3, 16)
    assert made.attention_mask.sum(1).tolist() == [int(count) for count in made.tokens]
    assert hooks.preprocess(["a " * 99]).input_ids.shape == (1, 20)


def test_a_network_of_one_length_gets_that_length(tmp_path: Path) -> None:
    hooks = hooks_of(artifact_of_texts(tmp_path / "artifact", length="12"), tmp_path / "hooks")
    assert hooks.preprocess(["a", "a " * 99]).input_ids.shape == (2, 12)


def test_labels_that_do_not_exclude_each_other_are_judged_apart(tmp_path: Path) -> None:
    scores = np.array([[2.0, 3.0]], np.float32)
    hooks = hooks_of(artifact_of_texts(tmp_path / "several", multi_label=True), tmp_path / "a")
    (answer,) = hooks.postprocess(scores)
    np.testing.assert_allclose(answer.scores, 1 / (1 + np.exp([-2.0, -3.0])), rtol=1e-5)
    hooks = hooks_of(artifact_of_texts(tmp_path / "one"), tmp_path / "b")
    (answer,) = hooks.postprocess(scores)
    assert answer.label == "bright"
    assert answer.scores.sum() == pytest.approx(1)


@pytest.mark.parametrize("output", ["np", "LABELS", "class-scores", "0", "made"])
def test_an_output_of_any_name_is_judged(tmp_path: Path, output: str) -> None:
    place = artifact_of_texts(tmp_path / "artifact", output=output)
    assert names(packed(place))[1] in (["label", "probability", "scores", "tokens"], [output, "tokens"])


def test_the_text_hooks_can_stand_in_a_pipeline(tmp_path: Path) -> None:
    found = packed(artifact_of_texts(tmp_path / "artifact"), options=PackOptions(pipeline="bls"))
    assert names(found) == (["text"], ["label", "probability", "scores", "tokens"]), found.warnings
    assert parse((tmp_path / "models/words/config.pbtxt").read_text()).parameters["passed"].string_value == '["tokens"]'


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ("    tokens: int\n", "no field 'x'"),
        ("    x: np.ndarray\n    tokens: list\n", "does not say which tensor it is"),
        ("    x: np.ndarray\n    tokens: list[int]\n", "one item or a batch"),
        ("    x: np.ndarray\n    logits: int\n", "two outputs of the served model"),
        ("    x: np.ndarray\n    text: int\n", "an input and of an output"),
    ],
)  # fmt: skip
def test_what_goes_past_the_network_is_checked(tmp_path: Path, made: str, why: str) -> None:
    artifact = tiny_artifact(tmp_path / "tiny")
    code = f"from typing import NamedTuple\nimport numpy as np\n\n\nclass Made(NamedTuple):\n{made}\n\n"
    code += "def preprocess(text: str) -> Made:\n    return Made(np.zeros(4, np.float32), 1)\n"
    with pytest.raises(ToolkitError, match=why):
        load_hooks(hook_file(tmp_path, code), Artifact.load(artifact).signature)


def test_tokens_that_are_dropped_at_random_are_not_where_they_are_served(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    place = ids(tmp_path / "artifact", TOKENS, "length", "logits")
    (place / "processor").mkdir()
    letters = {"[UNK]": 0, "[PAD]": 1, **{chr(at): at - 95 for at in range(97, 123)}, "ab": 28}
    made = Tokenizer(models.BPE(letters, [("a", "b")], dropout=0.5, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(place / "processor/tokenizer.json"))
    files = {"tokenizer.json": sha256_of(place / "processor/tokenizer.json")}
    processor = Processor("text", "sequence-classification", files, ("dull", "bright"), 20, place / "processor")
    dataclasses.replace(Artifact.load(place), processor=processor).save()

    found = packed(place)

    assert [told for told in found.warnings if "dropout 0.5" in told]
    written: dict[str, Any] = {"__file__": str(place / "processor/hooks.py")}
    exec(served_texts(Artifact.load(place))[0], written)  # noqa: S102 - what was just written
    assert len({tuple(written["preprocess"](["abab ab"]).input_ids[0]) for _ in range(50)}) == 1


@pytest.mark.parametrize(
    ("task", "sizes", "why"),
    [
        ("embeddings", (2,), "they have 2 numbers"),
        ("embeddings", (0,), "they have 2 numbers"),
        ("sequence-classification", (1,), "it gives none of texts"),
    ],
)
def test_lengths_that_embeddings_can_not_be_cut_to_are_refused(
    tmp_path: Path, task: str, sizes: tuple[int, ...], why: str
) -> None:
    artifact = artifact_of_texts(tmp_path / "artifact", task=task, output="embeddings")
    with pytest.raises(RepositoryError) as caught:
        packed(artifact, options=PackOptions(dimensions=sizes))
    assert caught.value.why == why
    assert not (tmp_path / "models/words").exists()


def test_lengths_that_embeddings_may_be_cut_to_stand_in_the_configuration(tmp_path: Path) -> None:
    artifact = artifact_of_texts(tmp_path / "artifact", task="embeddings", output="embeddings")
    packed(artifact, options=PackOptions(dimensions=(1,)))
    config = parse((tmp_path / "models/words/config.pbtxt").read_text())
    assert config.parameters["dimensions"].string_value == "1"
