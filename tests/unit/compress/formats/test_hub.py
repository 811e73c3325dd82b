"""Hugging Face folders: loaded with their layers, and refused in three parts where they can't be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compress.console.wording import AssumedWarning
from compress.errors import CheckpointError, MissingExtraError
from compress.formats.checkpoint import load
from compress.formats.file_kind import FileKind, file_kind
from compress.formats.hub.config import config_of, offline
from compress.formats.hub.folder import open_hub_folder
from compress.formats.hub.pooling import MODES, Tail
from compress.formats.hub.tensors import state_of
from compress.jobs.source import load_source
from compress.model import call
from compress.options import SourceOptions
from tests.hub_models import LABELS, SIZES, bert_folder, with_config

MAMBA: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 16,
    "n_groups": 1, "chunk_size": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("hub") / "bert", shard="20KB")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "bert"))


def test_a_classifier_in_shards_answers_as_transformers_does_and_keeps_its_layers(folder: Path) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = load(folder)
    assert file_kind(folder) is FileKind.HUB_FOLDER
    assert [str(spec) for spec in model.signature.inputs] == [
        "input_ids:int64[batch,seq]", "attention_mask:int64[batch,seq]", "token_type_ids:int64[batch,seq]",
    ]  # fmt: skip
    assert [str(spec) for spec in model.signature.outputs] == ["logits:float32[batch,3]"]
    assert model.layered
    assert isinstance(model.module.get_submodule("bert.encoder.layer.0.intermediate.dense"), nn.Linear)
    ids = torch.randint(4, 60, (3, 9))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    with offline() as transformers, torch.no_grad():
        original = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
        wanted = original(ids, mask).logits
        arrays = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
        given = call(model.module, model.signature.inputs, arrays)
    torch.testing.assert_close(given["logits"], wanted)
    assert model.processor is not None
    assert (model.processor.kind, model.processor.labels, model.processor.max_length) == ("text", LABELS, 32)


def test_a_classifier_says_whether_its_labels_exclude_each_other(folder: Path) -> None:
    processors = [
        load(folder).processor,
        load(with_config(folder, problem_type="multi_label_classification")).processor,
    ]
    assert [each is not None and each.multi_label for each in processors] == [False, True]


def test_a_sentence_encoder_gives_what_its_modules_say(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path / "encoder", kind="BertModel")
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    model = load(folder)
    assert [str(spec) for spec in model.signature.outputs] == ["embeddings:float32[batch,32]"]
    ids, mask = torch.randint(4, 60, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    mask[1, 3:] = 0
    with offline() as transformers, torch.no_grad():
        states = transformers.BertModel.from_pretrained(folder).eval()(ids, mask).last_hidden_state
        given = call(model.module, model.signature.inputs, {"input_ids": ids, "attention_mask": mask})["embeddings"]
    means = torch.stack([states[0].mean(0), states[1, :3].mean(0)])
    torch.testing.assert_close(given, means / means.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("mode", MODES)
def test_no_pooling_looks_at_what_is_padded(mode: str) -> None:
    tail = Tail((mode,), nn.Sequential(), normalized=False)
    tokens, mask = torch.randn(2, 6, 4), torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    alone = tail(tokens[1:, :3], mask[1:, :3])
    torch.testing.assert_close(tail(tokens, mask)[1:], alone)
    spoilt = tokens.clone()
    spoilt[1, 3:] = 100.0
    torch.testing.assert_close(tail(spoilt, mask)[1:], alone)


def _index(folder: Path, name: str) -> None:
    path = folder / "model.safetensors.index.json"
    data = json.loads(path.read_text())
    data["weight_map"][next(iter(data["weight_map"]))] = name
    path.write_text(json.dumps(data))


def _first(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def _link_out(folder: Path) -> None:
    outside = _first(folder).rename(folder.parent / "outside.safetensors")
    (folder / "model-00001-of-00002.safetensors").unlink(missing_ok=True)
    _index(folder, "link.safetensors")
    (folder / "link.safetensors").symlink_to(outside)


def _no_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def _only_pickles(folder: Path) -> None:
    _no_weights(folder)
    torch.save({}, folder / "pytorch_model.bin")


def _no_head(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        state = {key: value for key, value in load_file(file).items() if not key.startswith("classifier")}
        save_file(state, file)


_EMPTY = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'


def _header(folder: Path, header: bytes) -> None:
    _first(folder).write_bytes(len(header).to_bytes(8, "little") + header)


def _shards(folder: Path, *names: str) -> None:
    """Files of these names alone, and no index."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    for name in names:
        (folder / f"{name}.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no weights": (_no_weights, "there is no model.safetensors", "save"),
    "a shard is missing": (lambda f: _first(f).unlink(), "is missing", "download"),
    "a shard's name leads out": (lambda f: _index(f, "../outside.safetensors"), "outside of it", "again"),
    "a shard's name is absolute": (lambda f: _index(f, "/etc/passwd"), "outside of it", "again"),
    "a shard is a link that leads out": (_link_out, "leads out of the folder", "in its place"),
    "a shard of none": (lambda f: _shards(f, "model-00001-of-00000"), "is none of 0 files", "again"),
    "a shard behind the last": (
        lambda f: _shards(f, *(f"model-{at:05}-of-00002" for at in (1, 2, 3))), "'model-00003-of-00002.safetensors'", "again",
    ),
    "shards without number": (lambda f: _shards(f, "model-00001-of-99999"), "over 1000 files", "again"),
    "two sets of shards": (
        lambda f: _shards(f, *(f"{stem}-0000{at}-of-00002" for stem in ("ema", "model") for at in (1, 2))),
        "'ema-00001-of-00002.safetensors' and 'model-00001-of-00002.safetensors' are of two sets", "take away",
    ),
    "shards of two numbers": (
        lambda f: _shards(f, "model-00001-of-00001", "model-00001-of-00002", "model-00002-of-00002"), "two sets", "take away",
    ),
    "a header is longer than its file": (
        lambda f: _first(f).write_bytes((1 << 62).to_bytes(8, "little") + b"{}"), "no whole safetensors", "again",
    ),
    "a tensor is larger than its file": (
        lambda f: _first(f).write_bytes(
            (len(h := b'{"a":{"dtype":"F32","shape":[9999999999],"data_offsets":[0,39999999996]}}')).to_bytes(8, "little") + h
        ),
        "no whole safetensors", "again",
    ),
    "weights are pickles": (_only_pickles, "pytorch_model.bin", "--trust"),
    "code of its own": (
        lambda f: with_config(f, model_type="evil", auto_map={"AutoModel": "evil.Model"}), "is never run", "compress.save",
    ),
    "quantized already": (
        lambda f: with_config(f, quantization_config={"quant_method": "gptq"}), "quantized already", "float32",
    ),
    "an architecture that there is not": (
        lambda f: with_config(f, architectures=["BertForMindReading"]), "does not have", "transformers",
    ),
    "a name that is no class": (lambda f: with_config(f, architectures=["os"]), "does not have", "transformers"),
    "a configuration of other sizes": (
        lambda f: with_config(f, intermediate_size=99), "intermediate.dense.bias is [64], not [99]", "again",
    ),
    "a configuration of endless layers": (lambda f: with_config(f, num_hidden_layers=10**9), "1,000,000,000", "again"),
    "a configuration of huge tables": (lambda f: with_config(f, vocab_size=2 * 10**9), "2,000,000,000", "again"),
    "a damaged configuration": (lambda f: (f / "config.json").write_text("{"), "JSON", "again"),
    "a setting that is no number": (
        lambda f: with_config(f, layer_norm_eps=float("nan")), "'layer_norm_eps' is NaN", "number of the training"
    ),
    "no number deep inside": (
        lambda f: with_config(f, task_specific_params={"a": [{"beam": [1.0, float("nan")]}]}), "'beam' is NaN", "again",
    ),
    "no number, as transformers writes it": (
        lambda f: with_config(f, layer_norm_eps={"__float__": "NaN"}), "'layer_norm_eps' is NaN", "again",
    ),
    "nothing but no number": (lambda f: (f / "config.json").write_text("NaN"), "it is NaN", "again"),
    "a tokenizer's setting that is no number": (
        lambda f: (f / "tokenizer_config.json").write_text('{"model_max_length": NaN}'),
        "'model_max_length' is NaN", "again",
    ),
    "a setting without an end": (
        lambda f: with_config(f, layer_norm_eps=float("inf")), "'layer_norm_eps' is Infinity", "number of the training",
    ),
    "a setting larger than any number": (
        lambda f: (f / "config.json").write_text('{"layer_norm_eps": 1e400}'), "'layer_norm_eps' is Infinity", "again",
    ),
    "no end, as transformers writes it": (
        lambda f: with_config(f, layer_norm_eps={"__float__": "-Infinity"}), "'layer_norm_eps' is Infinity", "again",
    ),
    "one name twice": (
        lambda f: _header(f, b'{"a":%s,"a":%s}' % (_EMPTY, _EMPTY)), "has the key 'a' twice", "again",
    ),
    "a name of two spellings": (
        lambda f: _header(f, b'{"a":%s,"\\u0061":%s}' % (_EMPTY, _EMPTY)), "has the key 'a' twice", "again",
    ),
    "tensors without number": (
        lambda f: _header(f, b"{%s}" % b",".join(b'"%d":%s' % (at, _EMPTY) for at in range(100_001))),
        "tensors, and 100,000 are taken", "again",
    ),
    "a header that is no JSON": (lambda f: _header(f, b"{"), "is no JSON", "again"),
    "a part of what is whole": (lambda f: None, "is one network", "leave --part out"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_folder_that_can_not_be_loaded_is_an_error_in_three_parts(folder: Path, fault: str) -> None:
    spoil, why, mend = BROKEN[fault]
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        load(folder, part="text" if "part" in fault else None)
    assert why in caught.value.why
    assert mend in caught.value.mend


NOT_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "is a pipe, and no file"),
    "a folder": (Path.mkdir, "is a folder, and no file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is a device, and no file"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "a link that leads to no file"),
}
OPTIONAL = (
    "tokenizer_config.json", "modules.json", "sentence_bert_config.json", "preprocessor_config.json",
    "special_tokens_map.json", "tokenizer.json", "config.json",
)  # fmt: skip


