"""`serve hooks new`: a starting file that fits the network, passes its own test, and is refused over a file at hand."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from PIL import Image
from tokenizers import Tokenizer

from compress.artifact import Artifact
from compress.errors import HookError
from serve.cli.main import main
from serve.hooks.load import load_hooks
from serve.hooks.module import import_module, read_source
from serve.hooks.new import new_hooks
from tests.hook_checks import steps_of, tried_of
from tests.serve_models import artifact_of, sum_artifact, text_artifact, tiny_artifact
from tests.starting_models import (
    CROPPED,
    KINDS,
    ending,
    ids,
    mean_of_images,
    one_text,
    outputs,
    own_images,
    positions,
    tokenizer_file,
)


@pytest.mark.parametrize(("task", "make", "arguments", "outputs"), KINDS)
def test_what_is_written_fits_the_network_and_passes_its_own_test_and_the_linter(
    task: str, make: Any, arguments: tuple[Any, ...], outputs: list[str], tmp_path: Path
) -> None:
    source = Artifact.load(make(tmp_path / "artifact", *arguments))
    ids_of = any(spec.name == "input_ids" for spec in source.signature.inputs)
    hooks = tmp_path / "made" / "my_hooks.py"
    own = source.processor is not None
    written = new_hooks(task, source, hooks, tokenizer_file(tmp_path) if ids_of and not own else None)
    assert [file.name for file in written] == ["my_hooks.py", "test_my_hooks.py", *(["tokenizer.json"] * ids_of)]
    postprocess = load_hooks(hooks, source.signature).postprocess
    assert [result.name for result in (postprocess.results if postprocess else ())] == outputs
    steps = steps_of(hooks, source, None)
    assert [step.name for step in steps] == ["preprocess", "network", *(["postprocess"] if outputs else [])]
    bad = [tried for tried in tried_of(hooks, source, None) if not tried.message.startswith("the network fails")]
    assert [tried for tried in bad if tried.status == 500] == []
    for command in (
        ["pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "."],
        ["ruff", "check", "--isolated", "--select", "E,F,I,UP,B,N,PT,ANN", "--ignore", "ANN401", "--line-length=120"],
        ["ruff", "format", "--isolated", "--check", "--line-length=120"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=hooks.parent, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("task", "make", "arguments", "why"),
    [
        ("image-classification", tiny_artifact, (), r"x:float32\[batch,4\], not float32 or uint8 of"),
        ("tabular", mean_of_images, ("3,8,10",), "not a row of numbers"),
        ("tabular", sum_artifact, (), "the network takes 2 inputs: a, b"),
        ("text", tiny_artifact, (), "neither one string nor input_ids"),
        ("text", text_artifact, (), "neither one string nor input_ids"),
        ("text", ids, (("input_ids", "mask"), "6"), "neither one string nor input_ids"),
        ("text", ids, (("input_ids",), "6"), "takes token ids"),
    ],
)
def test_a_network_that_does_not_fit_the_task_is_told_and_nothing_is_written(
    task: str, make: Any, arguments: tuple[Any, ...], why: str, tmp_path: Path
) -> None:
    source = Artifact.load(make(tmp_path / "artifact", *arguments))
    with pytest.raises(HookError, match=why):
        new_hooks(task, source, tmp_path / "made" / "hooks.py")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("there", ["hooks.py", "test_hooks.py"])
def test_a_file_that_is_there_stays(there: str, tmp_path: Path) -> None:
    source = Artifact.load(tiny_artifact(tmp_path / "artifact"))
    (tmp_path / there).write_text("mine")
    with pytest.raises(HookError, match=f"{there} is there already"):
        new_hooks("tabular", source, tmp_path / "hooks.py")
    assert [file.name for file in tmp_path.glob("*.py")] == [there]
    assert (tmp_path / there).read_text() == "mine"


@pytest.mark.parametrize("name", ["hooks.txt", "my-hooks.py", "class.py", "1.py"])
def test_a_name_that_can_t_be_imported_is_refused(name: str, tmp_path: Path) -> None:
    source = Artifact.load(tiny_artifact(tmp_path / "artifact"))
    with pytest.raises(HookError, match="no name of a Python module"):
        new_hooks("tabular", source, tmp_path / name)


@pytest.mark.parametrize("content", [None, b"x"])
def test_a_tokenizer_that_is_not_there_or_not_needed_is_refused(content: bytes | None, tmp_path: Path) -> None:
    source = Artifact.load(ids(tmp_path / "ids", ("input_ids",), "6") if content is None else one_text(tmp_path / "t"))
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(HookError, match=r"can't be read|takes no token ids"):
        new_hooks("text", source, tmp_path / "made" / "hooks.py", tmp_path / "tokenizer.json")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["x\n\nraise SystemExit(7)\n", "class", "9", 'a"""', "naïve"])
