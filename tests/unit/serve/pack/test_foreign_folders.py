"""Repositories and artifacts of someone else's: each is told of in words, whatever stands in it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.errors import RepositoryError
from serve.cli.main import main
from serve.lint.ensemble_rules import _reaches
from serve.lint.model import read
from serve.lint.run import lint
from serve.pack.engine_file import for_plan
from serve.pack.options import PackOptions
from serve.pack.source import load_source
from serve.pack.write import pack
from serve.repository.provenance import read_provenance, verify_checksums
from tests.serve_models import tiny_artifact
from tests.unit.serve.pack.test_engine import IMAGE, artifact, image

CLASS = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1, 4 ] }
"""
PYTHON = f'backend: "python"{TENSORS}'
ONNX = f'backend: "onnxruntime"{TENSORS}'
LONG = "a" * 5000
DEEP = ("x = " + "-" * 200_000 + "1\n", "x = a" + ".b" * 100_000 + "\n", "x = " + "lambda: " * 3000 + "1\n")


def model(folder: Path, config: str, **files: str) -> Path:
    (folder / "models/m/1").mkdir(parents=True)
    (folder / "models/m/config.pbtxt").write_text(config)
    for name, text in files.items():
        (folder / "models/m/1" / f"{name}.py").write_text(text)
    return folder / "models"


def told(repository: Path) -> str:
    return "\n".join(finding.what for finding in lint(repository))


@pytest.mark.parametrize("code", DEEP)
@pytest.mark.parametrize("name", ["model", "hooks"])
def test_python_that_no_parser_takes_is_an_error_of_its_file(tmp_path: Path, name: str, code: str) -> None:
    stages = 'parameters { key: "stages" value { string_value: "{}" } }'
    repository = model(tmp_path, PYTHON + stages, **{"model": CLASS, name: code + CLASS})
    assert "it is nested too deeply" in told(repository)


def test_a_module_that_no_file_stands_for_is_there(tmp_path: Path) -> None:
    assert "imports" not in told(model(tmp_path, PYTHON, model=f"import __main__\n{CLASS}"))


@pytest.mark.parametrize(
    "config",
    [
        ONNX.replace("TYPE_FP32", "99"),
        ONNX + "instance_group { kind: 77 }",
        ONNX + 'model_warmup { name: "w" inputs { key: "x" value { data_type: 99 dims: [ 1, 4 ] zero_data: true } } }',
    ],
)
def test_a_number_that_is_no_word_of_tritons_is_refused(tmp_path: Path, config: str) -> None:
    assert "which has no name in Triton" in told(model(tmp_path, config))


@pytest.mark.parametrize(
    "value",
    ["[1]", "[" * 100_000, '[\\"' + "x; " + "(" * 20_000 + '\\"]', "null", '[\\"\\"]'],
    ids=lambda text: text[:9],
)
def test_requirements_that_are_none(tmp_path: Path, value: str) -> None:
    parameter = f'parameters {{ key: "requirements" value {{ string_value: "{value}" }} }}'
    assert "its parameter requirements can't be read" in told(model(tmp_path, PYTHON + parameter, model=CLASS))


@pytest.mark.parametrize(
    "config",
    [
        f'{PYTHON}default_model_filename: "{LONG}"',
        f'{ONNX}default_model_filename: "{LONG}"',
        f'{ONNX}runtime: "{LONG}"',
        ONNX.replace("}\n", f'label_filename: "{LONG}" }}\n').replace(f'label_filename: "{LONG}" ', "", 1),
        f'{PYTHON}parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{LONG}" }} }}',
        (f'{ONNX}model_warmup {{ name: "w" batch_size: 1 inputs {{ key: "x" value {{ data_type: TYPE_FP32 dims: [ 1, 4 ] '
        f'input_data_file: "{LONG}" }} }} }}'),
    ],
    ids=["python", "onnx", "runtime", "labels", "environment", "warmup"],
)  # fmt: skip
def test_names_that_no_file_can_have_are_told(tmp_path: Path, config: str) -> None:
    assert "File name too long" in told(model(tmp_path, config))


def test_a_number_of_ten_thousand_digits_is_none(tmp_path: Path) -> None:
    parameter = f'parameters {{ key: "intra_op_thread_count" value {{ string_value: "{"9" * 10_000}" }} }}'
    assert "the parameter intra_op_thread_count" in told(model(tmp_path, ONNX + parameter))


