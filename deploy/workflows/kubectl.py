"""kubectl for a cluster that is not there: `apply -k` builds, checks and keeps; `wait` finds what was applied."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import yaml

NATIVE = ("apps/v1", "v1", "policy/v1", "networking.k8s.io/v1", "batch/v1")
RELEASE = "1.31"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("-n", "--namespace", default="default")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("apply").add_argument("-k", required=True)
    wait = commands.add_parser("wait")
    wait.add_argument("--for", required=True)
    wait.add_argument("--timeout", required=True)
    wait.add_argument("object")
    asked = parser.parse_args()
    if stat.S_IMODE(asked.kubeconfig.stat().st_mode) != 0o600:
        sys.exit(f"{asked.kubeconfig} may be read by others")
    cluster = Path(__file__).with_name("cluster.json")
    if asked.command == "apply":
        here = str(Path(__file__).parent)
        path = os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if each != here)
        done = subprocess.run(
            [str(shutil.which("kubectl", path=path)), "kustomize", asked.k], capture_output=True, text=True, check=True
        )
        names = []
        for each in filter(None, yaml.safe_load_all(done.stdout)):
            if each["apiVersion"] in NATIVE:
                kubernetes_validate.validate(each, RELEASE, strict=True)
            space, name = each["metadata"]["namespace"], each["metadata"]["name"]
            names.append(f"{space} {each['kind'].lower()}/{name}")
        cluster.write_text(json.dumps(names))
        print("\n".join(names))
    elif f"{asked.namespace} {asked.object}" not in json.loads(cluster.read_text()):
        sys.exit(f"{asked.object} was not applied in {asked.namespace}")


if __name__ == "__main__":
    main()
