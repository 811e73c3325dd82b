"""Files of each kind that `compress` and `serve` read from others, changed, and the commands that read them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from compress.pipeline import _digest
from compress.prune.sensitivity import GroupSensitivity, Sensitivity
from tests.hostile.mutations import TEXTS, bytes_changed, onnx_changed, placed, rezipped, toml_of, tree_changed
from tests.hostile.torch_cases import ONE, Lines, checkpoint, native, native_file, pack_of, program

__all__ = ["KINDS", "made"]

CLOSED = "http://127.0.0.1:9"  # discard: nobody answers


def made(kind: str, random: Random, folder: Path, outside: Path) -> Lines:
    """Write a case into an empty folder, and give the commands that read it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return KINDS[kind](random, folder, outside)


@functools.cache
def _graphs() -> tuple[onnx.ModelProto, ...]:
    """A plain one; with an If and a Loop; with functions; quantized, with weights in a file beside it."""

    def tensor(name: str, *shape: Any, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, list(shape))

    def model(nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], **more: Any) -> onnx.ModelProto:
        graph = helper.make_graph(nodes, "g", [tensor("x", "batch", 4)], [tensor("y", "batch", 4)], weights)
        opsets = [helper.make_opsetid("", 20), *([helper.make_opsetid("own", 1)] if more else [])]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="t", **more)

    def const(name: str, value: Any, kind: Any = np.float32) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(np.asarray(value, kind), name)

    node = helper.make_node
    weight = const("w", np.ones((4, 4)))
    plain = model([node("MatMul", ["x", "w"], ["h"], name="m"), node("Relu", ["h"], ["r"]), node("Reshape", ["r", "s"], ["y"])],
                  [weight, const("s", [-1, 4], np.int64)])  # fmt: skip
    inner = [helper.make_graph([node(op, ["x"], ["z"])], "b", [], [tensor("z", "batch", 4)]) for op in ("Relu", "Neg")]
    body = helper.make_graph(
        # Bounded twice: few changes leave it without an end, for which each command waits (tests/hostile/endless.py).
        [node("Less", ["i", "m"], ["c2"]), node("MatMul", ["a", "w"], ["a2"])], "body",
        [tensor("i", kind=7), tensor("c", kind=9), tensor("a", "batch", 4)], [tensor("c2", kind=9), tensor("a2", "batch", 4)],
    )  # fmt: skip
    flow = model([node("If", ["yes"], ["v"], then_branch=inner[0], else_branch=inner[1]),
                  node("Loop", ["n", "yes", "v"], ["y"], body=body)],
                 [weight, const("yes", True, np.bool_), const("n", 3, np.int64), const("m", 4, np.int64)])  # fmt: skip
    opsets = [helper.make_opsetid("", 20)]
    twice = helper.make_function("own", "Twice", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])], opsets)
    functions = model([node("Twice", ["x"], ["y"], domain="own")], [], functions=[twice])
    packed = model([node("QuantizeLinear", ["x", "sc", "z"], ["q"]), node("DequantizeLinear", ["q", "sc", "z"], ["d"]),
                    node("Gemm", ["d", "w", "b"], ["g"]), node("ConstantOfShape", ["s"], ["k"]), node("Add", ["g", "k"], ["e"]),
                    node("Slice", ["e", "s", "t"], ["f"]), node("Expand", ["e", "s"], ["y"])],
                   [weight, const("b", np.ones(4)), const("sc", 0.1), const("z", 3, np.uint8), const("s", [1, 4], np.int64),
                    const("t", [9, 9], np.int64)])  # fmt: skip
    large = packed.graph.initializer[0]
    large.ClearField("raw_data")
    large.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "weights.bin", "offset": "0", "length": "64"}.items():
        large.external_data.add(key=key, value=value)
    return plain, flow, functions, packed


def _onnx_file(random: Random, folder: Path, outside: Path, name: str = "model.onnx") -> bytes:
    """Written into the folder, with a file of weights, and links that lead outside."""
    (folder / "weights.bin").write_bytes(np.ones(64, np.float32).tobytes())
    (folder / "link").symlink_to(outside / "canary_secret")
    (folder / "linked").symlink_to(outside)
    graph = random.choice(_graphs())
    whole = onnx_changed(graph, random, outside)
    if random.random() < 0.15:
        whole = bytes_changed(graph.SerializeToString(), random)
    (folder / name).write_bytes(whole)
    return whole


