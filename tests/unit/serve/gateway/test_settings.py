"""The gateway's settings: from flags, the environment and a file, in that order."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from compress.errors import ServerError
from serve.cli.main import main
from serve.gateway.access.keys import add_key
from serve.gateway.settings import ModelSettings, Settings
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
        (["--agree-module", "gone.py"], "there is no file gone.py"),
        (["--agree-module", str(Path(__file__).with_name("__init__.py"))], "it has no function of two arguments"),
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


# Each setting as a file has it, a flag of `serve gateway` that says otherwise, and what each of them means.
CASES: dict[str, tuple[str, list[str], object, object]] = {
    "upstream": ('["http://a:1"]', ["--upstream", "http://b:1"], ("http://a:1",), ("http://b:1",)),
    "discover": ("true", ["--no-discover"], True, False),
    "host": ('"127.0.0.3"', ["--host", "127.0.0.4"], "127.0.0.3", "127.0.0.4"),
    "port": ("9443", ["--port", "8080"], 9443, 8080),  # a default that is given is given
    "grpc_port": ("0", ["--grpc-port", "0"], 0, 0),
    "grpc_upstream": ('["a:1"]', ["--grpc-upstream", "b:1"], ("a:1",), ("b:1",)),
    "keys": ('"k.json"', ["--keys", "/f.json"], "k.json", Path("/f.json")),
    "state": ('"s.db"', ["--state", "/f.db"], "s.db", Path("/f.db")),
    "agree_module": ('"gateway.toml"', ["--agree-module", __file__], "gateway.toml", Path(__file__)),
    "anonymous": ("true", ["--no-anonymous"], True, False),
    "tls_certificate": ('"gateway.toml"', ["--tls-certificate", __file__], "gateway.toml", Path(__file__)),
    "tls_key": ('"gateway.toml"', ["--tls-key", __file__], "gateway.toml", Path(__file__)),
    "validate": ("false", ["--validate"], False, True),
    "access_log": ('"a.log"', ["--access-log", "/f.log"], "a.log", Path("/f.log")),
    "otlp_endpoint": ('"http://a:1"', ["--otlp-endpoint", "http://b:1"], "http://a:1", "http://b:1"),
    "reuse_port": ("true", ["--no-reuse-port"], True, False),
    "max_address_share": ("0.25", ["--max-address-share", "0.75"], 0.25, 0.75),
    "max_sequence_share": ("0.25", ["--max-sequence-share", "0.75"], 0.25, 0.75),
    "trace_ratio": ("0.25", ["--trace-ratio", "0.75"], 0.25, 0.75),
}
NUMBERS = (
    "max_body_bytes", "memory_bytes", "max_elements", "timeout_s", "head_timeout_s", "body_timeout_s",
    "write_timeout_s", "keep_alive_s", "max_clients", "max_connections", "max_in_flight", "latency_target_s",
    "max_wait_s", "max_waiting", "sequence_wait_s", "feedback_answers", "feedback_s", "health_interval_s", "drain_delay_s",
    "drain_timeout_s", "left_timeout_s",
)  # fmt: skip
CASES |= {name: ("7", [f"--{name.replace('_', '-')}", "9"], 7, 9) for name in NUMBERS}
TOGETHER = {"tls_certificate": 'tls_key = "gateway.toml"', "tls_key": 'tls_certificate = "gateway.toml"'}


def written(tmp_path: Path, name: str) -> Path:
    file = tmp_path / "gateway.toml"
    file.write_text(f"{name} = {CASES[name][0]}\n{TOGETHER.get(name, '')}\n")
    return file


def of_file(tmp_path: Path, name: str) -> object:
    """What a file that sets `name` means; a path is beside the file."""
    value = CASES[name][2]
    return tmp_path / value if CASES[name][3].__class__ is type(Path()) and isinstance(value, str) else value


def test_each_setting_has_a_case() -> None:
    assert set(CASES) == {field.name for field in dataclasses.fields(Settings)} - {"models"}


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_flag_of_serve_gateway_comes_before_the_file_where_it_is_given(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Settings] = []
    monkeypatch.setattr("serve.gateway.server.run_gateway", lambda settings, **_: ran.append(settings))
    file = written(tmp_path, name)
    for words in ([], CASES[name][1]):
        with pytest.raises(SystemExit) as ended:
            main(["gateway", "--config", str(file), *words])
        assert not ended.value.code
    assert [getattr(settings, name) for settings in ran] == [of_file(tmp_path, name), CASES[name][3]]


# What `serve up` decides itself: the Triton that it starts is the upstream.
OWN = {"upstream", "grpc_upstream"}


@pytest.mark.parametrize("name", sorted(set(CASES) - OWN))
def test_no_default_of_serve_up_comes_before_the_file(name: str, tmp_path: Path) -> None:
    options = UpOptions(gateway=written(tmp_path, name))
    settings = _settings(options, "http://127.0.0.1:1", "127.0.0.1:2")
    assert getattr(settings, name) == of_file(tmp_path, name)


@pytest.mark.parametrize(
    ("given", "name", "held"),
    [
        ({"host": "127.0.0.1"}, "host", "127.0.0.1"),  # the default, but given
        ({"port": 8080}, "port", 8080),
        ({"port": 0}, "port", 0),
        ({"drain_timeout": 30.0}, "drain_timeout_s", 30),
        ({"drain_timeout": 0.2}, "drain_timeout_s", 1),
    ],
)
def test_a_flag_of_serve_up_comes_before_file_and_environment_where_it_is_given(
    given: dict[str, Any], name: str, held: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_GATEWAY_PORT", "9444")
    options = UpOptions(gateway=written(tmp_path, name), **given)
    assert getattr(_settings(options, "http://127.0.0.1:1", "127.0.0.1:2"), name) == held


def test_under_serve_up_the_environment_comes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_GATEWAY_PORT", "9444")
    assert _settings(UpOptions(gateway=written(tmp_path, "port")), "http://127.0.0.1:1", "127.0.0.1:2").port == 9444


def test_serve_up_alone_has_the_gateways_own_defaults() -> None:
    own, ours = Settings(), _settings(UpOptions(), "http://127.0.0.1:8000", "127.0.0.1:8001")
    assert ours == dataclasses.replace(own, grpc_upstream=("127.0.0.1:8001",))
