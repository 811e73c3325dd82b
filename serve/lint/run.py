"""Lint a whole repository."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from compress.artifact import RUNTIME_EXTRAS, RUNTIME_NAMES, Runtime
from compress.host.cores import cores_here
from serve.lint import advice
from serve.lint.batching_rules import batching_rules, cache_rules, sequence_rules
from serve.lint.config_rules import (
    backend_rules,
    batch_tensor_rules,
    instance_rules,
    metric_rules,
    newer_rules,
    tensor_rules,
)
from serve.lint.elsewhere import is_elsewhere, untold
from serve.lint.ensemble_rules import ensemble_rules, step_rules
from serve.lint.extra_rules import (
    agent_rules,
    environment_rules,
    label_rules,
    name_rules,
    provider_rules,
    version_number_rules,
)
from serve.lint.file_rules import file_rules, onnx_files, onnx_rules, runtime_of, session_rules, version_rules
from serve.lint.finding import Finding, Findings, error, shown, unreadable, warning
from serve.lint.hook_rules import hook_rules
from serve.lint.model import Model, read
from serve.lint.openvino_rules import openvino_file_rules, openvino_place_rules, openvino_rules
from serve.lint.operator_rules import operator_rules
from serve.lint.packed_rules import packed_rules
from serve.lint.plan_rules import Version, plan_rules
from serve.lint.python_rules import python_rules
from serve.lint.warmup_rules import warmup_rules
from serve.pack.onnx_reader import OnnxFile, read_onnx
from serve.repository.folders import folders_of, hidden_of

__all__ = ["lint"]

EMBEDDED = (
    "onnxruntime",
    "python",
    *(("pytorch",) if importlib.util.find_spec("torch") else ()),
    *(("openvino",) if importlib.util.find_spec("openvino") else ()),
)
OWN_RULES = (
    backend_rules,
    tensor_rules,
    batch_tensor_rules,
    metric_rules,
    session_rules,
    openvino_rules,
    batching_rules,
    sequence_rules,
    cache_rules,
    warmup_rules,
    ensemble_rules,
    version_rules,
    version_number_rules,
    label_rules,
    name_rules,
    hook_rules,
    python_rules,
    advice.instance_advice,
    advice.queue_advice,
    advice.file_advice,
)
READING = (hook_rules, python_rules)
"""Those that open files of the model."""


def lint(
    repository: Path, *, container: bool = False, tensorrt: Version | None = None, packed: bool = True
) -> list[Finding]:
    """What Triton would refuse or do badly, by model, errors first.

    The rules are those of Triton's core (model_config_utils.cc and ensemble_utils.cc of triton-inference-server/core),
    of the ONNX Runtime backend, and of what measurements taught.

    Args:
        repository: a model repository; nothing in it is changed or run, but ONNX Runtime opens the ONNX files.
        container: it is for a Triton elsewhere: backends, GPUs, cores and packages of this machine say nothing.
        tensorrt: the TensorRT of that Triton, as far as it is known.
        packed: whether files must be those that `serve pack` wrote, where it wrote any.

    Raises:
        RepositoryError: there is no such folder, or no model in it.
    """
    found: list[Finding] = []
    models: dict[str, Model] = {}
    for folder in folders_of(repository):
        try:
            models[folder.name] = read(folder)
        except FileNotFoundError:
            found.append(error(folder.name, "there is no config.pbtxt", "write the model with `serve pack`"))
        except (OSError, ValueError) as err:
            far = is_elsewhere(folder, folder / "config.pbtxt")
            why = "it is a link out of the repository, and what it holds is not told" if far else str(err)
            found.append(error(folder.name, f"config.pbtxt can't be read: {why}", "mend that line"))
    for name in hidden_of(repository):
        what = "its name begins with a dot: `serve up` leaves it alone, a Triton in a container takes it for a model"
        found.append((error if container else warning)(shown(name), what, "move it out of the repository"))
    paths: dict[Runtime, list[Path]] = {"onnxruntime": [], "openvino": []}
    for model in list(models.values()):
        try:
            paths[runtime_of(model)] += onnx_files(model)
        except OSError as err:
            found.append(unreadable(model.name, err))
            del models[model.name]
    files: dict[Path, OnnxFile] = {}
    for runtime, those in paths.items():
        held = read_onnx(those, runtime) if those else {}
        if held is None:
            found.append(warning(models[those[0].parent.parent.name].name,
                                 f"no ONNX file for {RUNTIME_NAMES[runtime]} was looked into",
                                 f"pip install {runtime}, or the extra [{RUNTIME_EXTRAS[runtime]}]"))  # fmt: skip
        files |= held or {}
    for model in models.values():
        for rule in OWN_RULES:
            if not (container and rule is python_rules):
                found += _readable(model, untold(model, rule(model)) if rule in READING else rule(model))
        found += instance_rules(model, None if container else _gpus())
        for here in () if container else (newer_rules, agent_rules, environment_rules):
            found += _readable(model, here(model))
        found += _readable(model, packed_rules(model)) if packed else ()
        found += provider_rules(model, container=container)
        found += openvino_place_rules(model, container=container)
        found += () if container else openvino_file_rules(model, files)
        found += _readable(model, file_rules(model, None if container else EMBEDDED))
        found += advice.batch_advice(model, files)
        found += untold(model, onnx_rules(model, files))
        found += untold(model, operator_rules(model, files, container=container))
    found += _of_plans(models, tensorrt)
    if container:
        found += [finding for model in models.values() for finding in advice.open_threads(model)]
    else:
        found += advice.core_advice(list(models.values()), cores_here())
    _add_steps(models, found)
    return sorted(found, key=lambda item: (item.model, item.severity))


def _of_plans(models: dict[str, Model], tensorrt: Version | None) -> Findings:
    for finding in plan_rules(models.values(), tensorrt):
        yield from untold(models[finding.model], [finding])


def _readable(model: Model, findings: Findings) -> Findings:
    """The findings of a rule, and where a file that it looks for can't be looked at, that: names are the file's own."""
    try:
        yield from findings
    except OSError as err:
        yield unreadable(model.name, err)


def _add_steps(models: dict[str, Model], found: list[Finding]) -> None:
    """Ensembles last, and again until none is added: one that can't be loaded breaks those that it is part of."""
    told: set[str] = set()
    while True:
        broken = {item.model for item in found if item.severity == "error"}
        new = [
            item
            for model in models.values()
            if model.name not in told
            for item in step_rules(model, models, broken - {model.name})
        ]
        if not new:
            return
        told |= {item.model for item in new}
        found += new


def _gpus() -> int:
    """NVIDIA GPUs that this machine has."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
