"""Texts and images as people have them, read by what came with the model."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from compress.artifact import Artifact, TensorSpec
from compress.console.wording import AssumedWarning
from compress.data import texts
from compress.data.dataset import Dataset
from compress.data.reading import arrays_of
from compress.errors import ArtifactError, DatasetError
from compress.jobs.export import export
from compress.options import ExportOptions
from compress.processor import Columns, Processor
from compress.signature import Signature
from serve.pack.write import pack
from tests.hub_models import LABELS, bert_folder

TOKENS = Signature(tuple(TensorSpec(name, "int64", ("batch", "seq")) for name in ("input_ids", "attention_mask")), ())
ROWS = [("word1 word2 word3", "good"), ("word4 strange", "bad"), ("word5", "neither")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("hub") / "bert")


@pytest.fixture
def processor(folder: Path) -> Processor:
    files = dict.fromkeys(("tokenizer.json", "tokenizer_config.json"), "")
    return Processor("text", "sequence-classification", files, LABELS, 6, folder)


WRITTEN = {
    "texts.jsonl": "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in ROWS),
    "texts.csv": "text,label\n" + "".join(f'"{text}",{label}\n' for text, label in ROWS),
    "texts.tsv": "text\tlabel\n" + "".join(f"{text}\t{LABELS.index(label)}\n" for text, label in ROWS),
    "texts.txt": "".join(f"{text}\n" for text, _ in ROWS),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_texts_become_tokens_masks_and_numbers_of_classes(tmp_path: Path, processor: Processor, name: str) -> None:
    (tmp_path / name).write_text(WRITTEN[name])
    data = Dataset.open(arrays_of(str(tmp_path / name), processor), TOKENS)
    ids, mask = np.asarray(data.inputs["input_ids"]), np.asarray(data.inputs["attention_mask"])
    assert ids.tolist() == [[1, 5, 6, 7, 2, 0], [1, 8, 3, 2, 0, 0], [1, 9, 2, 0, 0, 0]]
    assert mask.sum(1).tolist() == [5, 4, 3]
    assert (data.labels is None) == name.endswith(".txt")
    if data.labels is not None:
        assert np.asarray(data.labels).tolist() == [1, 0, 2]


def test_pairs_have_types_and_long_texts_are_cut(tmp_path: Path, processor: Processor) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"a": "word1 word2 word3", "b": "word4 word5 word6"}) + "\n")
    asked = dataclasses.replace(processor, columns=Columns("a", "b"))
    kinds = Signature((*TOKENS.inputs, TensorSpec("token_type_ids", "int64", ("batch", "seq"))), ())
    data = Dataset.open(arrays_of(str(path), asked), kinds)
    assert np.asarray(data.inputs["input_ids"]).shape == (1, 6)
    assert np.asarray(data.inputs["token_type_ids"]).max() == 1


BROKEN = {
    "no such column": ('{"body": "word1"}', Columns(), "it holds 'body'", "--text-column"),
    "a column of numbers": ('{"text": 3}', Columns(), "is no text", "--text-column"),
    "no second text": ('{"text": "word1"}', Columns(pair="other"), "it holds 'text'", "--text-pair-column"),
    "no label": ('{"text": "word1"}', Columns(label="kind"), "no 'kind'", "--label-column"),
    "a label of another model": ('{"text": "word1", "label": "funny"}', Columns(), "bad, good, neither", "numbers"),
    "no JSON": ('{"text"', Columns(), "line 1 is no JSON", "UTF-8"),
    "no object": ("[1]", Columns(), "no JSON object", "UTF-8"),
    "nothing": ("", Columns(), "no rows", "100"),
    "half of a letter": (r'{"text": "the \ud800 cat"}', Columns(), "surrogates", "ud83d alone"),
    "a label beyond all": ('{"text": "a", "label": 99999999999999999999999}', Columns(), "no number of a class", "0"),
    "a label that is no number": ('{"text": "a", "label": NaN}', Columns(), "no number of a class", "from 0"),
    "a label as Python writes it": ('{"text": "a", "label": "1_0"}', Columns(), "no number of a class", "from 0"),
    "a label in other digits": ('{"text": "a", "label": "\u0662"}', Columns(), "no number of a class", "from 0"),
    "no first label": ('{"text": "a"}\n{"text": "b", "label": 1}', Columns(), "1 of 2 rows", "every row"),
    "no later label": (
        '{"text": "a", "label": 1}\n' * 1030 + '{"text": "b"}',
        Columns(),
        "1,030 of 1,031 rows",
        "every",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_data_that_does_not_fit_is_an_error_in_three_parts(tmp_path: Path, processor: Processor, fault: str) -> None:
    text, columns, why, mend = BROKEN[fault]
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(DatasetError) as caught:
        arrays_of(str(tmp_path / "data.jsonl"), dataclasses.replace(processor, columns=columns))
    assert why in caught.value.why
    assert mend in caught.value.mend


def test_a_row_without_a_label_is_named(tmp_path: Path, processor: Processor) -> None:
    rows = ['{"text": "a", "label": 1}'] * 1500 + ['{"text": "b"}', '{"text": "a", "label": 1}']
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    with pytest.raises(DatasetError, match="row 1501 of"):
        arrays_of(str(tmp_path / "data.jsonl"), processor)


STARS = ("1", "2", "3")


def test_labels_that_are_names_and_numbers_are_taken_one_way_and_told(tmp_path: Path, processor: Processor) -> None:
    """A model of stars calls its class 0 "1": what a file of numbers means can't be seen."""
    stars = dataclasses.replace(processor, labels=STARS)
    (tmp_path / "names.csv").write_text("text,label\nword1,1\nword2,3\n")
    with pytest.warns(AssumedWarning, match="as the model's names of classes; .* the class 0 is '1'"):
        names = Dataset.open(arrays_of(str(tmp_path / "names.csv"), stars), TOKENS)
    assert np.asarray(names.labels).tolist() == [0, 2]
    (tmp_path / "numbers.jsonl").write_text('{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n')
    with pytest.warns(AssumedWarning, match="as numbers of classes from 0; .* the class 0 is '1'"):
        numbers = Dataset.open(arrays_of(str(tmp_path / "numbers.jsonl"), stars), TOKENS)
    assert np.asarray(numbers.labels).tolist() == [1, 0]
    (tmp_path / "mixed.csv").write_text("text,label\nword1,1\nword2,0\n")
    with pytest.raises(DatasetError, match=r"row 2 of .* has the label '0'"):
        arrays_of(str(tmp_path / "mixed.csv"), stars)


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path, processor: Processor) -> None:
    (tmp_path / "data.csv").write_text("text,text,label\nword1,word2,1\n")
    with pytest.raises(DatasetError, match="column 'text' twice"):
        arrays_of(str(tmp_path / "data.csv"), processor)


