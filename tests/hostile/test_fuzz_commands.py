"""Commands over changed files of every kind: no code of theirs runs, nothing outside is touched, and errors have three
lines.

The cases are the same each time, and few; `python benchmarks/fuzz_files.py` goes on with others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.command_cases import KINDS

COUNT, COUNT_IN_SHORT = 8, 3
# What Python compiled would be a file that a command wrote where it may not.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
pytestmark = pytest.mark.timeout(900)  # the first test waits for all commands


@pytest.fixture(scope="module")
def count(request: pytest.FixtureRequest) -> int:
    return COUNT_IN_SHORT if request.config.getoption("--short") else COUNT


@pytest.fixture(scope="module")
def lines(count: int, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("commands")
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.fuzz_commands", ",".join(KINDS), "0", str(count), str(folder)],
        capture_output=True, text=True, check=False, timeout=800, env=ENVIRONMENT,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert not done.returncode, (found[-1:], done.stderr[-2000:])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_runs_nothing_is_touched_and_errors_have_three_lines(
    lines: list[dict[str, Any]], count: int, kind: str
) -> None:
    mine = [line for line in lines if line["kind"] == kind and "unwritten" not in line]
    assert [line for line in mine if line["bad"]] == []
    assert len({line["case"] for line in mine}) > (count // 8 if kind == "stage" else count // 2)
    assert {line["code"] for line in mine} <= {0, 1, 2, 3}


ATTACKS = """
import ctypes, os, subprocess, socket, sys
from pathlib import Path
from tests.hostile.watch import Watch
watch = Watch(Path(sys.argv[1]))
libc = ctypes.CDLL(None)
def fails(*_): raise KeyError("x")
def imports(*_):
    try: import canary_module
    except ImportError: pass
attacks = [
    lambda *_: open(watch.outside / "new", "w").close(), lambda *_: libc.open(os.fsencode(watch.secret), 0),
    lambda *_: libc.creat(os.fsencode(watch.outside / "new"), 0o600), lambda *_: os.system("true"),
    lambda *_: subprocess.run(["true"]), lambda *_: os.rename(watch.secret, watch.secret), imports, fails,
    lambda *_: open("/etc/hostname", "a").close(), lambda *_: socket.socket().bind(("127.0.0.1", 0)),
    lambda *_: print("\x1b[2J"), lambda *_: bytearray(500 << 20), lambda *_: sys.exit(2), lambda *_: sys.exit(7),
]
for attack in attacks:
    print(bool(watch.run(attack, [], 10)["bad"]))
print(watch.run(lambda *_: print("right"), [], 10)["bad"] == [])
"""


def test_what_is_watched_for_is_seen(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ATTACKS, str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=300, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.stdout.split() == ["True"] * 15, done.stderr
