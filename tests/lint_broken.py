"""More models with one thing wrong in each: what people rename, move, damage and misspell, hooks among it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from serve.pack.write import pack
from serve.repository.provenance import PROVENANCE_FILE, write_provenance
from tests.lint_corpus import GROUP, LOGITS, MODEL_PY, Case, X, parameter, python_text
from tests.serve_models import HOOKS, hook_file, tiny_artifact

__all__ = ["BROKEN", "Packed"]

Change = Callable[[Path], None]
EXECUTE = "def execute(self, requests):"
BEFORE, AFTER = "def preprocess(text: str)", "def postprocess(logits: np.ndarray)"


@dataclass(frozen=True)
class Packed:
    """A model that `serve pack` wrote, with its hooks in one step before and one after the network.

    Attributes:
        name: of the model, and of what is wrong with it.
        swaps: pairs of text to replace in the hooks of both steps; the checksums are then written anew.
        change: of the repository, given the path of the model's folder; the checksums stay.
    """

    name: str
    swaps: tuple[tuple[str, str], ...] = ()
    change: Change = lambda _folder: None

    def write(self, repository: Path) -> None:
        """Make the folders."""
        beside = repository.parent / f"packed-{self.name}"
        pack(tiny_artifact(beside), repository=repository, name=self.name, hooks=hook_file(beside, HOOKS))
        for file in repository.glob(f"{self.name}*/1/hooks.py") if self.swaps else ():
            text = file.read_text()
            for old, new in self.swaps:
                assert old in text
                text = text.replace(old, new)
            file.write_text(text)
            (file.parent / PROVENANCE_FILE).unlink()
            write_provenance(file.parent, None)
        self.change(repository / self.name)


def label(text: str) -> tuple[tuple[str, str], ...]:
    return ((LOGITS, LOGITS.replace("dims: 3", f'dims: 3 label_filename: "{text}"')),)


WARM_STRINGS = """\
model_warmup {{
  name: "one" batch_size: 1 inputs {{ key: "x" value {{ data_type: TYPE_STRING dims: 4 {}: true }} }}
}}
"""


def state(initial: str) -> tuple[tuple[str, str], ...]:
    """A state that begins with something."""
    begun = f"data_type: TYPE_FP32 dims: 1 initial_state {{ {initial} }}"
    held = f'state {{ input_name: "a" output_name: "b" {begun} }}'
    return (("dynamic_batching { }", f"sequence_batching {{ {held} }}"),)


def written(where: str, content: bytes | None = b"one\ntwo\nthree\n") -> Change:
    """A file in the model's folder; a folder, where there is no content."""

    def change(folder: Path) -> None:
        path = folder / where
        if path.is_file():
            path.unlink()
        if content is None:
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    return change


def moved(old: str, new: str) -> Change:
    def change(folder: Path) -> None:
        (folder / old).rename(folder / new)

    return change


def copied(old: str, new: str) -> Change:
    def change(folder: Path) -> None:
        if (folder / old).is_dir():
            shutil.copytree(folder / old, folder / new)
        else:
            (folder / new).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / old, folder / new)

    return change


def linked(where: str, target: str) -> Change:
    def change(folder: Path) -> None:
        path = folder / where
        if path.exists():
            path.rename(folder / f"was-{path.name}")
        path.symlink_to(target)

    return change


def encoded(encoding: str, more: str = "") -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.pbtxt"
        path.write_bytes((path.read_text() + more).encode(encoding))

    return change


def replaced(where: str, old: str, new: str) -> Change:
    def change(folder: Path) -> None:
        path = folder / where
        assert old.encode() in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(old.encode(), new.encode()))

    return change