def test_a_class_by_a_name_that_several_have_is_refused(tmp_path: Path, processor: Processor) -> None:
    (tmp_path / "data.csv").write_text("text,label\nword1,crane\n")
    with pytest.raises(DatasetError, match="several classes so: 0, 2"):
        arrays_of(str(tmp_path / "data.csv"), dataclasses.replace(processor, labels=("crane", "dog", "crane")))


def test_an_exponent_is_a_number_among_values_and_none_among_classes(tmp_path: Path, processor: Processor) -> None:
    values = dataclasses.replace(processor, labels=())
    path = tmp_path / "scores.csv"
    path.write_text("text,label\nword1,1e3\n\nword2,0.5\nword3,2\n")
    labels = Dataset.open(arrays_of(str(path), values), TOKENS).labels
    assert np.asarray(labels).tolist() == [1000.0, 0.5, 2.0]
    path = tmp_path / "classes.csv"
    path.write_text("text,label\nword1,1\n\nword2,1e0\nword3,2\n")
    with pytest.raises(DatasetError, match=r"row 2 of .* has a label with an exponent, 1"):
        arrays_of(str(path), values)


def test_labels_under_another_name_are_told_of(tmp_path: Path, processor: Processor) -> None:
    path = tmp_path / "reviews.csv"
    path.write_text("id,review,sentiment\n1,word1,good\n2,word2,bad\n")
    asked = dataclasses.replace(processor, columns=Columns("review"))
    with pytest.warns(AssumedWarning, match="no labels in reviews.csv .not read: id, sentiment.*--label-column"):
        assert Dataset.open(arrays_of(str(path), asked), TOKENS).labels is None
    asked = dataclasses.replace(processor, columns=Columns("review", label="sentiment"))
    labels = Dataset.open(arrays_of(str(path), asked), TOKENS).labels
    assert np.asarray(labels).tolist() == [1, 0]


def test_data_is_called_as_the_user_calls_it(tmp_path: Path, processor: Processor) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("word1\n")
    place = arrays_of(str(path), processor)
    assert place != str(path)
    assert Dataset.open(place, TOKENS).source == str(path)
    with pytest.raises(DatasetError) as caught:
        Dataset.open(place, Signature((TensorSpec("pixel_values", "float32", ("batch", 3)),), ()))
    assert caught.value.what.startswith(f"{path} lacks")


def test_what_is_no_file_is_told_before_what_the_model_takes(tmp_path: Path, processor: Processor) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    for given in (None, processor):
        for name, why in (("pipe.csv", "no file that could be read twice"), ("gone.csv", "no such file")):
            with pytest.raises(DatasetError, match=why):
                arrays_of(str(tmp_path / name), given)


