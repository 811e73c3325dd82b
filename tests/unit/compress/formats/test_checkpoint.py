"""Every kind of model file is told apart, and loads or says what to add; no pickle runs unasked."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import compress
from compress.errors import CheckpointError, SignatureError, ToolkitError
from compress.formats.checkpoint import fingerprint, load, save
from compress.formats.file_kind import FileKind, file_kind
from tests.models import ZOO, build, mlp

X = "x:float32[batch,4]"


def exported(path: Path) -> None:
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(mlp().eval(), (torch.zeros(2, 4),), dynamic_shapes=({0: batch},))
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        torch.export.save(program, file)


def scripted(path: Path) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(mlp().eval(), torch.zeros(2, 4)), path)  # type: ignore[no-untyped-call]


WRITERS: dict[str, Callable[[Path], Any]] = {
    "compress.save": lambda path: save(mlp(), path, inputs=X),
    "state_dict": lambda path: torch.save(mlp().state_dict(), path),
    "trainer's checkpoint": lambda path: torch.save(
        {"epoch": 3, "state_dict": mlp().state_dict(), "args": argparse.Namespace(lr=0.1), "best": np.float64(0.9)}, path
    ),
    "Lightning's, with paths": lambda path: torch.save(
        {
            "state_dict": mlp().state_dict(), "hyper_parameters": argparse.Namespace(data=Path("/data"), lr=0.1),
            "callbacks": {"best": PureWindowsPath("C:/best.ckpt"), "last": PurePosixPath("last.ckpt")},
        }, path
    ),
    "DataParallel": lambda path: torch.save({f"module.{k}": v for k, v in mlp().state_dict().items()}, path),
    "legacy": lambda path: torch.save(mlp().state_dict(), path, _use_new_zipfile_serialization=False),
    "pickled torch.nn module": lambda path: torch.save(mlp(), path),
    "pickled class": lambda path: torch.save(build("residual")[0], path),
    "TorchScript": scripted,
    "exported program": exported,
}  # fmt: skip


@pytest.mark.parametrize(
    ("writer", "kind", "arguments"),
    [
        ("compress.save", FileKind.PICKLE, {}),
        ("state_dict", FileKind.PICKLE, {"model": "tests.models:mlp", "inputs": [X]}),
        ("trainer's checkpoint", FileKind.PICKLE, {"model": "tests.models:mlp", "inputs": [X]}),
        ("Lightning's, with paths", FileKind.PICKLE, {"model": "tests.models:mlp", "inputs": [X]}),
        ("DataParallel", FileKind.PICKLE, {"model": "tests.models:mlp", "inputs": [X]}),
        ("legacy", FileKind.LEGACY_PICKLE, {"model": "tests.models:mlp", "inputs": [X]}),
        ("pickled torch.nn module", FileKind.PICKLE, {"inputs": [X]}),
        ("TorchScript", FileKind.TORCHSCRIPT, {"inputs": [X], "trust": True}),
        ("exported program", FileKind.EXPORTED_PROGRAM, {}),
    ],
)
def test_each_kind_loads_with_what_it_needs(
    tmp_path: Path, writer: str, kind: FileKind, arguments: dict[str, Any]
) -> None:
    path = tmp_path / "model.pt"
    WRITERS[writer](path)
    model = load(path, **arguments)
    assert file_kind(path) is kind
    assert [spec.shape for spec in model.signature.inputs] == [("batch", 4)]
    assert [spec.shape for spec in model.signature.outputs] == [("batch", 3)]
    assert model.module(torch.zeros(5, 4)).shape == (5, 3)


@pytest.mark.parametrize(
    ("writer", "arguments", "mend"),
    [
        ("state_dict", {}, "--model package.module:factory"),
        ("trainer's checkpoint", {}, "--model package.module:factory"),
        ("legacy", {}, "--model package.module:factory"),
        ("state_dict", {"model": "tests.models:mlp"}, "--input 'x:float32[batch,3,224,224]'"),
        ("pickled torch.nn module", {}, "--input"),
        ("pickled class", {"inputs": [X]}, "--trust"),
        ("TorchScript", {"trust": True}, "--input"),
        ("TorchScript", {"inputs": [X]}, "--trust"),
        ("state_dict", {"model": "tests.models:nothing", "inputs": [X]}, "--model"),
        ("state_dict", {"model": "tests.models:Residual", "inputs": [X]}, "factory that made them"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, writer: str, arguments: dict[str, Any], mend: str) -> None:
    path = tmp_path / "model.pt"
    WRITERS[writer](path)
    with pytest.raises(ToolkitError) as caught:
        load(path, **arguments)
    assert mend in caught.value.mend


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_malicious_pickle_is_not_run_and_its_call_is_named(tmp_path: Path, legacy: bool) -> None:
    path, owned = tmp_path / "model.pt", tmp_path / "owned"
    torch.save({"state_dict": Malicious(owned)}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError) as caught:
        load(path, inputs=[X])
    assert not owned.exists()
    assert legacy or "posix.system" in caught.value.why
    assert "--trust" in caught.value.mend


def test_a_malicious_bare_pickle_is_not_run(tmp_path: Path) -> None:
    path, owned = tmp_path / "model.pkl", tmp_path / "owned"
    path.write_bytes(pickle.dumps(Malicious(owned)))
    with pytest.raises(CheckpointError):
        load(path, inputs=[X])
    assert not owned.exists()


def rewritten(path: Path, change: Callable[[str, bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = {name: change(name, archive.read(name)) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def pickled(target: Path) -> bytes:
    file = io.BytesIO()
    torch.save((Malicious(target), {}), file)
    return file.getvalue()


DEFAULTDICT = """[1, {"type": "collections.defaultdict", "children_spec": [], "context":
{"default_factory_module": "owned_by_a_file", "default_factory_name": "x", "dict_context": []}}]"""
ENUM = '[1, {"type": "builtins.tuple", "context": "{\\"__enum__\\": true, \\"fqn\\": \\"owned_by_a_file:x\\", \\"name\\": \\"y\\"}", "children_spec": []}]'


def with_spec(data: bytes, spec: str) -> bytes:
    """The graph's file with another tree structure of its inputs."""
    content = json.loads(data)
    signatures = [entry["signature"] for entry in content["graph_module"]["module_call_graph"] if entry["signature"]]
    assert signatures
    for signature in signatures:
        signature["in_spec"] = spec
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("entry", "change", "why"),
    [
        ("models/model.json", lambda data, _: with_spec(data, DEFAULTDICT), "default_factory_module"),
        ("models/model.json", lambda data, _: with_spec(data, DEFAULTDICT.replace("default_f", "default\\u005ff")), "default_factory_module"),
        ("models/model.json", lambda data, _: with_spec(data, ENUM), "__enum__"),
        ("weights_config.json", lambda data, _: data.replace(b'"use_pickle": false', b'"use_pickle": true'), "pickled"),
        ("models/model.json", lambda data, _: data.replace(b"torch.ops.aten.relu.default", b"torch.hub.load"), "torch.hub.load"),
        ("models/model.json", lambda data, _: data.replace(b"torch.ops.aten.relu.default", b"torch.ops.load_library"), "load_library"),
        ("models/model.json", lambda data, _: re.sub(rb'"expr_str": "[^"]*"', b'"expr_str": "exec(chr(49))"', data), "exec"),
        ("models/model.json", lambda data, _: re.sub(rb'"expr_str": "[^"]*"', b'"expr_str": "a.b"', data), "a.b"),
    ],
)  # fmt: skip
def test_an_exported_program_that_would_run_code_is_refused(
    tmp_path: Path, entry: str, change: Callable[[bytes, Path], bytes], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, owned = tmp_path / "model.pt2", tmp_path / "owned"
    (tmp_path / "owned_by_a_file.py").write_text(f"open({str(owned)!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    exported(path)
    rewritten(path, lambda name, data: change(data, owned) if name.endswith(entry) else data)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert "it would run code" in caught.value.what
    assert why in caught.value.why
    assert not owned.exists()


def test_a_trusted_pickle_loads(tmp_path: Path) -> None:
    WRITERS["pickled class"](tmp_path / "model.pt")
    model = load(tmp_path / "model.pt", inputs=["image:float32[batch,3,16,16]"], trust=True)
    assert model.signature.outputs[0].shape == ("batch", 5)


@pytest.mark.parametrize("writer", ["compress.save", "state_dict", "TorchScript", "exported program", "legacy"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.95])
def test_a_truncated_file_is_an_error_in_three_parts(tmp_path: Path, writer: str, share: float) -> None:
    path = tmp_path / "model.pt"
    WRITERS[writer](path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CheckpointError) as caught:
        load(path, inputs=[X], model="tests.models:mlp")
    assert all((caught.value.what, caught.value.why, caught.value.mend))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b"\x08\x0a onnx", "ONNX"),
        (b"hello world, this is text", "nothing that torch.save writes"),
        (b"\x10\0\0\0\0\0\0\0{}", "safetensors"),
        (b"PK\x05\x06" + 18 * b"\0", "zip archive without a data.pkl"),
    ],
)  # fmt: skip
def test_other_files_are_told_by_what_they_are(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert why in caught.value.why


def test_nan_weights_are_refused_by_name(tmp_path: Path) -> None:
    module = mlp()
    module.get_parameter("2.bias").data[1] = float("nan")
    save(module, tmp_path / "model.pt", inputs=X)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "model.pt")
    assert "2.bias holds 1 NaN" in caught.value.why


