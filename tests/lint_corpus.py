"""Model repositories with one thing wrong in each, and what the real Triton makes of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from tests.serve_models import tiny_artifact

NETWORK = """\
name: "{name}"
backend: "onnxruntime"
max_batch_size: 8
version_policy {{ latest {{ num_versions: 1 }} }}
input {{ name: "x" data_type: TYPE_FP32 dims: 4 }}
output {{ name: "logits" data_type: TYPE_FP32 dims: 3 }}
instance_group {{ count: 1 kind: KIND_CPU }}
dynamic_batching {{ }}
parameters {{ key: "intra_op_thread_count" value {{ string_value: "1" }} }}
model_warmup {{ name: "one" batch_size: 1 inputs {{ key: "x" value {{ data_type: TYPE_FP32 dims: 4 zero_data: true }} }} }}
"""
PYTHON = """\
name: "{name}"
backend: "python"
max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: 4 }}
output {{ name: "y" data_type: TYPE_FP32 dims: 4 }}
instance_group {{ count: 1 kind: KIND_CPU }}
dynamic_batching {{ }}
"""
ENSEMBLE = """\
name: "{name}"
platform: "ensemble"
max_batch_size: 8
input {{ name: "a" data_type: TYPE_FP32 dims: 4 }}
output {{ name: "b" data_type: TYPE_FP32 dims: 3 }}
ensemble_scheduling {{
  step {{
    model_name: "{name}_step"
    model_version: -1
    input_map {{ key: "x" value: "a" }}
    output_map {{ key: "logits" value: "b" }}
  }}
}}
"""
METRICS = """\
model_metrics {
  metric_control {
    metric_identifier { family: "nv_inference_first_response_histogram_ms" }
    histogram_options { buckets: 1 }
  }
}
"""
MODEL_PY = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy())])
            for r in requests
        ]
"""


@dataclass(frozen=True)
class Case:
    """One repository's worth of models, the first of which is asked for.

    Attributes:
        name: of the model, and of what is wrong with it.
        config: its config.pbtxt, before the name is filled in.
        swaps: pairs of text to replace in it.
        more: text to append.
        kind: "network", "python" or "ensemble": what else stands in the folder.
        files: changes the folders.
    """

    name: str
    kind: str = "network"
    swaps: tuple[tuple[str, str], ...] = ()
    more: str = ""
    files: Callable[[Path], None] = lambda _folder: None

    def write(self, repository: Path) -> None:
        """Make the folders."""
        texts = {"network": NETWORK, "python": PYTHON, "ensemble": ENSEMBLE}
        text = texts[self.kind].format(name=self.name)
        for old, new in self.swaps:
            assert old in text, (self.name, old)
            text = text.replace(old, new.replace("NAME", self.name))
        folder = repository / self.name
        write_model(folder, text + self.more, self.kind)
        if self.kind == "ensemble":
            write_model(repository / f"{self.name}_step", NETWORK.format(name=f"{self.name}_step"), "network")
        self.files(folder)


def write_model(folder: Path, config: str, kind: str) -> None:
    version = folder / "1"
    version.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    if kind == "network":
        made = tiny_artifact(folder.parent.parent / f"artifact-{folder.name}")
        shutil.copyfile(made / "model.onnx", version / "model.onnx")
    elif kind == "python":
        (version / "model.py").write_text(MODEL_PY, encoding="utf-8")
    else:
        (version / ".gitkeep").touch()


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'


def no_version(folder: Path) -> None:
    shutil.rmtree(folder / "1")


def version_in_words(folder: Path) -> None:
    (folder / "1").rename(folder / "v1")


def version_with_zeros(folder: Path) -> None:
    (folder / "1").rename(folder / "001")


def no_file(folder: Path) -> None:
    (folder / "1" / "model.onnx").unlink()


def other_file(folder: Path) -> None:
    (folder / "1" / "model.onnx").rename(folder / "1" / "network.onnx")


def damaged_file(folder: Path) -> None:
    (folder / "1" / "model.onnx").write_bytes(b"this is no model")


