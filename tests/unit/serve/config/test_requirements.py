"""What hooks require is a package each: nothing that pip would read as more reaches it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from compress.errors import HookError
from serve.config.requirements import is_requirement, requirements_in
from serve.hooks.module import read_source
from serve.pack.write import pack
from tests.serve_models import hook_file, tiny_artifact

GOOD = (
    "pillow", "pillow>=11", "Pillow >= 11, <12", "tokenizers~=0.20", "numpy==1.26.*", "a-b.c_d[one, two-x]===1.0+local",
    "pillow (>=11)", "pillow; python_version < '3.12' and sys_platform != \"win32\"", "pillow>=11;extra=='x'",
    "thing @ https://files.example/thing-1.0-py3-none-any.whl#sha256=0123abcd",
    "thing[x] @ git+https://git.example/thing.git@v1 ; python_version>'3'",
)  # fmt: skip
BAD = (
    "", " ", "-e .", "-r other.txt", "--index-url https://evil.example/simple", "--index-url=https://evil.example",
    "pillow --index-url https://evil.example", "pillow --hash=sha256:0123", "pillow>=11 -e .", "pillow>=11 --pre",
    "pillow; python_version>'3' --extra-index-url https://evil.example", "pillow\n-e .", "pillow\r--pre", "pillow\u2028-e .",
    "pillow\x0b--pre", "./folder", "../folder", "/folder", "folder/", "C:\\folder", "https://evil.example/a.whl",
    "git+https://evil.example/a", "file:///a", "thing-1.0-py3-none-any.whl", "thing.zip", "thing.tar.gz[x]", "thing.tar.bz2",
    "thing @ https://${TOKEN}@files.example/a.whl", "thing @ https://files.example/a.whl -e .", "pillow \\", "pillow # a",
    "pillow, numpy", "pillow numpy", "pillow>=11 numpy", "pillow>=", "pil\udcfflow", "píllow", "@ https://a.example", "a" * 2000,
)  # fmt: skip


@pytest.mark.parametrize("text", GOOD)
def test_a_requirement_is_one_to_others_too(text: str) -> None:
    requirements = pytest.importorskip("packaging.requirements")
    assert is_requirement(text)
    assert requirements.Requirement(text)


@pytest.mark.parametrize("text", BAD)
def test_what_pip_reads_as_more_is_none(text: str) -> None:
    assert not is_requirement(text)
    with pytest.raises(ValueError, match="no requirement"):
        requirements_in(json.dumps(["pillow", text]))


@pytest.mark.parametrize("text", ["{}", "1", "[1]", '["a"', '"pillow"', "[" * 5000])
def test_what_is_no_list_of_texts_is_said(text: str) -> None:
    with pytest.raises(ValueError, match=r"list|JSON|nested"):
        requirements_in(text)


def test_hooks_that_require_more_are_not_packed(tmp_path: Path) -> None:
    file = tmp_path / "hooks.py"
    file.write_text("\nREQUIREMENTS = ['--index-url https://evil.example']\n")
    with pytest.raises(HookError, match=r"hooks\.py:2") as raised:
        read_source(file)
    assert "no requirement" in str(raised.value)


def test_a_repository_that_requires_more_reaches_neither_an_image_nor_a_server(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    pack(tiny_artifact(tmp_path / "artifact"), repository=repository, name="tiny", hooks=hook_file(tmp_path))
    config = repository / "tiny_preprocess/config.pbtxt"
    config.write_text(config.read_text().replace('[\\"numpy\\"]', '[\\"--index-url https://evil.example\\"]'))
    assert "evil" in config.read_text()
    for words in (
        ["check", str(repository)],
        ["deploy", "requirements", str(repository)],
        ["deploy", "render", str(repository), "--gateway-image", "a:1", "-o", str(tmp_path / "out")],
        ["up", str(repository), "--docker", "print"],
        ["up", str(repository), "--port", "0"],
    ):
        ended = subprocess.run([sys.executable, "-m", "serve", *words], capture_output=True, text=True, check=False)
        assert ended.returncode == 2, words
        assert "can't be given to pip" in ended.stderr, (words, ended.stderr)
        assert "https://evil.example" not in ended.stdout
