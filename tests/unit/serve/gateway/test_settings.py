"""The gateway's settings: from flags, the environment and a file, in that order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compress.errors import ServerError
from serve.cli.main import main
from serve.gateway.access.keys import add_key
from serve.gateway.settings import ModelSettings
from serve.gateway.settings_file import load_settings
from serve.up.options import UpOptions
from serve.up.run import _settings

FILE = """\
upstream = ["http://127.0.0.1:9001", "http://127.0.0.1:9002"]
keys = "keys.json"
timeout_s = 5
max_body_bytes = 1000

[models.digits]
max_in_flight = 8
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "gateway.toml").write_text(FILE)
    add_key(tmp_path / "keys.json", "k")
    return tmp_path / "gateway.toml"


def test_a_file_sets_fields_and_single_models(file: Path) -> None:
    settings = load_settings(file, {})
    assert settings.upstream == ("http://127.0.0.1:9001", "http://127.0.0.1:9002")
    assert settings.keys == file.parent / "keys.json"  # beside the file
    assert settings.timeout_s == 5
    assert settings.models == {"digits": ModelSettings(max_in_flight=8)}


def test_the_environment_comes_before_the_file_and_what_is_given_before_both(file: Path) -> None:
    environment = {
        "SERVE_GATEWAY_TIMEOUT_S": "7.5",
        "SERVE_GATEWAY_MAX_BODY_BYTES": "2000",
        "SERVE_GATEWAY_UPSTREAM": "http://127.0.0.1:1 http://127.0.0.1:2",
        "PATH": "/bin",
    }
    settings = load_settings(file, environment, max_body_bytes=3000)
    assert (settings.timeout_s, settings.max_body_bytes) == (7.5, 3000)
    assert len(settings.upstream) == 2
    assert settings.upstream[0] == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("text", "environment", "told"),
    [
        ("timeout = 5", {}, "did you mean 'timeout_s'?"),
        ("timeout_s = 'long'", {}, "timeout_s"),
        ("timeout_s = -1", {}, "timeout_s is -1"),
        ("max_wait_s = -1", {}, "max_wait_s is -1"),
        ("upstream = 'ftp://a'", {}, "http://"),
        ("upstream = ['http://a', 'http://a']", {}, "twice"),
        ("upstream = []", {}, "no upstream"),
        ("tls_key = 'key.pem'", {}, "one of tls_certificate and tls_key is missing"),
        ("tls_key = 'no.pem'\ntls_certificate = 'no.pem'", {}, "there is no file"),
        ("models = 5", {}, "no tables"),
        ("[models.a]\nmax_flight = 5", {}, "did you mean 'max_in_flight'?"),
        ("[models.a]\nmax_in_flight = 0", {}, "max_in_flight of a model is 0"),
        ("port =", {}, "not TOML"),
        ("", {"SERVE_GATEWAY_PROT": "1"}, "did you mean 'port'?"),
        ("", {"SERVE_GATEWAY_PORT": "http"}, "port"),
        ("", {"SERVE_GATEWAY_MODELS": "x"}, "no setting 'models'"),
    ],
)
def test_a_setting_that_can_not_work_is_told(tmp_path: Path, text: str, environment: dict[str, str], told: str) -> None:
    (tmp_path / "gateway.toml").write_text(text)
    with pytest.raises(ServerError) as caught:
        load_settings(tmp_path / "gateway.toml", environment)
    assert told in str(caught.value)


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["gateway", "--check", *words])
    came = capsys.readouterr()
    return int(ended.value.code or 0), came.out, came.err


def test_the_command_checks_settings_and_says_what_holds(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_GATEWAY_TIMEOUT_S", "9")
    monkeypatch.setenv("SERVE_GATEWAY_MAX_BODY_BYTES", "2000")
    code, out, _ = check(capsys, "--config", str(file), "--max-body-bytes", "4000")
    held = dict(line.split(maxsplit=1) for line in out.splitlines() if " " in line)
    assert code == 0
    assert (held["timeout_s"], held["max_body_bytes"]) == ("9.0", "4000")
    assert "max_in_flight=8" in held["models"]
    assert "1 keys are known" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--keys", "none.json"], "can't read the keys in none.json"),
        (["--config", "none.toml"], "can't read none.toml"),
        (["--host", "192.0.2.1"], "everybody who reaches"),
        (["--tls-certificate", __file__, "--tls-key", __file__], "can't use the certificate"),
    ],
)
def test_the_command_refuses_what_can_not_work(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = check(capsys, *words)
    assert code == 2
    assert told in err
    assert "Traceback" not in err


def test_flags_alone_do_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = check(capsys, "--upstream", "http://127.0.0.1:1", "--upstream", "http://127.0.0.1:2")
    assert code == 0
    assert "('http://127.0.0.1:1', 'http://127.0.0.1:2')" in out


def test_nothing_of_any_setting_is_secret(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    secret, _ = add_key(file.parent / "keys.json", "other")
    values: Any = check(capsys, "--config", str(file))
    assert secret not in values[1] + values[2]


@pytest.mark.parametrize(("flag", "seconds"), [(None, 8), (30.0, 30), (0.2, 1)])
def test_under_serve_up_the_file_says_how_long_to_drain_unless_the_flag_does(
    flag: float | None, seconds: int, tmp_path: Path
) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text("drain_timeout_s = 8\n")
    options = UpOptions(gateway=file, drain_timeout=flag)
    assert _settings(options, "http://127.0.0.1:1", "127.0.0.1:2").drain_timeout_s == seconds
    assert _settings(UpOptions(), "http://127.0.0.1:1", "127.0.0.1:2").drain_timeout_s == 30