def cut_file(folder: Path) -> None:
    path = folder / "1" / "model.onnx"
    path.write_bytes(path.read_bytes()[:60])


def later_opset(folder: Path) -> None:
    path = folder / "1" / "model.onnx"
    model = onnx.load(path)
    model.opset_import[0].version = 999
    onnx.save(model, path)


def unknown_operator(folder: Path) -> None:
    info = helper.make_tensor_value_info
    node = helper.make_node("Flux", ["x"], ["logits"], domain="nobody.knows")
    graph = helper.make_graph(
        [node], "g", [info("x", TensorProto.FLOAT, ["n", 4])], [info("logits", TensorProto.FLOAT, ["n", 3])]
    )
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("nobody.knows", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), folder / "1" / "model.onnx")


def python_text(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "1" / "model.py").write_text(text, encoding="utf-8")

    return change


def no_config(folder: Path) -> None:
    (folder / "config.pbtxt").unlink()


def no_step(folder: Path) -> None:
    shutil.rmtree(folder.with_name(f"{folder.name}_step"))


def step_config(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder.with_name(f"{folder.name}_step") / "config.pbtxt"
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")

    return change


X = 'input { name: "x" data_type: TYPE_FP32 dims: 4 }'
LOGITS = 'output { name: "logits" data_type: TYPE_FP32 dims: 3 }'
BATCHING = "dynamic_batching { }"
OPENVINO = ('backend: "onnxruntime"', 'backend: "openvino"\ndefault_model_filename: "model.onnx"')
OPENVINO_PARAMETERS = (
    ("NUM_STREAMS", "2"), ("NUM_STREAMS", "auto"), ("NUM_STREAMS", "many"), ("NUM_STREAMS", "-1"),
    ("INFERENCE_NUM_THREADS", "1"), ("INFERENCE_NUM_THREADS", "one"), ("COMPILATION_NUM_THREADS", "1.5"),
    ("PERFORMANCE_HINT", "throughput"), ("PERFORMANCE_HINT", "FAST"), ("HINT_BF16", "NO"), ("HINT_BF16", "YES"),
    ("TARGET_DEVICE", "GPU"), ("CPU_EXTENSION_PATH", "/lib/own.so"), ("RESHAPE_IO_LAYERS", "YES"),
)  # fmt: skip
GROUP = "instance_group { count: 1 kind: KIND_CPU }"
WARMUP = "value { data_type: TYPE_FP32 dims: 4 zero_data: true }"
FIVE = """dynamic_batching {
  priority_levels: 2
  default_priority_level: 1
  priority_queue_policy { key: 5 value { max_queue_size: 1 } }
}"""
ORDERED_DELAY = """dynamic_batching {
  preserve_ordering: true
  default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 9 }
}"""
STEP_IN, STEP_OUT = 'input_map { key: "x" value: "a" }', 'output_map { key: "logits" value: "b" }'
CASES: tuple[Case, ...] = (
    Case("good_network"),
    Case("good_python", "python"),
    Case("good_ensemble", "ensemble"),
    # the text
    Case("unreadable", more="this is { no config"),
    Case("unknown_field", more="colour: 7\n"),
    Case("unknown_type", swaps=((X, X.replace("FP32", "FP31")),)),
    Case("other_name", swaps=(('name: "NAME"'.replace("NAME", "other_name"), 'name: "quite_another"'),)),
    Case("no_name", swaps=(('name: "no_name"\n', ""),)),
    Case("no_config", files=no_config),
    # what runs it
    Case("no_backend", swaps=(('backend: "onnxruntime"\n', ""),)),
    Case("unknown_backend", swaps=(('"onnxruntime"', '"nobody"'),)),
    Case("wrong_platform", swaps=(('backend: "onnxruntime"', 'backend: "onnxruntime" platform: "tensorrt_plan"'),)),
    Case("right_platform", swaps=(('backend: "onnxruntime"', 'backend: "onnxruntime" platform: "onnxruntime_onnx"'),)),
    Case("unknown_platform", swaps=(('backend: "onnxruntime"', 'platform: "something"'),)),
    # versions and files
    Case("no_version", files=no_version),
    Case("version_words", files=version_in_words),
    Case("version_zeros", files=version_with_zeros),
    Case("policy_without_version", swaps=(("latest { num_versions: 1 }", "specific { versions: 7 }"),)),
    Case("policy_of_none", swaps=(("latest { num_versions: 1 }", "latest { num_versions: 0 }"),)),
    Case("no_file", files=no_file),
    Case("other_file", files=other_file),
    Case("file_named", more='default_model_filename: "network.onnx"\n', files=other_file),
    Case("damaged_file", files=damaged_file),
    Case("cut_file", files=cut_file),
    Case("later_opset", files=later_opset),
    Case("unknown_operator", files=unknown_operator),
    # tensors
    Case("no_input", swaps=((X, ""),)),
    Case("input_twice", swaps=((X, X + "\n" + X),)),
    Case("input_renamed", swaps=((X, X.replace('"x"', '"z"')),)),
    Case("input_unnamed", swaps=((X, X.replace('name: "x"', "")),)),
    Case("input_typed_otherwise", swaps=((X, X.replace("FP32", "INT64")),)),
    Case("input_untyped", swaps=((X, X.replace("data_type: TYPE_FP32", "")),)),
    Case("input_longer", swaps=((X, X.replace("dims: 4", "dims: 5")),)),
    Case("input_with_batch", swaps=((X, X.replace("dims: 4", "dims: -1 dims: 4")),)),
    Case("input_without_dims", swaps=((X, X.replace(" dims: 4", "")),)),
    Case("input_of_zero", swaps=((X, X.replace("dims: 4", "dims: 0")),)),
    Case("input_below", swaps=((X, X.replace("dims: 4", "dims: -2")),)),
    Case("input_of_any_length", swaps=((X, X.replace("dims: 4", "dims: -1")),)),
    Case("input_reshaped_otherwise", swaps=((X, X.replace("dims: 4", "dims: 4 reshape { shape: 5 }")),)),
    Case("input_reshaped", swaps=((X, X.replace("dims: 4", "dims: 2 dims: 2 reshape { shape: 4 }")),)),
    Case("input_of_format", swaps=((X, X.replace("dims: 4", "format: FORMAT_NCHW dims: 4")),)),
    Case("input_of_shape", swaps=((X, X.replace("dims: 4", "dims: 4 is_shape_tensor: true")),)),
    Case("output_renamed", swaps=((LOGITS, LOGITS.replace('"logits"', '"other"')),)),
    Case("output_longer", swaps=((LOGITS, LOGITS.replace("dims: 3", "dims: 4")),)),
    Case("output_missing", swaps=((LOGITS, ""),)),
    Case("no_batch", swaps=(("max_batch_size: 8", "max_batch_size: 0"), (BATCHING, ""))),
    Case("negative_batch", swaps=(("max_batch_size: 8", "max_batch_size: -1"),)),
    # batching
    Case("preferred_too_large", swaps=((BATCHING, "dynamic_batching { preferred_batch_size: 16 }"),)),
    Case("preferred_zero", swaps=((BATCHING, "dynamic_batching { preferred_batch_size: 0 }"),)),
    Case("priority_without_default", swaps=((BATCHING, "dynamic_batching { priority_levels: 2 }"),)),
    Case(
        "priority_default_beyond",
        swaps=((BATCHING, "dynamic_batching { priority_levels: 2 default_priority_level: 3 }"),),
    ),
    Case(
        "priority_policy_beyond",
        swaps=((BATCHING, FIVE),),
    ),
    Case(
        "ordered_priorities",
        swaps=((BATCHING, "dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }"),),
    ),
    Case(
        "ordered_delay",
        swaps=((BATCHING, ORDERED_DELAY),),
    ),
    Case("batching_without_batch", swaps=(("max_batch_size: 8", "max_batch_size: 0"), (X, X.replace("dims: 4", "dims: -1 dims: 4")), (LOGITS, LOGITS.replace("dims: 3", "dims: -1 dims: 3")), (WARMUP, WARMUP.replace("dims: 4", "dims: 1 dims: 4")))),
    Case("cached_sequences", swaps=((BATCHING, "sequence_batching { }"),), more="response_cache { enable: true }\n"),
    Case("cached_decoupled", "python", more="response_cache { enable: true }\nmodel_transaction_policy { decoupled: true }\n"),
    Case("sequence_control_twice", swaps=((BATCHING, 'sequence_batching { control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: 0 int32_false_true: 1 } } control_input { name: "ALSO" control { kind: CONTROL_SEQUENCE_START int32_false_true: 0 int32_false_true: 1 } } }'),)),
    Case("sequence_control_unnamed", swaps=((BATCHING, "sequence_batching { control_input { control { kind: CONTROL_SEQUENCE_START int32_false_true: 0 int32_false_true: 1 } } }"),)),
    Case("sequence_control_of_one", swaps=((BATCHING, 'sequence_batching { control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: 1 } } }'),)),
    Case("sequence_correlation_typed", swaps=((BATCHING, 'sequence_batching { control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 } } }'),)),
    Case("sequence_preferred_too_large", swaps=((BATCHING, "sequence_batching { oldest { max_candidate_sequences: 4 preferred_batch_size: 16 } }"),)),
    Case("sequence_slots", swaps=((BATCHING, "sequence_batching { direct { minimum_slot_utilization: 1.5 } }"),)),
    # instances
    Case("gpu_without_one", swaps=((GROUP, "instance_group { count: 1 kind: KIND_GPU gpus: 0 }"),)),
    Case("cpu_with_gpus", swaps=((GROUP, "instance_group { count: 1 kind: KIND_CPU gpus: 0 }"),)),
    Case("model_with_gpus", "python", swaps=((GROUP, "instance_group { count: 1 kind: KIND_MODEL gpus: 0 }"),)),
    Case("profile_on_onnx", swaps=((GROUP, 'instance_group { count: 1 kind: KIND_CPU profile: "0" }'),)),
    Case("negative_count", swaps=((GROUP, "instance_group { count: -1 kind: KIND_CPU }"),)),
    # warm-up
    Case("warmup_unknown_input", swaps=(('key: "x" value { data', 'key: "z" value { data'),)),
    Case("warmup_without_data", swaps=((WARMUP, WARMUP.replace("zero_data: true", "")),)),
    Case("warmup_other_dims", swaps=((WARMUP, WARMUP.replace("dims: 4", "dims: 7")),)),
    Case("warmup_other_type", swaps=((WARMUP, WARMUP.replace("FP32", "INT64")),)),
    Case("warmup_any_length", swaps=((WARMUP, WARMUP.replace("dims: 4", "dims: -1")),)),
    Case("warmup_batch_too_large", swaps=(("batch_size: 1 inputs", "batch_size: 9 inputs"),)),
    Case("warmup_no_batch", swaps=(("batch_size: 1 inputs", "batch_size: 0 inputs"),)),
    Case("warmup_no_file", swaps=((WARMUP, WARMUP.replace("zero_data: true", 'input_data_file: "x.bin"')),)),
    # what random changes found
    Case("input_twice_unasked", "python", swaps=(('output {', X + "\noutput {"),)),
    Case("output_twice", swaps=((LOGITS, LOGITS + "\n" + LOGITS),)),
    Case("decoupled", more="model_transaction_policy { decoupled: true }\n"),
    Case("threads_in_words", swaps=(('string_value: "1"', 'string_value: "many"'),)),
    Case("threads_unsaid", swaps=(('string_value: "1"', ""),)),
    Case("graph_level", more="optimization { graph { level: 5 } }\n"),
    Case("batch_output_unknown", "python", more='batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "z" source_input: "x" }\n'),
    Case("batch_input_unknown", "python", more='batch_input { kind: BATCH_ELEMENT_COUNT target_name: "n" data_type: TYPE_FP32 source_input: "z" }\n'),
    Case("metric_without_family", more="model_metrics { metric_control { histogram_options { buckets: 1 } } }\n"),
    Case("metrics_of_a_newer_triton", more=METRICS),
    Case("limit_of_a_newer_triton", "ensemble", swaps=(("ensemble_scheduling {", "ensemble_scheduling { max_inflight_requests: 2"),)),
    Case("file_of_another", "python", more='default_model_filename: "model.onnx"\n'),
    Case("ensemble_with_file", "ensemble", more='default_model_filename: "model.onnx"\n'),
    # the OpenVINO backend
    Case("openvino", swaps=(OPENVINO,)),
    Case("openvino_without_its_file", swaps=(('backend: "onnxruntime"', 'backend: "openvino"'),)),
    Case("openvino_on_gpu", swaps=(OPENVINO, (GROUP, "instance_group { count: 1 kind: KIND_GPU gpus: 0 }"))),
    Case("openvino_decoupled", swaps=(OPENVINO,), more="model_transaction_policy { decoupled: true }\n"),
    *(
        Case(f"openvino_{number}_{name.lower()}", swaps=(OPENVINO,), more=parameter(name, value))
        for number, (name, value) in enumerate(OPENVINO_PARAMETERS)
    ),
    # ensembles
    Case("steps_missing", "ensemble", swaps=((ENSEMBLE[ENSEMBLE.index("ensemble_scheduling"):].format(name="steps_missing"), ""),)),
    Case("no_steps", "ensemble", swaps=((ENSEMBLE[ENSEMBLE.index("ensemble_scheduling"):].format(name="no_steps"), "ensemble_scheduling { }\n"),)),
    Case("ensemble_with_backend", "ensemble", swaps=(('platform: "ensemble"', 'platform: "ensemble" backend: "python"'),)),
    Case("step_unknown", "ensemble", files=no_step),
    Case("step_unnamed", "ensemble", swaps=(('    model_name: "step_unnamed_step"\n', ""),)),
    Case("step_of_version_nine", "ensemble", swaps=(("model_version: -1", "model_version: 9"),)),
    Case("step_of_itself", "ensemble", swaps=(('"step_of_itself_step"', '"step_of_itself"'),)),
    Case("step_input_unknown", "ensemble", swaps=((STEP_IN, STEP_IN.replace('"x"', '"z"')),)),
    Case("step_input_left_out", "ensemble", swaps=((STEP_IN, ""),)),
    Case("step_output_unknown", "ensemble", swaps=((STEP_OUT, STEP_OUT.replace('"logits"', '"z"')),)),
    Case("step_output_left_out", "ensemble", swaps=((STEP_OUT, ""),)),
    Case("step_from_nowhere", "ensemble", swaps=((STEP_IN, STEP_IN.replace('"a"', '"nowhere"')),)),
    Case("step_to_nowhere", "ensemble", swaps=((STEP_OUT, STEP_OUT.replace('"b"', '"nowhere"')),)),
    Case("step_of_smaller_batch", "ensemble", swaps=(("max_batch_size: 8", "max_batch_size: 16"),)),
    Case("ensemble_without_batch", "ensemble", swaps=(("max_batch_size: 8", "max_batch_size: 0"),)),
    Case("ensemble_of_other_dims", "ensemble", swaps=(('"a" data_type: TYPE_FP32 dims: 4', '"a" data_type: TYPE_FP32 dims: 5'),)),
    Case("ensemble_of_other_type", "ensemble", swaps=(('"a" data_type: TYPE_FP32', '"a" data_type: TYPE_INT64'),)),
    Case("ensemble_of_broken_step", "ensemble", files=step_config('"onnxruntime"', '"nobody"')),
    Case("ensemble_with_batching", "ensemble", more="dynamic_batching { }\n"),
    Case("ensemble_with_instances", "ensemble", more="instance_group { count: 1 kind: KIND_CPU }\n"),
    # Python
    Case("python_syntax", "python", files=python_text("class TritonPythonModel:\n    def execute(self, requests)\n")),
    Case("python_without_class", "python", files=python_text("def execute(requests):\n    return []\n")),
    Case("python_without_execute", "python", files=python_text("class TritonPythonModel:\n    pass\n")),
    Case("python_missing_import", "python", files=python_text("import no_such_package_at_all\n" + MODEL_PY)),
)  # fmt: skip