def onnx_files(random: Random, folder: Path, outside: Path) -> Lines:
    _onnx_file(random, folder, outside)
    path = str(folder / "model.onnx")
    lines: Lines = [
        ("compress", ["inspect", path]),
        ("compress", ["lint", path]),
        ("compress", ["measure", path, *ONE]),
    ]
    if random.random() < 0.1:
        lines.append(("serve", pack_of(folder / "model.onnx")))
        lines.append(("serve", ["lint", str(folder / "repository")]))
    return lines


@functools.cache
def _artifact() -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """artifact.json, report.json and model.onnx of a small one."""
    measured = {
        "macs": 112, "params": 131, "size_bytes": 524, "accuracy": 0.5, "agreement": 1.0, "metric": "top1", "value": 0.5,
        "value_low": 0.4, "value_high": 0.6, "drop": 0.1, "drop_low": 0.0, "drop_high": 0.2, "cosine_similarity": 0.99,
        "max_abs_error": 0.1, "batch_difference": 1e-7, "latency_p50_ms": 0.04, "latency_p99_ms": 3.2,
        "latency_p50_low_ms": 0.03, "latency_p50_high_ms": 0.05, "latency_rounds_ms": [0.04, 0.05], "load_ms": 2.0,
        "peak_memory_bytes": 1000, "runtime": "onnxruntime",
    }  # fmt: skip
    stages = [
        {"stage": name, "did": "it was done", "measured": measured, "seconds": 0.5, "warnings": ["w"], "details": {"layers": {"int8": 2}},
         "options": {"target": "cpu"}}
        for name in ("original", "original_onnx", "prune_channels", "quantize_onnx")
    ]  # fmt: skip
    told = {
        "schema_version": 1, "toolkit_version": "0.1.0", "format": "onnx", "model_file": "model.onnx", "sha256": "",
        "signature": {"inputs": ["x:float32[batch,4]"], "outputs": ["y:float32[batch,4]"]}, "stages": stages,
    }  # fmt: skip
    report = {
        "source": "model.pt", "evaluation": {"samples": 64, "confidence": 0.95, "data": "d"}, "environment": {"cpu": "c", "cores": 2},
        "warnings": [], "measuring": {"seconds": 1.0, "latency": {"told": "t"}},
    }  # fmt: skip
    return told, report, _graphs()[0].SerializeToString()


def artifact(random: Random, folder: Path, outside: Path) -> Lines:
    told, report, whole = _artifact()
    if random.random() < 0.2:
        whole = _onnx_file(random, folder, outside)
    (folder / "model.onnx").write_bytes(whole)
    told = told | {"sha256": hashlib.sha256(whole).hexdigest()}
    if random.random() < 0.2:
        told = told | {
            "signature": told["signature"]
            | {"inputs": ["x:float32[batch,seq]"], "sizes": {"seq": {"size": 4, "source": "s"}}}
        }
    if random.random() < 0.8:
        told = tree_changed(told, random, outside)
    else:
        report = tree_changed(report, random, outside)
    (folder / "report.json").write_bytes(placed(report))
    text = placed(told)
    (folder / "artifact.json").write_bytes(text if random.random() < 0.9 else bytes_changed(text, random))
    path = str(folder)
    lines: Lines = [("compress", ["inspect", path]), ("compress", ["measure", path, *ONE])]
    if random.random() < 0.3:
        lines.append(("compress", ["lint", path]))
        lines.append(("compress", ["inspect", path, "--roofline"]))
        np.savez(folder / "eval.npz", x=np.ones((3, 4), np.float32), label=np.arange(3))
        data = ["--eval", str(folder / "eval.npz"), "--url", CLOSED]
        lines.append(("serve", ["verify", "m", "--artifact", path, *data]))
    lines.append(("serve", pack_of(folder)))
    if random.random() < 0.3:
        lines.append(("serve", ["lint", str(folder / "repository")]))
        lines.append(("serve", ["check", str(folder / "repository")]))
    return lines