def all_of(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def in_step(stage: str, change: Change) -> Change:
    return lambda folder: change(folder.with_name(f"{folder.name}_{stage}"))


def appended(where: str, content: bytes) -> Change:
    def change(folder: Path) -> None:
        with (folder / where).open("ab") as file:
            file.write(content)

    return change


def py(old: str, new: str) -> Change:
    assert old in MODEL_PY
    return python_text(MODEL_PY.replace(old, new))


BROKEN: tuple[Case | Packed, ...] = (
    # labels
    Case("label_missing", swaps=label("labels.txt")),
    Case("label_there", swaps=label("labels.txt"), files=written("labels.txt")),
    Case("label_folder", swaps=label("labels.txt"), files=written("labels.txt", None)),
    Case("label_empty", swaps=label("labels.txt"), files=written("labels.txt", b"")),
    Case("label_elsewhere", swaps=label("1/labels.txt"), files=written("1/labels.txt")),
    Case("label_of_a_python_model", "python", swaps=(("dims: 4 }\ninstance", 'dims: 4 label_filename: "l.txt" }\ninstance'),)),
    # names
    Case("two words"),
    Case("größe"),
    Case("a$b"),
    Case("a&b"),
    Case("a'b"),
    Case("a+b"),
    Case("a.b"),
    Case("two words of python", "python"),
    Case("größe_python", "python"),
    # parameters of ONNX Runtime
    Case("mode_sequential", more=parameter("execution_mode", "0")),
    Case("mode_parallel", more=parameter("execution_mode", "1")),
    Case("mode_two", more=parameter("execution_mode", "2")),
    Case("mode_words", more=parameter("execution_mode", "parallel")),
    Case("mode_empty", more=parameter("execution_mode", "")),
    Case("arena_off", more=parameter("enable_mem_arena", "0")),
    Case("arena_words", more=parameter("enable_mem_arena", "off")),
    Case("pattern_true", more=parameter("enable_mem_pattern", "true")),
    Case("threads_inter", more=parameter("inter_op_thread_count", "2")),
    Case("threads_inter_words", more=parameter("inter_op_thread_count", "two")),
    Case("threads_below", swaps=(('string_value: "1"', 'string_value: "-1"'),)),
    Case("threads_zero", swaps=(('string_value: "1"', 'string_value: "0"'),)),
    Case("threads_spaced", swaps=(('string_value: "1"', 'string_value: " 1"'),)),
    Case("threads_huge", swaps=(('string_value: "1"', 'string_value: "99999999999999999999"'),)),
    Case("session_unknown", more=parameter("session.nobody_knows", "1")),
    Case("session_spinning", more=parameter("session.intra_op.allow_spinning", "1")),
    Case("session_of_no_value", more=parameter("session.intra_op.allow_spinning", "")),
    Case("parameter_unknown", more=parameter("nobody_knows", "1")),
    Case("parameter_twice", more=parameter("intra_op_thread_count", "1")),
    Case("accelerator_unknown", more='optimization { execution_accelerators { cpu_execution_accelerator { name: "nobody" } } }\n'),
    Case("accelerator_openvino", more='optimization { execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }\n'),
    Case("accelerator_gpu", more='optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }\n'),
    Case("graph_priority", more="optimization { priority: PRIORITY_MAX }\n"),
    # the text
    Case("config_with_mark", files=encoded("utf-8-sig")),
    Case("config_of_windows", files=replaced("config.pbtxt", "\n", "\r\n")),
    Case("config_latin", files=encoded("latin-1", "# größe\n")),
    Case("config_latin_value", files=encoded("latin-1", 'metric_tags { key: "a" value: "größe" }\n')),
    Case("config_unicode", files=encoded("utf-8", 'metric_tags { key: "a" value: "größe" }\n')),
    Case("config_utf16", files=encoded("utf-16")),
    Case("config_folder", files=written("config.pbtxt", None)),
    Case("config_empty", files=written("config.pbtxt", b"")),
    Case("config_nul", files=appended("config.pbtxt", b"\0")),
    Case("config_link", files=linked("config.pbtxt", "was-config.pbtxt")),
    Case("config_link_to_nothing", files=all_of(linked("config.pbtxt", "nowhere"))),
    Case("config_semicolons", swaps=(("max_batch_size: 8", "max_batch_size: 8;"),)),
    Case("config_commas", swaps=((LOGITS, LOGITS.replace("dims: 3", "dims: [3],")),)),
    Case("config_hex", swaps=(("max_batch_size: 8", "max_batch_size: 0x8"),)),
    Case("config_batch_too_large", swaps=(("max_batch_size: 8", "max_batch_size: 99999999999"),)),
    Case("config_batch_twice", swaps=(("max_batch_size: 8", "max_batch_size: 8 max_batch_size: 4"),)),
    Case("config_float_batch", swaps=(("max_batch_size: 8", "max_batch_size: 8.0"),)),
    Case("config_angles", swaps=((LOGITS, LOGITS.replace("{", "<").replace("}", ">")),)),
    # versions and files
    Case("version_file", files=all_of(lambda folder: shutil.rmtree(folder / "1"), written("1", b"x"))),
    Case("version_link", files=linked("1", "was-1")),
    Case("version_link_to_nothing", files=linked("1", "nowhere")),
    Case("version_huge", files=moved("1", "99999999999999999999")),
    Case("version_long", files=moved("1", "9223372036854775807")),
    Case("version_below", files=moved("1", "-1")),
    Case("version_plus", files=moved("1", "+1")),
    Case("version_two_empty", files=written("2", None)),
    Case("version_two_specific", swaps=(("latest { num_versions: 1 }", "specific { versions: 1 }"),), files=written("2", None)),
    Case("version_zero", files=moved("1", "0")),
    Case("version_zero_beside", files=copied("1", "0")),
    Case("version_zero_all", swaps=(("latest { num_versions: 1 }", "all { }"),), files=copied("1", "0")),
    Case("version_arabic", files=moved("1", "١")),
    Case("version_words_beside", files=copied("1", "old")),
    Case("version_hidden", files=copied("1", ".1")),
    Case("model_folder", files=written("1/model.onnx", None)),
    Case("model_empty", files=written("1/model.onnx", b"")),
    Case("model_link", files=linked("1/model.onnx", "was-model.onnx")),
    Case("model_link_to_nothing", files=linked("1/model.onnx", "nowhere")),
    Case("model_below", more='default_model_filename: "sub/model.onnx"\n', files=copied("1/model.onnx", "1/sub/model.onnx")),
    Case("model_beside", more='default_model_filename: "../model.onnx"\n', files=copied("1/model.onnx", "model.onnx")),
    Case("model_capital", files=moved("1/model.onnx", "1/Model.onnx")),
    Case("model_text", files=written("1/model.onnx", b"\n" * 1000)),
    Case("notes_beside", files=written("1/notes.txt")),
    Case("data_missing", files=all_of(written("1/other.bin"))),
    # warm-up and instances
    Case("warmup_file", swaps=(("zero_data: true", 'input_data_file: "x.bin"'),), files=written("warmup/x.bin", bytes(16))),
    Case("warmup_file_short", swaps=(("zero_data: true", 'input_data_file: "x.bin"'),), files=written("warmup/x.bin", bytes(15))),
    Case("warmup_file_long", swaps=(("zero_data: true", 'input_data_file: "x.bin"'),), files=written("warmup/x.bin", bytes(17))),
    Case("warmup_file_folder", swaps=(("zero_data: true", 'input_data_file: "x.bin"'),), files=written("warmup/x.bin", None)),
    Case("warmup_file_elsewhere", swaps=(("zero_data: true", 'input_data_file: "x.bin"'),), files=written("x.bin", bytes(16))),
    Case("warmup_unnamed", swaps=(('name: "one" ', ""),)),
    Case("warmup_zero_strings", "python", swaps=(("TYPE_FP32", "TYPE_STRING"),), more=WARM_STRINGS.format("zero_data")),
    Case("group_passive", swaps=((GROUP, GROUP.replace("count: 1", "count: 1 passive: true")),)),
    Case("group_passive_beside", swaps=((GROUP, f'{GROUP}\n{GROUP.replace("count: 1", "passive: true count: 1")}'),)),
    Case("state_of_no_data", "python", swaps=state('name: "i" data_type: TYPE_FP32 dims: 1')),
    Case("state_of_no_name", "python", swaps=state("zero_data: true data_type: TYPE_FP32 dims: 1")),
    Case("state_of_no_file", "python", swaps=state('name: "i" data_file: "f" data_type: TYPE_FP32 dims: 1')),
    Case("state_of_another_type", "python", swaps=state('name: "i" zero_data: true data_type: TYPE_INT32 dims: 1')),
    Case("count_zero", swaps=((GROUP, GROUP.replace("count: 1", "count: 0")),)),
    Case("count_two", swaps=((GROUP, GROUP.replace("count: 1", "count: 2")),)),
    Case("group_of_a_name", swaps=((GROUP, GROUP.replace("count: 1", 'name: "mine" count: 1')),)),
    Case("group_of_a_bad_name", swaps=((GROUP, GROUP.replace("count: 1", 'name: "my own" count: 1')),)),
    Case("group_twice", swaps=((GROUP, f"{GROUP}\n{GROUP}"),)),
    Case("limited", swaps=((GROUP, GROUP.replace("count: 1", 'count: 1 rate_limiter { resources { name: "r" count: 3 } priority: 1 }')),)),
    # tensors once more
    Case("input_optional", swaps=((X, X.replace("dims: 4", "dims: 4 optional: true")),)),
    Case("input_named_as_output", "python", swaps=(('name: "y"', 'name: "x"'),)),
    Case("ragged", swaps=((X, X.replace("dims: 4", "dims: 4 allow_ragged_batch: true")),)),
    Case("input_of_a_shape", swaps=((X, X.replace("dims: 4", "dims: 4 format: FORMAT_NHWC")),)),
    Case("runtime_unknown", more='runtime: "libnobody.so"\n'),
    Case("agents", more='model_repository_agents { agents { name: "checksum" } }\n'),
    # models in Python
    Case("py_folder", "python", files=written("1/model.py", None)),
    Case("py_missing", "python", files=moved("1/model.py", "1/main.py")),
    Case("py_empty", "python", files=python_text("")),
    Case("py_latin", "python", files=written("1/model.py", MODEL_PY.encode() + "# größe\n".encode("latin-1"))),
    Case("py_latin_told", "python", files=written("1/model.py", b"# -*- coding: latin-1 -*-\n" + MODEL_PY.encode() + "# größe\n".encode("latin-1"))),
    Case("py_tabs", "python", files=py("    def execute", "\tdef execute")),
    Case("py_execute_of_none", "python", files=py(EXECUTE, "def execute(self):")),
    Case("py_execute_of_two", "python", files=py(EXECUTE, "def execute(self, requests, more):")),
    Case("py_execute_with_default", "python", files=py(EXECUTE, "def execute(self, requests, more=None):")),
    Case("py_execute_of_any", "python", files=py(EXECUTE, "def execute(self, *given):\n        requests = given[0]")),
    Case("py_execute_by_name", "python", files=py(EXECUTE, "def execute(self, *, requests):")),
    Case("py_execute_renamed", "python", files=py("def execute", "def run")),
    Case("py_execute_static", "python", files=py(f"    {EXECUTE}", "    @staticmethod\n    def execute(requests):")),
    Case("py_execute_static_self", "python", files=py(f"    {EXECUTE}", f"    @staticmethod\n    {EXECUTE}")),
    Case("py_initialize", "python", files=py(f"    {EXECUTE}", f"    def initialize(self, args):\n        pass\n\n    {EXECUTE}")),
    Case("py_initialize_of_none", "python", files=py(f"    {EXECUTE}", f"    def initialize(self):\n        pass\n\n    {EXECUTE}")),
    Case("py_initialize_of_two", "python", files=py(f"    {EXECUTE}", f"    def initialize(self, args, more):\n        pass\n\n    {EXECUTE}")),
    Case("py_class_renamed", "python", files=py("TritonPythonModel", "TritonPythonmodel")),
    Case("py_class_by_name", "python", files=python_text(MODEL_PY.replace("TritonPythonModel", "Mine") + "\n\nTritonPythonModel = Mine\n")),
    Case("py_class_of_another", "python", files=all_of(copied("1/model.py", "1/mine.py"), python_text("from mine import TritonPythonModel\n"))),
    Case("py_class_inherits", "python", files=python_text(MODEL_PY.replace("TritonPythonModel", "Base") + "\n\nclass TritonPythonModel(Base):\n    pass\n")),
    Case("py_class_inside", "python", files=python_text("if True:\n" + "".join(f"    {line}\n" for line in MODEL_PY.splitlines()))),
    Case("py_class_function", "python", files=python_text("def TritonPythonModel():\n    pass\n")),
    Case("py_relative", "python", files=all_of(copied("1/model.py", "1/mine.py"), python_text("from .mine import TritonPythonModel\n"))),
    Case("py_module_missing", "python", files=python_text("import json.nobody\n" + MODEL_PY)),
    Case("py_module_tried", "python", files=python_text("try:\n    import nobody\nexcept ImportError:\n    pass\n" + MODEL_PY)),
    Case("py_module_beside_model", "python", files=all_of(written("mine.py", b""), python_text("import mine\n" + MODEL_PY))),
    Case("py_file_named", "python", more='default_model_filename: "main.py"\n', files=moved("1/model.py", "1/main.py")),
    Case("py_environment_missing", "python", more=parameter("EXECUTION_ENV_PATH", "/nowhere/env.tar.gz")),
    Case("py_never_answers", "python", files=py("return [", "[")),
    # hooks
    Packed("hooks_good"),
    Packed("hooks_before_renamed", ((BEFORE, "def prepare(text: str)"),)),
    Packed("hooks_after_renamed", ((AFTER, "def finish(logits: np.ndarray)"),)),
    Packed("hooks_before_of_two", ((BEFORE, "def preprocess(text: str, size: int)"),)),
    Packed("hooks_after_of_two", ((AFTER, "def postprocess(logits: np.ndarray, more: np.ndarray)"),)),
    Packed("hooks_before_of_none", ((BEFORE, "def preprocess()"),)),
    Packed("hooks_argument_renamed", ((BEFORE, "def preprocess(words: str)"), ("in text.split", "in words.split"))),
    Packed("hooks_before_with_default", ((BEFORE, "def preprocess(text: str, size: int = 4)"),)),
    Packed("hooks_before_of_names", ((BEFORE, "def preprocess(*, text: str)"),)),
    Packed("hooks_before_of_places", ((BEFORE, "def preprocess(text: str, /)"),)),
    Packed("hooks_before_of_any", ((BEFORE, "def preprocess(text: str, **more: object)"),)),
    Packed("hooks_before_async", ((BEFORE, "async def preprocess(text: str)"),)),
    Packed("hooks_before_class", (("def preprocess(text: str) -> np.ndarray:", "class preprocess:"),)),
    Packed("hooks_before_of_another", (("def example()", "if True:\n    pass\n\n\ndef example()"),)),
    Packed("hooks_before_replaced", (("def example()", "preprocess = None\n\n\ndef example()"),)),
    Packed("hooks_before_lambda", (("def example()", "preprocess = lambda text: np.zeros(4, np.float32)\n\n\ndef example()"),)),
    Packed("hooks_syntax", ((BEFORE, "def preprocess(text: str"),)),
    Packed("hooks_import", (("import numpy as np", "import numpy as np\nimport no_such_package_at_all"),)),
    Packed("hooks_before_of_nothing", (("return np.array([float", "np.array([float"),)),
    Packed("hooks_before_yields", (("return np.array([float", "yield np.array([float"),)),
    Packed("hooks_after_yields", (("return Answer(", "yield Answer("),)),
    Packed("hooks_decoupled", change=in_step("postprocess", appended("config.pbtxt", b"model_transaction_policy { decoupled: true }"))),
    Packed("hooks_relative", (("import numpy as np", "import numpy as np\nfrom . import other"),)),
    Packed("hooks_bound_in_a_call", ((BEFORE, "def real(text: str)"), ("def example()", "print(preprocess := real)\n\n\ndef example()"))),
    Packed("hooks_bound_by_match", ((BEFORE, "def real(text: str)"), ("def example()", "match real:\n    case preprocess:\n        pass\n\n\ndef example()"))),
    Packed("hooks_bound_unseen", ((BEFORE, "def real(text: str)"), ("def example()", "globals()['preprocess'] = real\n\n\ndef example()"))),
    Packed("hooks_gone", change=in_step("preprocess", lambda folder: (folder / "1/hooks.py").unlink())),
    Packed("hooks_other_sum", change=in_step("preprocess", appended("1/hooks.py", b"\n# mine\n"))),
    Packed("hooks_code_beside", change=in_step("preprocess", written("1/more.py", b""))),
    Packed("hooks_notes_beside", change=in_step("preprocess", written("1/notes.txt", b""))),
    Packed("hooks_sums_damaged", change=in_step("preprocess", written(f"1/{PROVENANCE_FILE}", b"{"))),
    Packed("hooks_sums_gone", change=in_step("preprocess", lambda folder: (folder / "1" / PROVENANCE_FILE).unlink())),
    Packed("hooks_step_gone", change=in_step("preprocess", shutil.rmtree)),
    Packed("network_other_sum", change=in_step("network", appended("1/model.onnx", b"\x62\x00"))),
    Packed("network_gone", change=in_step("network", lambda folder: (folder / "1/model.onnx").unlink())),
    Packed("stages_gone", change=in_step("preprocess", replaced("config.pbtxt", '"stages"', '"stage"'))),
    Packed("stages_of_another", change=in_step("preprocess", replaced("config.pbtxt", 'string_value: "{', r'string_value: "{\"other\": {\"arguments\": {}, \"results\": {}, \"returns\": \"value\"}, '))),
    Packed("stages_of_no_type", change=in_step("preprocess", replaced("config.pbtxt", r'\"TYPE_FP32\"', r'\"TYPE_NONE\"'))),
    Packed("stages_of_no_kind", change=in_step("preprocess", replaced("config.pbtxt", r'\"text\": \"str\"', r'\"text\": 7'))),
    Packed("requirements_gone", change=in_step("preprocess", replaced("config.pbtxt", '"requirements"', '"requires"'))),
    Packed("requirements_damaged", change=in_step("preprocess", replaced("config.pbtxt", r'[\"numpy\"]', r'[\"numpy\"'))),
    Packed("input_renamed", change=all_of(in_step("preprocess", replaced("config.pbtxt", 'input {\n  name: "text"', 'input {\n  name: "words"')), replaced("config.pbtxt", 'input_map {\n      key: "text"', 'input_map {\n      key: "words"'))),
    Packed("input_more_optional", change=in_step("preprocess", appended("config.pbtxt", b'input { name: "more" data_type: TYPE_FP32 dims: 1 optional: true }'))),
    Packed("output_renamed", change=all_of(in_step("postprocess", replaced("config.pbtxt", 'output {\n  name: "label"', 'output {\n  name: "name"')), replaced("config.pbtxt", 'output_map {\n      key: "label"', 'output_map {\n      key: "name"'))),
    Packed("input_of_numbers", change=all_of(in_step("preprocess", replaced("config.pbtxt", 'TYPE_STRING', 'TYPE_INT64')), replaced("config.pbtxt", 'name: "text"\n  data_type: TYPE_STRING', 'name: "text"\n  data_type: TYPE_INT64'))),
    Packed("stages_damaged", change=in_step("preprocess", replaced("config.pbtxt", "arguments", "argumente"))),
)  # fmt: skip
