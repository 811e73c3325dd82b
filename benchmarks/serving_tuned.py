"""What `serve tune` finds over the defaults of `serve pack`: digits with hooks, and a compute-bound network.

    python benchmarks/serving_tuned.py [--trials 14] [--rounds 3]

Each search ends with a final in which the default and the best take turns; its medians are what is printed. The last
line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from serving_networks import network

from compress.runtime.machine import environment
from serve.pack.write import pack
from serve.tune.options import TuneOptions
from serve.tune.report import verdict
from serve.tune.run import tune

DIGITS = Path("model_repository/digits_network/1/model.onnx")
BOUNDS_MS = {"digits": 20.0, "compute": 100.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pack(DIGITS, repository=folder / "models", name="digits", hooks=Path("examples/digits/hooks.py"))
        pack(network("compute"), repository=folder / "models", name="compute")
        for model, bound in BOUNDS_MS.items():
            options = TuneOptions(bound, trials=arguments.trials, rounds=arguments.rounds, output=folder / "tuned")
            found = tune(folder / "models", model, options)
            console.print(f"{model}: {verdict(found)}", markup=False)
            figures[model] = {
                "p99_ms_bound": bound,
                "best": found.best.candidate.to_dict() if found.best else None,
                "finals": [
                    {"configuration": final.candidate.label(), "per_s": final.per_s(), "p99_ms": final.p99_ms()}
                    for final in found.finals
                ],
            }
    head = {"benchmark": "serving_tuned", "trials": arguments.trials, "rounds": arguments.rounds}
    print(json.dumps(head | {"environment": environment(1), "models": figures}))


if __name__ == "__main__":
    main()