def test_no_name_out_of_a_file_becomes_code(name: str, tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "weight"], [name])
    weight = {"weight": np.ones((4, 3), np.float32)}
    graph = helper.make_graph(
        [node],
        "tiny",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 3])],
        [onnx.numpy_helper.from_array(weight["weight"], "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    arguments = ["--artifact", str(tmp_path / "model.onnx"), "--out", str(tmp_path / "hooks.py")]
    with pytest.raises(SystemExit) as ended:
        main(["hooks", "new", "--task", "tabular", *arguments])
    assert ended.value.code in (0, None, 2)
    if (tmp_path / "hooks.py").exists():
        text = (tmp_path / "hooks.py").read_text()
        assert "raise SystemExit" not in text
        compile(text, "hooks.py", "exec")


def test_the_command_says_what_it_wrote_and_how_to_try_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact, hooks = tiny_artifact(tmp_path / "artifact"), tmp_path / "hooks.py"
    with pytest.raises(SystemExit) as ended:
        main(["hooks", "new", "--task", "tabular", "--artifact", str(artifact), "--out", str(hooks)])
    assert ended.value.code in (0, None)
    told = capsys.readouterr().out
    assert f"wrote {hooks}" in told
    assert "fill in:    MEAN, STD, LABELS," in told
    line = next(line for line in told.splitlines() if "serve hooks check" in line)
    with pytest.raises(SystemExit):
        main(line[line.index("hooks check") :].split())
    assert "gives label = '0'" in capsys.readouterr().out


def answer_of(folder: Path, artifact: Path, given: str | None = None) -> tuple[str, float]:
    """What the hooks that are written say of a row of zeros."""
    source = Artifact.load(artifact)
    new_hooks("tabular", source, folder / "hooks.py")
    made = steps_of(folder / "hooks.py", source, None)[-1].made
    return made["label"][0].decode(), float(made["probability"][0])


@pytest.mark.parametrize("sizes", [{"emb": 5, "scores": 3}, {"x.y": 3, "x_y": 5}, {"features_out": 5, "Logits": 3}])
def test_of_several_outputs_the_class_scores_are_taken(sizes: dict[str, int], tmp_path: Path) -> None:
    """Outputs count up from 0, so the best class is the last of the one that was taken."""
    assert answer_of(tmp_path, outputs(tmp_path / "artifact", sizes))[0] == "2"


SOFTMAX = float(np.exp(2) / (np.exp(2) + 2))  # of 0, 0 and 2


@pytest.mark.parametrize(
    ("operators", "output", "probability"),
    [
        (("Identity",), "y", SOFTMAX),
        (("Softmax",), "y", SOFTMAX),
        (("LogSoftmax",), "y", SOFTMAX),
        (("Softmax", "Cast", "Identity"), "y", SOFTMAX),
        (("Exp", "Div"), "y", SOFTMAX),
        (("Sigmoid",), "y", float(1 / (1 + np.exp(-2)))),
        (("Softmax", "Sqrt"), "probabilities", float(np.sqrt(SOFTMAX))),
    ],
)
def test_probabilities_are_taken_as_they_are(
    operators: tuple[str, ...], output: str, probability: float, tmp_path: Path
) -> None:
    label, told = answer_of(tmp_path, ending(tmp_path / "artifact", operators, output))
    assert label == "2"
    assert told == pytest.approx(probability)


HIDING = ["np", "float", "int", "Answer", "LABELS", "likely", "__debug__", "features", "class", "x_", "label", "value"]


@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("size", [1, 3])
def test_no_name_of_an_output_hides_what_the_hooks_use(name: str, size: int, tmp_path: Path) -> None:
    source = Artifact.load(outputs(tmp_path / "artifact", {name: size}))
    new_hooks("tabular", source, tmp_path / "hooks.py")
    made = steps_of(tmp_path / "hooks.py", source, None)[-1].made
    if name != "features":  # which is none of class scores
        assert set(made) == ({"value"} if size == 1 else {"label", "probability"})


@pytest.mark.parametrize(
    ("name", "argument"),
    [("row", "row"), ("np", "features"), ("a.b", "features"), ("class", "features"), ("label", "features")],
)
def test_a_row_is_named_as_the_network_names_it(name: str, argument: str, tmp_path: Path) -> None:
    node = helper.make_node("Identity", [name], ["y"])
    made = artifact_of(tmp_path / "artifact", [node], [f"{name}:float32[batch,4]"], ["y:float32[batch,4]"])
    source = Artifact.load(made)
    new_hooks("tabular", source, tmp_path / "hooks.py")
    preprocess = load_hooks(tmp_path / "hooks.py", source.signature).preprocess
    assert preprocess is not None
    assert [item.name for item in preprocess.arguments] == [argument]


@pytest.mark.parametrize("output", ["image_embedding", "image"])
def test_what_is_served_has_one_name_for_one_thing(output: str, tmp_path: Path) -> None:
    node = helper.make_node("Identity", ["x"], [output])
    spec = "float32[batch,3,8,8]"
    source = Artifact.load(artifact_of(tmp_path / "artifact", [node], [f"x:{spec}"], [f"{output}:{spec}"]))
    new_hooks("image-classification", source, tmp_path / "hooks.py")
    assert steps_of(tmp_path / "hooks.py", source, None)[-1].made[output].shape == (3, 8, 8)


def written(folder: Path, task: str, artifact: Path, tokenizer: Path | None = None) -> Any:
    """The module that is written."""
    source = Artifact.load(artifact)
    new_hooks(task, source, folder / "made" / "hooks.py", tokenizer)
    return import_module(read_source(folder / "made" / "hooks.py"))


@pytest.mark.parametrize(
    ("padding", "pad", "ids_of"),
    [
        ({"direction": "left", "pad_id": 3, "pad_token": "[PAD]"}, "[PAD]", [3, 3, 3, 3, 1, 2]),
        ({"direction": "left", "pad_id": 3, "pad_token": "x", "pad_to_multiple_of": 8}, "x", [3, 3, 3, 3, 1, 2]),
        (None, "[PAD]", [1, 2, 3, 3, 3, 3]),
        (None, "<pad>", [1, 2, 3, 3, 3, 3]),
        (None, "no token for it", [1, 2, 0, 0, 0, 0]),
    ],
)
def test_tokens_are_padded_as_the_tokenizer_says(
    padding: dict[str, Any] | None, pad: str, ids_of: list[int], tmp_path: Path
) -> None:
    words = tokenizer_file(tmp_path, pad)
    if padding is not None:
        made = Tokenizer.from_file(str(words))
        made.enable_padding(**padding)
        made.enable_truncation(9, stride=7)
        made.save(str(words))
    hooks = written(tmp_path, "text", ids(tmp_path / "ids", ("input_ids",), "6"), words)
    assert hooks.preprocess("the fox").tolist() == ids_of


def test_the_artifacts_own_tokenizer_length_and_labels_are_taken(tmp_path: Path) -> None:
    words = ("negative", 'so "so"', "positive\u202e\ud800", "naïve \U0001f642")
    hooks = written(tmp_path, "text", positions(tmp_path / "artifact", 16, words))
    assert (hooks.LENGTH, tuple(hooks.LABELS)) == (16, words)
    assert hooks.TOKENIZER.token_to_id("fox") == 2
    made = steps_of(tmp_path / "made" / "hooks.py", Artifact.load(tmp_path / "artifact"), None)[-1].made
    assert made["label"][0].decode() == words[-1]


def test_a_tokenizer_that_is_given_stands_before_the_artifacts(tmp_path: Path) -> None:
    hooks = written(
        tmp_path, "text", positions(tmp_path / "artifact", 16, ("a", "b")), tokenizer_file(tmp_path, "<pad>")
    )
    assert hooks.TOKENIZER.token_to_id("<pad>") == 3


@pytest.mark.parametrize(
    ("most", "texts", "length"),
    [
        (16, ["fox", "the fox"], 8),
        (16, ["fox", "the fox " * 5], 16),
        (16, ["the fox " * 99], 16),
        (13, ["fox"], 1),
        (13, ["the fox " * 99, "fox"], 13),
    ],
)
def test_texts_are_as_long_as_their_batchs_longest(most: int, texts: list[str], length: int, tmp_path: Path) -> None:
    hooks = written(tmp_path, "text", positions(tmp_path / "artifact", most, ("a", "b")))
    made = hooks.preprocess(texts)
    assert {array.shape for array in made.values()} == {(len(texts), length)}
    assert made["attention_mask"].sum(1).tolist() == [min(len(text.split()), most) for text in texts]


def test_labels_of_another_number_of_classes_are_left_aside(tmp_path: Path) -> None:
    artifact = Artifact.load(positions(tmp_path / "artifact", 16, ("a", "b")))
    assert artifact.processor is not None
    replace(artifact, processor=replace(artifact.processor, labels=("a", "b", "c"))).save()
    assert written(tmp_path, "text", tmp_path / "artifact").LABELS == ["0", "1"]


@pytest.mark.parametrize("content", ["root:x:0:0\n", "[1]", "{}", "[" * 100_000, "\xff"])
def test_what_is_no_tokenizer_is_refused_and_nothing_is_written(content: str, tmp_path: Path) -> None:
    (tmp_path / "words.json").write_text(content, "latin-1")
    with pytest.raises(HookError, match="no such tokenizer"):
        written(tmp_path, "text", ids(tmp_path / "ids", ("input_ids",), "6"), tmp_path / "words.json")
    assert not (tmp_path / "made").exists()


def test_a_pipe_for_a_tokenizer_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "words.json")
    with pytest.raises(HookError, match="it is no file"):
        written(tmp_path, "text", ids(tmp_path / "ids", ("input_ids",), "6"), tmp_path / "words.json")


def png(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_images_of_16_bits_keep_their_grey(tmp_path: Path) -> None:
    hooks = written(tmp_path, "image-classification", mean_of_images(tmp_path / "artifact", "3,8,10"))
    grey = Image.fromarray(np.full((8, 10), 0x8000, np.uint16))
    assert hooks.preprocess(png(grey)).mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_images_are_turned_as_the_camera_was_held(kind: str, tmp_path: Path) -> None:
    hooks = written(tmp_path, "image-classification", mean_of_images(tmp_path / "artifact", "3,8,10"))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    picture = Image.new("RGB", (10, 8))
    picture.paste("white", (0, 0, 10, 4))
    made = hooks.preprocess(png(picture, kind, exif=exif))
    assert made[:, :3].max() < 0.1
    assert made[:, -3:].min() > 0.9


def test_damaged_exif_does_not_take_the_picture_along(tmp_path: Path) -> None:
    hooks = written(tmp_path, "image-classification", mean_of_images(tmp_path / "artifact", "3,8,10"))
    exif = Image.Exif()
    exif[0x010F] = "camera"
    bad = exif.tobytes().replace(b"\x01\x0f\x00\x02", b"\x01\x00\x00\x02")  # a text as the width
    made = hooks.preprocess(png(Image.new("RGB", (10, 8), "white"), "JPEG", exif=bad))
    assert made.min() > 0.9


@pytest.mark.parametrize("side", [9_000, 13_300, 60_000])
def test_an_image_of_too_many_pixels_is_not_decoded(side: int, tmp_path: Path) -> None:
    hooks = written(tmp_path, "image-classification", mean_of_images(tmp_path / "artifact", "3,8,10"))
    whole = png(Image.new("RGB", (1, 1)))
    size = b"IHDR" + side.to_bytes(4, "big") * 2 + whole[24:29]
    bomb = whole[:12] + size + zlib.crc32(size).to_bytes(4, "big") + whole[33:]
    with pytest.raises(ValueError, match="more than 64,000,000 pixels"):
        hooks.admit([bomb])


def test_images_are_made_as_the_artifacts_own_processor_makes_them(tmp_path: Path) -> None:
    hooks = written(
        tmp_path, "image-classification", own_images(tmp_path / "artifact", "3,8,8", CROPPED, tuple("abcde"))
    )
    assert list("abcde") == hooks.LABELS
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 64, 3), np.uint8))
    cut = picture.resize((32, 16), Image.Resampling.BICUBIC).crop((12, 4, 20, 12))
    made = hooks.preprocess(png(picture))
    assert made.dtype == np.float32
    wanted = (np.asarray(cut) / 255 - [0.5, 0.25, 0.0]) / [0.5, 0.5, 1]
    assert np.abs(made - wanted.transpose(2, 0, 1)).max() <= 2.01 / 255  # a rounding of the 8 bits