def test_ensembles_of_ensembles_are_followed_without_end(tmp_path: Path) -> None:
    """Each stage names the next twice over: by all ways there are 2**39, and deeper than Python calls."""
    for number in range(1200):
        folder = tmp_path / f"models/m{number}"
        (folder / "1").mkdir(parents=True)
        steps = f'step {{ model_name: "m{number + 1}" }} step {{ model_name: "m{min(number + 2, 1200)}" }}'
        (folder / "config.pbtxt").write_text(f'platform: "ensemble" ensemble_scheduling {{ {steps} }}')
    models = {f"m{number}": read(tmp_path / f"models/m{number}") for number in range(1200)}
    assert _reaches(models["m0"], models, "m1200")
    assert not _reaches(models["m0"], models, "m0")


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(20 << 30)  # sparse


@pytest.mark.parametrize(("make", "why"), [(_pipe, "it is no file"), (_large, "the others are holes")])
def test_a_configuration_that_is_none_is_not_read(tmp_path: Path, make: Callable[[Path], None], why: str) -> None:
    repository = model(tmp_path, "")
    (repository / "m/config.pbtxt").unlink()
    make(repository / "m/config.pbtxt")
    assert why in told(repository)
    with pytest.raises(RepositoryError, match="can't replace"):
        pack(tiny_artifact(tmp_path / "artifact"), repository=repository, name="m")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"schema_version": 1, "stages": [], "files": {"../../elsewhere": "0"}}',
        '{"schema_version": 1, "stages": [], "files": {"/etc/hostname": "0"}}',
        '{"schema_version": 1, "stages": [], "files": {"model.onnx": 1}}',
        f'{{"schema_version": 1, "stages": [], "files": {{"{"a" * 300}": "0"}}}}',
        '{"schema_version": 1, "stages": [], "files": {"\\ud800": "0"}}',
        '{"schema_version": 1, "stages": [], "files": {}, "drop": 1e999}',
        '{"schema_version": 1, "stages": [], "files": {}, "metric": 7}',
        '{"schema_version": 1, "stages": [{}], "files": {}}',
    ],
)
def test_provenance_of_someone_elses_is_read_by_its_types(tmp_path: Path, text: str) -> None:
    repository = tmp_path / "models"
    pack(tiny_artifact(tmp_path / "artifact"), repository=repository, name="tiny")
    (repository / "tiny/1/provenance.json").write_text(text)
    with pytest.raises(RepositoryError, match=r"can't read .*provenance\.json"):
        read_provenance(repository / "tiny/1")
    with pytest.raises(RepositoryError, match=r"can't read .*provenance\.json"):
        verify_checksums(repository)


@pytest.mark.parametrize(
    "shapes",
    [
        [[], [], []],
        [[1, 3, 8, 8], [1, 3, 8, 8]],
        [[1, 3, 8, 8], [1, 3, 8, 8], [1, 3, 8]],
        [[1, 3, 8], [1, 3, 8], [1, 3, 8]],
        [[-1, 3, 8, 8], [1, 3, 8, 8], [1, 3, 8, 8]],
        [[1, 3, 8, 8], [1, 3, 8, 8], [1, 3, 8, float("inf")]],
        [[1, 3, 8, 8], [1, 3, 8, 8], [1, 3, 8, 1 << 31]],
        [[2, 3, 8, 8], [1, 3, 8, 8], [1, 3, 8, 8]],
        ["1388", "1388", "1388"],
    ],
    ids=str,
)
def test_profiles_that_no_engine_has_are_damage(tmp_path: Path, shapes: list[Any]) -> None:
    _refused(tmp_path, json.dumps({"profiles": [{"x": shapes}]}))


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"profiles": {"x": 1}}', '{"profiles": [{}, {"x": [[1, 3, 8, 8]]}]}', "[]"],
    ids=lambda t: t[:9],
)
def test_an_engine_json_of_another_kind_is_damage(tmp_path: Path, text: str) -> None:
    _refused(tmp_path, text)


def _refused(tmp_path: Path, text: str) -> None:
    source = artifact(tmp_path / "engine", IMAGE, image(1))
    (source / "engine.json").write_text(text)
    with pytest.raises(RepositoryError, match="it is damaged"):
        for_plan(load_source(source), PackOptions())


def test_profiles_speak_of_the_same_inputs(tmp_path: Path) -> None:
    told_of = image(1)[0]
    _refused(tmp_path, json.dumps({"profiles": [told_of, {"other": told_of["x"]}]}))


@pytest.mark.parametrize("name", ["m\udcff", "m\x1b[2J"])
def test_names_of_folders_do_not_steer_the_terminal(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = model(tmp_path, PYTHON)
    (repository / "m").rename(repository / name)
    with pytest.raises(SystemExit):
        main(["lint", str(repository)])
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert (said.out + said.err).encode()