def test_texts_for_a_model_without_a_tokenizer_are_refused(tmp_path: Path, processor: Processor) -> None:
    (tmp_path / "data.txt").write_text("word1\n")
    for given in (None, dataclasses.replace(processor, kind="image"), dataclasses.replace(processor, files={})):
        with pytest.raises(DatasetError) as caught:
            arrays_of(str(tmp_path / "data.txt"), given)
        assert all((caught.value.what, caught.value.why, caught.value.mend))


def test_images_are_made_by_the_folders_own_processor_when_they_are_asked_for(tmp_path: Path) -> None:
    from PIL import Image

    config = {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}, "do_rescale": True}
    config |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_normalize": True, "do_resize": True}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    for name, value in (("bad", 0), ("good", 255), ("good", 128)):
        (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 10), (value, value, value)).save(tmp_path / "images" / name / f"{value}.png")
    files = {"preprocessor_config.json": ""}
    maker = Processor("image", "image-classification", files, LABELS, None, tmp_path)
    signature = Signature((TensorSpec("pixel_values", "float32", ("batch", 3, 8, 8)),), ())
    data = Dataset.open(arrays_of(str(tmp_path / "images"), maker), signature)
    inputs, labels = data.take(slice(0, 3))
    assert labels is not None
    assert labels.tolist() == [0, 1, 1]
    np.testing.assert_allclose(inputs["pixel_values"][:, 0, 0, 0], [-1.0, 0.0039, 1.0], atol=1e-3)
    (tmp_path / "images" / "funny").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "images" / "funny" / "1.png")
    with pytest.raises(DatasetError) as caught:
        arrays_of(str(tmp_path / "images"), dataclasses.replace(maker, max_length=1))
    assert "bad, good, neither" in caught.value.why


def test_a_folder_and_texts_become_an_artifact_with_its_tokenizer_that_serve_packs(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("calibration", "eval"):
        rows = [{"text": f"{name} word{n} word{n * 7 % 50}", "label": LABELS[n % 3]} for n in range(12)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ExportOptions(
        output=tmp_path / "artifact", prune=0.3, int8="static", calibration=str(tmp_path / "calibration.jsonl"),
        eval=str(tmp_path / "eval.jsonl"),
    )  # fmt: skip
    artifact, report = export(folder, options)
    assert artifact.signature.sizes == {"seq": 8}
    assert report.gains["macs"] > 1.3
    weights = (folder / "model.safetensors").stat().st_size
    assert f"a file of {weights:,} bytes" in report.stages[0].did
    found = Artifact.load(tmp_path / "artifact").processor
    assert found is not None
    assert (found.kind, found.labels, found.max_length) == ("text", LABELS, 32)
    assert (found.folder / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    pack(tmp_path / "artifact", repository=tmp_path / "models", name="judge")
    assert (tmp_path / "models" / "judge_network" / "1" / "model.onnx").is_file()
    packed = tmp_path / "models" / "judge_preprocess" / "1" / "tokenizer.json"
    assert packed.read_bytes() == (folder / "tokenizer.json").read_bytes()
    (found.folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ArtifactError, match="damaged"):
        Artifact.load(tmp_path / "artifact")


@pytest.mark.usefixtures("openvino")
def test_two_runtimes_are_compared_on_the_texts_that_calibrate_where_none_judge(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text(
        "\n".join(json.dumps({"text": f"word{n} word{n * 7 % 50}"}) for n in range(12))
    )
    calibration = str(tmp_path / "texts.jsonl")
    export(
        folder,
        ExportOptions(output=tmp_path / "artifact", int8="static", calibration=calibration, runtime="openvino"),
    )
    assert Artifact.load(tmp_path / "artifact").processor is not None


KILLED = """
import os, signal, sys
from tests.unit.compress.data.test_reading import Columns, Processor, Path, arrays_of
files = dict.fromkeys(("tokenizer.json", "tokenizer_config.json"), "")
arrays_of(sys.argv[1], Processor("text", "sequence-classification", files, (), 6, Path(sys.argv[2])))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_goes_with_the_next(
    processor: Processor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    path = tmp_path / "texts.txt"
    path.write_text("word1\nword2\n")
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path), str(processor.folder)], check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("compress-*")
    made = Path(arrays_of(str(path), processor))
    (there,) = tmp_path.glob("compress-*")
    assert there != left
    assert there in made.parents


def test_tokens_that_would_fill_the_disk_are_refused_before_any_is_written(
    tmp_path: Path, processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "ROOM", 1e-12)
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n' * 10)
    with pytest.raises(DatasetError, match="can't make tokens of") as caught:
        arrays_of(str(tmp_path / "data.jsonl"), dataclasses.replace(processor, task="embeddings"))
    assert caught.value.why.startswith("10 rows as long as the longest")
    assert "TMPDIR" in caught.value.mend