@pytest.mark.parametrize("sort", NOT_FILES)
@pytest.mark.parametrize("name", OPTIONAL)
def test_what_has_a_files_name_and_is_none_is_refused_and_not_taken_for_absent(
    folder: Path, name: str, sort: str
) -> None:
    put, why = NOT_FILES[sort]
    (folder / name).unlink(missing_ok=True)
    put(folder / name)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert f"{name} {why}" in caught.value.why or f"{name} is {why}" in caught.value.why
    assert "put the file in its place" in caught.value.mend


def test_a_network_that_fails_on_real_values_is_told_in_three_parts(tmp_path: Path) -> None:
    """torch.export runs it on shapes alone; here the values of a padded text lie beyond the table of positions."""
    with offline() as transformers:
        config = transformers.IBertConfig(**SIZES | {"max_position_embeddings": 18})
        transformers.IBertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert "its forward fails: IndexError: index out of range" in caught.value.why
    assert "config.json" in caught.value.mend


def test_a_graph_that_fails_at_another_batch_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Mamba 2's has the batch of the export in it; torch.fx would print the code around where it fails."""
    with offline() as transformers:
        transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**MAMBA)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert "at batch 3 it fails" in caught.value.why
    assert "reshape" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "unbounded", [float("inf"), {"__float__": "Infinity"}], ids=["literal", "as transformers' own"]
)
def test_what_has_no_bound_is_no_fault(unbounded: Any, tmp_path: Path) -> None:
    """Mamba 2's configuration has a limit without end, which is written in either way."""
    with offline() as transformers:
        transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**MAMBA)).save_pretrained(tmp_path)
        with_config(tmp_path, time_step_limit=[0.0, unbounded])
        assert "Infinity" in (tmp_path / "config.json").read_text()
        folder = open_hub_folder(tmp_path)
        read = config_of(transformers, folder, state_of(folder, trust=False))
    assert list(read.time_step_limit) == [0.0, float("inf")]


