"""What a repository's files may make a command read: nothing that stands elsewhere, and nothing without an end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from compress.errors import RepositoryError
from compress.vetting.replace import replace_file
from serve.config.named import named_text
from serve.config.pbtxt import parse, text_of
from serve.lint.run import lint
from serve.pack.write import pack
from serve.repository.signing import sign
from serve.verify.samples import samples_of
from tests.serve_models import tiny_artifact


@pytest.mark.parametrize("kind", ["above", "absolute"])
def test_a_model_file_elsewhere_is_not_opened(tmp_path: Path, kind: str) -> None:
    repository, elsewhere = tmp_path / "models", tmp_path / "elsewhere.onnx"
    pack(tiny_artifact(tmp_path / "artifact"), repository=repository, name="tiny")
    elsewhere.write_bytes(b"no model")
    name = str(elsewhere) if kind == "absolute" else "../../../elsewhere.onnx"
    config = repository / "tiny" / "config.pbtxt"
    config.write_text(config.read_text(encoding="utf-8") + f'\ndefault_model_filename: "{name}"\n', encoding="utf-8")
    found = [item for item in lint(repository, packed=False) if item.model == "tiny" and item.severity == "error"]
    assert len(found) == 1
    assert "leads out of the version's folder" in found[0].what


PREPARE = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
"""
ROLLBACK = "from serve.repository.versions import roll_back\nroll_back(folder, 'tiny')"
GATE = "from serve.deploy.gate import _network\n_network(folder, 'tiny')"
SUBJECT = "from serve.tune.trial import load_subject\nload_subject(folder, 'tiny')"
STAND = """
from serve.tune.trial import Stand, load_subject
with Stand(load_subject(folder, 'tiny')):
    pass
"""
CHECK = """
from serve.repository.signing import check_signature
check_signature(folder, folder.parent / 'public.pem', {})
"""
ADD = """
from serve.repository.versions import add_version
add_version(folder, folder.parent / 'staged', ['tiny'], 2, 3)
"""
KEY = "from serve.repository.signing import sign\nsign(folder, folder.parent / 'key.pem')"
SAMPLES = "from serve.verify.samples import samples_of\nlist(samples_of(folder.parent / 'samples'))"
STATE = "from serve.tune.state import State\nState(folder.parent / 'state.json', 'k')"
BODIES = """
from serve.load.ask.inputs import bodies
from serve.load.options import LoadOptions
bodies(LoadOptions('tiny', 'http://127.0.0.1:9/path', body=folder.parent / 'body'))
"""
HOOKS = "from serve.hooks.module import read_source\nread_source(folder.parent / 'hooks.py')"
TRAFFIC = "from serve.plan.traffic import read_traffic\nread_traffic(folder.parent / 'traffic.csv')"
PLAN = "from serve.deploy.options import read_plan\nread_plan(folder.parent / 'plan.json')"
PACK = "from serve.pack.file import read_tables\nread_tables(folder.parent / 'pack.toml')"
SETTINGS = "from serve.gateway.settings_file import read_settings\nread_settings(folder.parent / 'gateway.toml', {})"
REPORT = "from serve.load.report.report import read_report\nread_report(folder.parent / 'report.json')"
TRACE = "from serve.load.send.arrivals import read_trace\nread_trace(folder.parent / 'trace')"
ITEM = """
from serve.hooks.check import _item
from serve.hooks.types import HookTensor
_item(folder.parent / 'item', (HookTensor('x', 'TYPE_STRING', (1,), 'bytes'),) * 2)
"""
SEND = "from serve.http.ask import infer_file\ninfer_file('http://127.0.0.1:9', 'tiny', folder.parent / 'image.png')"

FOUND = [  # what a folder holds: a pipe in its place would never end, and a device neither
    ("models/tiny/config.pbtxt", ROLLBACK), ("models/tiny/config.pbtxt", GATE), ("models/tiny/config.pbtxt", SUBJECT),
    ("models/tiny/1/more.bin", STAND), ("models/SHA256SUMS", CHECK), ("models/SHA256SUMS.sig", CHECK),
    ("models/tiny/config.pbtxt", ADD), ("samples/labels.csv", SAMPLES), ("samples/a.bin", SAMPLES),
    ("state.json", STATE), ("hooks.py", HOOKS),
]  # fmt: skip
NAMED = [  # on the command line: a pipe may be meant, but it has an end
    ("key.pem", KEY), ("public.pem", CHECK), ("traffic.csv", TRAFFIC), ("plan.json", PLAN), ("pack.toml", PACK),
    ("gateway.toml", SETTINGS), ("report.json", REPORT), ("trace", TRACE), ("item", ITEM), ("image.png", SEND),
    ("body", BODIES),
]  # fmt: skip


def prepared(tmp_path: Path) -> Path:
    """A signed repository with what stands around it."""
    repository = tmp_path / "models"
    pack(tiny_artifact(tmp_path / "artifact"), repository=repository, name="tiny")
    private = Ed25519PrivateKey.generate()
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "key.pem").write_bytes(pem)
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public.pem").write_bytes(public)
    sign(repository, tmp_path / "key.pem")
    shutil.copytree(repository / "tiny", tmp_path / "staged" / "tiny")
    (tmp_path / "staged" / "tiny" / "1").rename(tmp_path / "staged" / "tiny" / "2")
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "labels.csv").write_text("file,label\na.bin,1\n")
    return repository