@pytest.mark.parametrize("name", ZOO)
def test_save_finds_the_outputs_of_every_network(tmp_path: Path, name: str) -> None:
    module, inputs = build(name)
    save(module, tmp_path / "model.pt", inputs=inputs)
    outputs = load(tmp_path / "model.pt").signature.outputs
    assert all(spec.batched for spec in outputs)
    expected = {"encoder": ["logits", "states"], "two_inputs": ["output_0", "output_1"]}
    assert [spec.name for spec in outputs] == expected.get(name, ["output"])


def test_save_takes_example_tensors_and_names_for_the_outputs(tmp_path: Path) -> None:
    compress.save(mlp(), tmp_path / "model.pt", inputs={"x": torch.zeros(1, 4)}, outputs=["logits"])
    signature = load(tmp_path / "model.pt").signature
    assert [str(spec) for spec in (*signature.inputs, *signature.outputs)] == [X, "logits:float32[batch,3]"]


def test_save_refuses_inputs_that_the_model_does_not_take(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"what was there")
    with pytest.raises(SignatureError, match="does not run on inputs of its signature"):
        save(mlp(), path, inputs="x:float32[batch,5]")
    assert path.read_bytes() == b"what was there"


def test_save_refuses_a_forward_that_cannot_be_traced_and_leaves_the_old_file(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    path = tmp_path / "model.pt"
    path.write_bytes(b"what was there")
    with pytest.raises(CheckpointError) as caught:
        save(Branching(), path, inputs=X)
    assert "--model package.module:factory" in caught.value.mend
    assert path.read_bytes() == b"what was there"
    assert list(tmp_path.iterdir()) == [path]


def test_a_fingerprint_follows_weights_code_and_signature(tmp_path: Path) -> None:
    def of(module: nn.Module, inputs: str = X) -> str:
        return fingerprint(load(save(module, tmp_path / "model.pt", inputs=inputs)))

    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module, factor: int) -> None:
            super().__init__()
            self.inner, self.factor = inner, factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.factor  # type: ignore[no-any-return]

    module = mlp()
    first = of(module)
    assert of(module) == first
    assert of(module, "y:float32[batch,4]") != first
    assert of(Doubled(module, 2)) != of(Doubled(module, 3))
    module.get_parameter("0.bias").data += 1e-3
    assert of(module) != first


def test_an_input_whose_name_is_too_long_to_load_is_not_saved_and_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        save(nn.Linear(4, 3), tmp_path / "model.pt", inputs=f"{'x' * 10_000}:float32[batch,4]")
    assert "10,017 letters" in caught.value.why
    assert "short name" in caught.value.mend
    assert len(str(caught.value)) < 1000
    assert not list(tmp_path.iterdir())
    save(nn.Linear(4, 3), tmp_path / "model.pt", inputs=f"{'x' * 150}:float32[batch,4]")
    assert load(tmp_path / "model.pt").signature.inputs[0].name == "x" * 150