def test_a_network_without_a_bound_on_its_texts_loads(tmp_path: Path) -> None:
    """XLNet has -1 positions."""
    with offline() as transformers:
        config = transformers.XLNetConfig(vocab_size=60, d_model=16, n_layer=1, n_head=2, d_inner=16)
        transformers.XLNetForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.warns(AssumedWarning, match="mems left out"):
        loaded = load(tmp_path)
    assert loaded.signature.inputs[0].shape == ("batch", "seq")


def test_random_numbers_in_place_of_a_head_are_refused(folder: Path) -> None:
    _no_head(folder)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert "classifier.bias, classifier.weight" in caught.value.why


def test_code_that_a_folder_names_is_not_run_where_the_class_is_built_in(folder: Path, tmp_path: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with_config(folder, auto_map={"AutoModel": "evil.Model", "AutoConfig": "evil.Config"})
    with pytest.warns(AssumedWarning, match="not run"):
        assert load(folder).layered
    assert not (tmp_path / "ran").exists()


def test_a_name_on_a_hub_is_told_how_to_get() -> None:
    with pytest.raises(CheckpointError) as caught:
        load("sentence-transformers/all-MiniLM-L6-v2")
    assert "nothing is fetched" in caught.value.why
    assert "hf download sentence-transformers/all-MiniLM-L6-v2" in caught.value.mend


def test_a_snapshot_in_the_hubs_cache_has_its_files_beside(whole: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    shutil.copytree(whole, blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert load(snapshot).layered


@pytest.mark.parametrize("library", ["transformers", "safetensors"])
def test_a_library_that_is_missing_names_its_extra(whole: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError) as caught:
        load(whole)
    assert library in caught.value.why
    assert ".[hf]" in caught.value.mend


FAULTS = {
    "an operator that torch has not": 'raise RuntimeError("operator torchvision::nms does not exist")',
    "a library of another release": 'raise ImportError("undefined symbol: _ZN5torch")',
    "a part that is not there": "import torchvision.gone",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_torchvision_that_does_not_fit_torch_is_told_in_three_parts(fault: str, whole: Path, tmp_path: Path) -> None:
    """In a process of its own: transformers imports each class once, when it is asked for."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(FAULTS[fault])
    (tmp_path / "torchvision-0.1.dist-info").mkdir()
    (tmp_path / "torchvision-0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1\n"
    )
    there = os.pathsep.join((str(tmp_path), str(Path.cwd())))
    run = subprocess.run(
        [sys.executable, "-m", "compress", "inspect", str(whole)],
        env=os.environ | {"PYTHONPATH": there}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    what, why, mend = run.stderr.strip().splitlines()[-3:]
    assert what == "error: can't import a part of transformers"
    assert len(why) > len("  why: ")
    assert "install the torchvision that was built for this torch" in mend
    assert "Traceback" not in run.stderr
    assert run.returncode == 2


@pytest.mark.parametrize("whole_config", [True, False], ids=["with config.json", "without"])
@pytest.mark.parametrize(
    ("files", "why", "mend"),
    [
        (["onnx/model.onnx", "onnx/model_quantized.onnx"], "in ONNX: 'onnx/model.onnx', and 1 more", "onnx/model.onnx"),
        (["net.onnx"], "in ONNX: 'net.onnx'", "net.onnx"),
        (["model-q4.gguf"], "in GGUF ('model-q4.gguf')", "model.safetensors"),
    ],
    ids=["onnx/", "onnx", "gguf"],
)
def test_a_folder_whose_weights_are_in_another_form_says_what_to_name(
    files: list[str], why: str, mend: str, whole_config: bool, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"weights")
    if whole_config:
        (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    with pytest.raises(CheckpointError) as refused:
        load_source(tmp_path, SourceOptions())
    assert why in refused.value.why
    assert mend in refused.value.mend


def test_safetensors_alone_are_a_state_dict(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from tests.models import mlp

    save_file(mlp().state_dict(), tmp_path / "model.safetensors")
    model = load(tmp_path / "model.safetensors", model="tests.models:mlp", inputs=["x:float32[batch,4]"])
    assert model.layered