def outcome(code: str, repository: Path) -> str:
    """Of a command in a process of its own, which a bug here would keep for ever."""
    done = subprocess.run(
        [sys.executable, "-c", f"{PREPARE}{code}", str(repository)],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.stderr


@pytest.mark.parametrize(("name", "code"), FOUND, ids=lambda text: text.split("\n")[0][-40:])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_no_pipe_and_no_device_in_a_folder_is_read(tmp_path: Path, name: str, code: str, kind: str) -> None:
    repository = prepared(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    told = outcome(code, repository)
    assert any(f"compress.errors.{kind}" in told for kind in ("RepositoryError", "ServerError", "HookError")), told


@pytest.mark.parametrize(("name", "code"), NAMED, ids=lambda text: text.split("\n")[0][-40:])
def test_what_is_named_on_the_command_line_has_an_end(tmp_path: Path, name: str, code: str) -> None:
    repository = prepared(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/dev/zero")
    told = outcome(code, repository)
    assert "compress.errors.RepositoryError" in told or "compress.errors.ServerError" in told, told


def test_what_is_written_beside_a_file_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"kept")
    (tmp_path / ".file.new").symlink_to(tmp_path / "elsewhere")
    replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "elsewhere").read_bytes() == b"kept"
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/hostname", "sub/../../secret.bin"])
def test_a_table_of_samples_names_only_files_of_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "secret.bin").write_bytes(b"kept")
    (tmp_path / "samples" / "labels.csv").write_text(f"file,label\n{name},1\n", encoding="utf-8")
    with pytest.raises(RepositoryError, match="leads out of the folder"):
        list(samples_of(tmp_path / "samples"))


def test_a_pipe_of_settings_is_read_once_and_told_twice(tmp_path: Path) -> None:
    """A command reads its file of settings for its flags, and again for its tables."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["/bin/sh", "-c", 'echo "[models.a]" > "$0"', str(pipe)]):
        assert named_text(pipe) == named_text(pipe) == "[models.a]\n"


CONTENT = "kept_to_itself"


def findings(repository: Path) -> str:
    return " ".join(f"{each.severity} {each.what} {each.mend}" for each in lint(repository, packed=False))


def test_lint_tells_nothing_of_a_configuration_that_lies_elsewhere(tmp_path: Path) -> None:
    pack(tiny_artifact(tmp_path / "artifact"), repository=tmp_path / "models", name="tiny")
    (tmp_path / "secret").write_text(f"{CONTENT}: 5\n", encoding="utf-8")
    (tmp_path / "models" / "tiny" / "config.pbtxt").unlink()
    (tmp_path / "models" / "tiny" / "config.pbtxt").symlink_to(tmp_path / "secret")
    told = findings(tmp_path / "models")
    assert "error config.pbtxt can't be read: it is a link out of the repository" in told
    assert CONTENT not in told


@pytest.mark.parametrize("kind", ["onnx", "python"])
def test_lint_tells_nothing_of_a_model_file_that_lies_elsewhere(tmp_path: Path, kind: str) -> None:
    repository = tmp_path / "models"
    pack(tiny_artifact(tmp_path / "artifact"), repository=repository, name="tiny")
    config, file = repository / "tiny" / "config.pbtxt", repository / "tiny" / "1" / "model.onnx"
    text = config.read_text(encoding="utf-8")
    if kind == "onnx":  # the file's own name of its input would be told
        config.write_text(text.replace('name: "x"', 'name: "y"').replace('key: "x"', 'key: "y"'), encoding="utf-8")
        file.rename(tmp_path / "elsewhere")
    else:
        config.write_text(text.replace('"onnxruntime"', '"python"'), encoding="utf-8")
        file = file.with_name("model.py")
        (tmp_path / "elsewhere").write_text(f"import {CONTENT}\nclass TritonPythonModel:\n    pass\n", encoding="utf-8")
    file.symlink_to(tmp_path / "elsewhere")
    told = findings(repository)
    assert f"error 1/{file.name} does not fit, and is a link out of the repository" in told
    assert CONTENT not in told
    assert "'x'" not in told


@pytest.mark.parametrize("name", ["../../../elsewhere", "/etc/hostname", "a/../../elsewhere"])
@pytest.mark.parametrize("field", ["label_filename", "input_data_file", "runtime"])
def test_no_other_name_of_a_configuration_leads_out(tmp_path: Path, field: str, name: str) -> None:
    repository = tmp_path / "models"
    pack(tiny_artifact(tmp_path / "artifact"), repository=repository, name="tiny")
    (tmp_path / "elsewhere").write_bytes(bytes(4096))
    config = repository / "tiny" / "config.pbtxt"
    message = parse(config.read_text(encoding="utf-8"))
    if field == "label_filename":
        message.output[0].label_filename = name
    elif field == "runtime":
        message.runtime = name
    else:
        message.model_warmup[0].inputs["x"].input_data_file = name
    config.write_text(text_of(message), encoding="utf-8")
    assert f"{name!r} leads out of the" in findings(repository)