def plan(random: Random, folder: Path, outside: Path) -> Lines:
    """An artifact of a TensorRT engine, with its engine.json."""
    told, _, _ = _artifact()
    content = b"ptrt" + bytes(60)
    (folder / "model.plan").write_bytes(content)
    (folder / "model.onnx").write_bytes(_artifact()[2])
    told = told | {"format": "plan", "model_file": "model.plan", "sha256": hashlib.sha256(content).hexdigest()}
    profile = {"x": [[1, 4], [8, 4], [32, 4]]}
    engine = {
        "profiles": [profile, {"x": [[1, 4], [16, 4], [64, 4]]}],
        "version_compatible": True,
        "tensorrt": "10.5",
        "gpu": "g",
    }
    (folder / "engine.json").write_bytes(placed(tree_changed(engine, random, outside)))
    told = tree_changed(told, random, outside, 1) if random.random() < 0.2 else told
    (folder / "artifact.json").write_bytes(placed(told))
    repository = str(folder / "repository")
    return [("compress", ["inspect", str(folder)]), ("compress", ["measure", str(folder), *ONE]), ("serve", pack_of(folder)),
            ("serve", ["lint", repository, "--tensorrt", "10.5"]), ("serve", ["check", repository])]  # fmt: skip


def sensitivity(random: Random, folder: Path, outside: Path) -> Lines:
    group = GroupSensitivity(layers=("0",), width=8, ratios=(0.25, 0.5), drops=(0.1, 0.9), macs_removed=(0.2, 0.4))
    whole = Sensitivity(
        original=0.9,
        metric="top1",
        data="d",
        model="m",
        samples=64,
        groups=(group,),
        left_alone={"3": "it is the last"},
    )
    told = tree_changed(json.loads(whole.text()), random, outside)
    (folder / "sensitivity.json").write_bytes(
        placed(told) if random.random() < 0.9 else bytes_changed(placed(told), random)
    )
    (folder / "good.pt").write_bytes(native_file(0)[0])
    return [("prune", [str(folder / "good.pt"), str(folder / "sensitivity.json")])]


def recipe(random: Random, folder: Path, outside: Path) -> Lines:
    """Tried with --dry-run, as a recipe may ask for whatever a command line may."""
    np.savez(folder / "none.npz", x=np.ones((64, 4), np.float32), label=np.arange(64) % 3)
    (folder / "good.pt").write_bytes(native_file(0)[0])
    values: dict[str, Any] = {
        "command": "export", "checkpoint": str(folder / "good.pt"), "output": str(folder / "out"), "prune": 0.5, "epochs": 3,
        "int8": "static", "calibration": str(folder / "none.npz"), "batches": [1, 8], "seed": 1, "smooth": True,
        "eval": str(folder / "none.npz"), "target": "cpu", "input": ["x:float32[batch,4]"],
    }  # fmt: skip
    changed = tree_changed(values, random, folder)  # it may name any file: none outside is a secret of it
    path = folder / "r.toml"
    try:
        text = toml_of({str(key).encode("utf-8", "replace").decode(): value for key, value in changed.items()}).encode(
            "utf-8", "replace"
        )
    except (ValueError, AttributeError):
        text = placed(changed)
    path.write_bytes(text if random.random() < 0.8 else bytes_changed(text, random))
    return [("compress", ["run", str(path), "--dry-run"])]


def data(random: Random, folder: Path, outside: Path) -> Lines:
    """.npz and .npy files, and folders of them."""
    kinds = random.choice(
        (("<f4", "<i8"), ("<f4", "S3"), ("<f4", "U2"), ("<f2", "<i4"), ("S2", "S2"), (">f4", "?"), ("<f8", "<c8"))
    )
    arrays = {
        "x": np.ones((64, 4)).astype(kinds[0]),
        random.choice(("label", "y", "z")): np.arange(64).astype(kinds[1]),
    }
    if kinds[1] == "S3":
        arrays["label"] = np.frombuffer(random.randbytes(192), "S3")
    out = io.BytesIO()
    (np.savez_compressed if random.random() < 0.5 else np.savez)(out, **arrays)  # type: ignore[arg-type]
    path = folder / "data.npz"
    whole = out.getvalue()
    path.write_bytes(
        rezipped(whole, random)
        if random.random() < 0.7
        else whole
        if random.random() < 0.5
        else bytes_changed(whole, random)
    )
    (folder / "good.pt").write_bytes(native_file(0)[0])
    lines: Lines = [("compress", ["measure", str(folder / "good.pt"), "--data", str(path), *ONE]),
                    ("serve", ["verify", "m", "--eval", str(path), "--url", CLOSED])]  # fmt: skip
    if random.random() < 0.3:
        files = folder / "files"
        files.mkdir()
        for label in ("a", random.choice(("b", "\udce9", "c\nd"))):
            (files / label).mkdir()
            (files / label / "x.npy").write_bytes(random.randbytes(30))
        if random.random() < 0.7:
            text = b"file,label\na/x.npy,a\n"
            name = random.choice(TEXTS).encode("utf-8", "surrogatepass")
            more = b'"' + name.replace(b'"', b'""') + b'",b\n'
            (files / "labels.csv").write_bytes(bytes_changed(text, random) if random.random() < 0.5 else text + more)
        lines.append(("serve", ["verify", "m", "--eval", str(files), "--url", CLOSED]))
    return lines


