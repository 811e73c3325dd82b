"""Files of every format that is read, changed at random, given to what opens them, for as long as is asked.

    python benchmarks/fuzz_files.py [--minutes 10] [--kinds .pt2,.onnx,artifact] [--seed 0]

A kind with a dot is a file that is opened by what reads it; another is one over which whole commands are run, watched
for what they touch (tests/hostile/watch.py). Children with bounded memory do it, so that one that takes its process
down is counted, too; each case follows from its number. Nothing may crash, leave a canary or take more memory. The last
line of stdout is one JSON object; the exit code is 1 if anything did.
"""

from __future__ import annotations

import argparse
import collections
import json
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
LIMIT = 12 << 30
"""Of address space: torch and ONNX Runtime reserve gigabytes that they never touch."""
PART = 300
"""Cases of a child."""
COMMANDS = 60
"""Cases of a child that runs commands."""
SLOW = 10.0
"""Seconds of CPU for a command over a file of a few kilobytes."""
SECONDS = 1200
KINDS = (
    ".pt2", ".pt", ".onnx", ".npz", ".npy", "native", "checkpoint", "program", "onnx", "artifact", "plan",
    "sensitivity", "recipe", "data", "stage", "repository",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)  # KIND START FOLDER: the child's work
    arguments = parser.parse_args()
    if arguments.part:
        kind, start, folder = arguments.part
        part(kind, int(start), Path(folder))
        return
    from compress.runtime.machine import environment

    counts: collections.Counter[str] = collections.Counter()
    by_kind: collections.Counter[str] = collections.Counter()
    crashes: list[dict[str, Any]] = []
    peak, number, kinds = 0, arguments.seed, arguments.kinds.split(",")
    until = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < until:
            kind = kinds[(number // PART) % len(kinds)]
            command = [__file__, "--part", kind, str(number), folder]
            if not kind.startswith("."):
                command = ["-m", "tests.hostile.fuzz_commands", kind, str(number), str(COMMANDS), folder]
            done = subprocess.run(
                [sys.executable, *command], capture_output=True, text=True, check=False, timeout=SECONDS, cwd=ROOT
            )
            lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            if not kind.startswith("."):
                lines = [of_command(line) for line in lines if "unwritten" not in line]
            for line in lines:
                counts["cases"] += 1
                counts[line["outcome"]] += 1
                counts["canaries"] += line["canary"]
                by_kind[f"{kind} {line.get('ended', line['outcome'])}"] += 1
                peak = max(peak, line["peak"])
                if line["outcome"] == "crashes" or line["canary"]:
                    crashes.append(line)
                    print(json.dumps(line), flush=True)
            if done.returncode:  # the process went down over the next one
                counts["cases"] += 1
                counts["crashes"] += 1
                crashes.append({"kind": kind, "case": number + len(lines), "exit": done.returncode})
                print(json.dumps(crashes[-1] | {"said": done.stderr[-500:]}), flush=True)
            number += PART
            print(f"{counts['cases']:,} cases: {dict(by_kind)}", file=sys.stderr, flush=True)
    found = {name: counts[name] for name in ("cases", "refused", "loaded", "crashes", "canaries")}
    print(json.dumps({**found, "peak_bytes": peak, "by_kind": dict(by_kind), "found": crashes[:50], **environment(1)}))
    if crashes:
        sys.exit(1)


def of_command(line: dict[str, Any]) -> dict[str, Any]:
    """What a command did over a case, told as a case of a file that is opened is."""
    bad = [*line["bad"], *([f"it took {line['seconds']} s"] if line["seconds"] > SLOW else [])]
    outcome = "crashes" if bad else "refused" if line["code"] == 2 else "loaded"
    kept = {key: line[key] for key in ("kind", "case", "program", "command", "code", "told")}
    ended = f"{line['program']} {line['code']}"
    return {**kept, "bad": bad, "outcome": outcome, "ended": ended, "canary": False, "peak": line["grown"]}


def part(kind: str, start: int, folder: Path) -> None:
    """Some cases, a line of JSON for each."""
    import torch

    from tests.hostile.fuzz import changed, ended

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    path, canary = folder / f"file{kind}", folder / "canary"
    for case in range(start, start + PART):
        path.write_bytes(changed(kind, Random(case), canary))  # noqa: S311  cases, not secrets
        line: dict[str, Any] = {"kind": kind, "case": case}
        try:
            line["ended"] = ended(path)
            line["outcome"] = "loaded" if line["ended"] == "loaded" else "refused"
        except Exception as err:  # what is looked for
            where = traceback.extract_tb(err.__traceback__)[-1]
            line |= {
                "outcome": "crashes",
                "error": f"{type(err).__name__}: {err}"[:200],
                "at": f"{where.name}:{where.lineno}",
            }
        line["canary"] = canary.exists()
        line["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        canary.unlink(missing_ok=True)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
