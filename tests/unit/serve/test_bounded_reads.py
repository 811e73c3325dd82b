"""No file is read without a bound: whoever reads another way than `compress.vetting.texts` says here why it may."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import serve

ROOT = Path(serve.__file__).parent
READS = {"read_text", "read_bytes", "open"}
NAMED = "the operator's own settings, which nobody else writes"
PROC = "the kernel's own file"
OWN = "a file that this process made"
FIXED = "a few bytes, of what is known to be a file"
SHIPPED = "a file of this package"
RELAY = "a connection is opened, no file"
FOLDER = "a folder, or opened for writing"
ALLOWED = {
    "doctor/run.py": PROC,
    "gateway/access/freed.py": PROC,
    "gateway/access/keys.py": NAMED,
    "gateway/edge/accepting.py": "of nothing, for its number",
    "gateway/grpc/channels.py": RELAY,
    "gateway/grpc/proxy.py": NAMED,
    "gateway/grpc/relay.py": RELAY,
    "gateway/observe/access_log.py": FOLDER,
    "gateway/oip/apart.py": PROC,
    "gateway/site/docs.py": SHIPPED,
    "gateway/site/page.py": SHIPPED,
    "hooks/last_node.py": "mapped, and walked by the lengths in it, of a file that was vetted",
    "hooks/packed/model.py": "Triton runs it: it has the standard library only, and runs what it reads",
    "lint/openvino_rules.py": PROC,
    "lint/plan_rules.py": FIXED,
    "pack/source.py": "for the archive reader, which bounds what it takes",
    "load/report/report.py": PROC,
    "load/send/greeting.py": PROC,
    "repository/copies.py": "its own mark, which it writes; a folder, to have it on the disk",
    "repository/entries.py": "it opens without following links, and digests by blocks",
    "repository/fingerprint.py": "by blocks, for its digest",
    "repository/lock.py": FOLDER,
    "rollout/state_file.py": FOLDER,
    "verify/arrays.py": FIXED,
    "triton/ending.py": OWN,
    "triton/kin.py": PROC,
    "triton/launch.py": OWN,
    "up/claim.py": PROC,
    "triton/leftovers.py": PROC,
    "triton/memory.py": PROC,
    "triton/on_demand.py": PROC,
    "triton/private.py": PROC,
    "triton/processes.py": FOLDER,
    "triton/stubs.py": PROC,
}


def reads(source: str) -> Iterator[int]:
    """Lines that call open(), or read_text, read_bytes or open of anything; a file's imported readers are names."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "open":
            yield node.lineno
        elif isinstance(node.func, ast.Attribute) and node.func.attr in READS:
            value = node.func.value
            if not (isinstance(value, ast.Name) and value.id == "each"):  # a connection is opened
                yield node.lineno


def test_only_what_is_listed_reads_without_a_bound() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in sorted(ROOT.rglob("*.py"))
        if (lines := list(reads(path.read_text(encoding="utf-8"))))
    }
    more = {name: lines for name, lines in found.items() if name not in ALLOWED}
    assert not more, "read these with compress.vetting.texts, or say in ALLOWED why not"
    assert not ALLOWED.keys() - found.keys(), "these read no more; take them off the list"


def test_each_way_of_reading_is_seen() -> None:
    for text in ("open('a')", "p.open()", "p.read_text()", "(a / b).read_bytes()", "os.open(a, 0)"):
        assert list(reads(text)) == [1]
    assert not list(reads("read_text(p)"))