def stage(random: Random, folder: Path, outside: Path) -> Lines:
    """A work folder, whose digests fit what was changed."""
    work = folder / "work"
    shutil.copytree(_work(), work)
    kept = sorted(path.parent for path in work.rglob("stage.json"))
    for at in random.sample(range(len(kept)), random.choice((1, 1, 2))):
        place = kept[at]
        told = json.loads((place / "stage.json").read_bytes())
        if random.random() < 0.8:
            told = tree_changed(told, random, outside)
        elif (place / "model.onnx").exists():
            (place / "model.onnx").unlink()
            (place / "weights.bin").unlink(missing_ok=True)
            _onnx_file(random, place, outside)
        if isinstance(told, dict) and random.random() < 0.95:
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                told["sha256"] = _digest(told, place)
        (place / "stage.json").write_bytes(placed(told))
    return [("resume", [str(work), str(folder / "out")])]


@functools.cache
def _work() -> Path:
    from tests.hostile.programs import resume

    folder = Path(tempfile.mkdtemp())
    resume([str(folder / "work"), str(folder / "out")])
    return folder / "work"


def repository(random: Random, folder: Path, outside: Path) -> Lines:
    """A packed model's configuration and provenance, changed by whoever could write them."""
    shutil.copytree(_packed(), folder / "repository")
    version = folder / "repository/m/1"
    match random.randrange(3):
        case 0:
            told = json.loads((version / "provenance.json").read_bytes())
            (version / "provenance.json").write_bytes(placed(tree_changed(told, random, outside)))
        case 1:
            text = (version.parent / "config.pbtxt").read_bytes()
            (version.parent / "config.pbtxt").write_bytes(bytes_changed(text, random))
        case 2:
            words = (version.parent / "config.pbtxt").read_text().split()
            words[random.randrange(len(words))] = random.choice(
                ("[", "}", "-1", "9" * 30, '"x\\n"', '"../a"', '"\\033[2J"', *TEXTS[:20])
            )
            (version.parent / "config.pbtxt").write_bytes(" ".join(words).encode("utf-8", "replace"))
    told, _, whole = _artifact()
    (folder / "model.onnx").write_bytes(whole)
    (folder / "artifact.json").write_bytes(placed(told | {"sha256": hashlib.sha256(whole).hexdigest()}))
    name = str(folder / "repository")
    return [
        ("serve", ["lint", name]),
        ("serve", ["check", name]),
        ("serve", pack_of(folder)),
        ("serve", ["lint", name]),
    ]


@functools.cache
def _packed() -> Path:
    from serve.cli.main import main

    folder = Path(tempfile.mkdtemp())
    told, _, whole = _artifact()
    (folder / "model.onnx").write_bytes(whole)
    (folder / "artifact.json").write_bytes(placed(told | {"sha256": hashlib.sha256(whole).hexdigest()}))
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(pack_of(folder))
    return folder / "repository"


KINDS: dict[str, Callable[[Random, Path, Path], Lines]] = {
    "native": native, "checkpoint": checkpoint, "program": program, "onnx": onnx_files, "artifact": artifact, "plan": plan,
    "sensitivity": sensitivity, "recipe": recipe, "data": data, "stage": stage, "repository": repository,
}  # fmt: skip
