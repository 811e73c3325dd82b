"""What never fits into `--memory` is told before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.cli.main import main
from serve.gateway.on_demand.estimates import MIB, PROCESS_BYTES
from serve.pack.write import PackOptions, pack
from serve.up.memory_rules import OWN_BYTES, memory_findings
from tests.serve_models import hook_file, tiny_artifact

ONE = PackOptions(instances=1)
ROOM = OWN_BYTES + PROCESS_BYTES + 10 * MIB  # for one of them


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    artifact = tiny_artifact(folder / "artifact")
    for name in ("a", "b"):
        pack(artifact, repository=folder / "models", name=name, options=ONE)
    pack(artifact, repository=folder / "models", name="hooked", hooks=hook_file(folder), options=ONE)
    return folder / "models"


@pytest.mark.parametrize(
    ("memory", "pins", "expected"),
    [
        (1024 * MIB, (), []),
        (1024 * MIB, ("a", "hooked"), []),
        (ROOM, (), [("hooked", "warning", "about 240 MiB")]),  # three steps, a process each
        (ROOM, ("a",), [("b", "warning", "9 MiB are left"), ("hooked", "warning", "about 240 MiB")]),
        (OWN_BYTES // 2, (), [(name, "error", "files alone") for name in ("a", "b", "hooked")]),
        (ROOM, ("a", "b"), [("a", "error", "pinned takes about 160 MiB")]),
        (1024 * MIB, ("nobody",), [("nobody", "error", "there is no such model")]),
    ],
)
def test_what_never_fits_is_found(
    repository: Path, memory: int, pins: tuple[str, ...], expected: list[tuple[str, str, str]]
) -> None:
    found = memory_findings(repository, memory, pins)
    assert [(each.model, each.severity) for each in found] == [each[:2] for each in expected]
    for each, (_, _, told) in zip(found, expected, strict=True):
        assert told in each.what


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--memory", "1GiB"], 0, ""),
        (["--memory", "60MiB", "--pin", "a"], 1, "what is pinned"),
        (["--memory", "much"], 2, "it is no size"),
        (["--pin", "a"], 2, "without --memory"),
    ],
)
def test_lint_tells_it(
    repository: Path, words: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lint", str(repository), *words])
    assert (ended.value.code or 0) == code
    output = capsys.readouterr()
    assert told in output.out + output.err