@pytest.mark.parametrize("size", [(100_000, 1), (1, 100_000), (1, 1), (7, 3)])
def test_no_shape_of_an_image_takes_more_memory_or_none_of_it(size: tuple[int, int], tmp_path: Path) -> None:
    hooks = written(tmp_path, "image-classification", own_images(tmp_path / "artifact", "3,8,8", CROPPED))
    assert hooks.preprocess(png(Image.new("RGB", size))).shape == (3, 8, 8)


@pytest.mark.parametrize(
    "changes",
    [{"image_mean": None}, {"image_std": [1, 0, 1]}, {"image_mean": [0.5]}, {"rescale_factor": 0.5},
     {"do_rescale": False}, {"image_std": [1, "x = 1", 1]}],
)  # fmt: skip
def test_settings_that_do_not_say_it_plainly_are_left_to_fill_in(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = own_images(tmp_path / "artifact", "3,8,8", CROPPED | changes, tuple("abcde"))
    with pytest.raises(SystemExit):
        main(
            [
                "hooks",
                "new",
                "--task",
                "image-classification",
                "--artifact",
                str(artifact),
                "-o",
                str(tmp_path / "h.py"),
            ]
        )
    assert "fill in:    MEAN, STD, as" in capsys.readouterr().out
    hooks = import_module(read_source(tmp_path / "h.py"))
    assert (hooks.MEAN.tolist(), hooks.STD.tolist(), hooks.SHORTER) == ([0, 0, 0], [1, 1, 1], 16)


def test_a_row_too_large_to_be_standardised_is_refused(tmp_path: Path) -> None:
    hooks = written(tmp_path, "tabular", tiny_artifact(tmp_path / "artifact"))
    hooks.STD = 0.1
    with np.errstate(over="ignore"), pytest.raises(ValueError, match="too large"):
        hooks.preprocess(np.array([3e38] * 4, np.float32))


@pytest.mark.parametrize("task", ["image-classification", "tabular"])
def test_a_network_whose_samples_no_memory_holds_is_refused(task: str, tmp_path: Path) -> None:
    spec = "float32[batch,3,60000,60000]" if task != "tabular" else "float32[batch,99999999999]"
    node = helper.make_node("Identity", ["x"], ["y"])
    with pytest.raises(HookError, match="more than 100,000,000 numbers a sample"):
        written(tmp_path, task, artifact_of(tmp_path / "artifact", [node], [f"x:{spec}"], [f"y:{spec}"]))


@pytest.mark.parametrize(
    ("task", "spec"),
    [
        ("image-classification", "float32[2,3,8,8]"),
        ("tabular", "float32[8,4]"),
        ("text", "int64[2,6]"),
        ("text", "string[2,1]"),
    ],
)
def test_a_fixed_batch_of_several_is_told(task: str, spec: str, tmp_path: Path) -> None:
    node = helper.make_node("Identity", ["input_ids"], ["y"])
    artifact = artifact_of(tmp_path / "artifact", [node], [f"input_ids:{spec}"], [f"y:{spec}"])
    with pytest.raises(HookError, match="its batch is not of any size") as caught:
        written(tmp_path, task, artifact)
    assert "first dimension" in caught.value.mend


@pytest.mark.parametrize("name", ["numpy.py", "typing.py", "pytest.py", "PIL.py", "tokenizers.py", "json.py"])
def test_hooks_that_would_stand_in_for_a_module_are_refused(name: str, tmp_path: Path) -> None:
    source = Artifact.load(tiny_artifact(tmp_path / "artifact"))
    with pytest.raises(HookError, match=f"a module {name.removesuffix('.py')!r} is imported"):
        new_hooks("tabular", source, tmp_path / "made" / name)


def test_a_name_too_long_for_the_disk_is_refused(tmp_path: Path) -> None:
    source = Artifact.load(tiny_artifact(tmp_path / "artifact"))
    with pytest.raises(HookError, match="can't be written: File name too long"):
        new_hooks("tabular", source, tmp_path / f"{'h' * 250}.py")
    assert [file.name for file in tmp_path.iterdir()] == ["artifact"]


def test_a_sample_by_hand_is_tried_too(tmp_path: Path) -> None:
    source = Artifact.load(tiny_artifact(tmp_path / "artifact"))
    new_hooks("tabular", source, tmp_path / "hooks.py")
    (tmp_path / "x.json").write_text(json.dumps({"x": [1, 2, 3, 4]}))
    steps = steps_of(tmp_path / "hooks.py", source, tmp_path / "x.json")
    assert steps[1].made["logits"].tolist() == [5, 6, 7]
