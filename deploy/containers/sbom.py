"""What an image holds, as a software bill of materials (CycloneDX 1.6): Debian's packages and Python's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compress.vetting.replace import replace_file
from deploy.containers.engine import Engine

__all__ = ["listed", "write_sbom"]

# Runs in the image, with whatever Python 3 it has.
LOOK = r"""
import importlib.metadata, json, re, sys
found = {"debian": [], "python": []}
try:
    text = open("/var/lib/dpkg/status", encoding="utf-8").read()
except OSError:
    text = ""
for block in text.split("\n\n"):
    fields = dict(re.findall(r"^(Package|Version|Architecture|Status): (.*)$", block, re.M))
    if fields.get("Status", "").endswith(" installed"):
        found["debian"].append([fields["Package"], fields["Version"], fields["Architecture"]])
for each in importlib.metadata.distributions():
    found["python"].append([each.metadata["Name"], each.version, each.metadata.get("License-Expression") or ""])
print(json.dumps({kind: sorted(rows) for kind, rows in found.items()}))
"""


def listed(engine: Engine, image: str) -> dict[str, list[list[str]]]:
    """Name, version, and architecture or licence of each package, by kind: "debian", "python"."""
    words = [
        "run",
        "--rm",
        "--network=none",
        "--read-only",
        "--cap-drop=all",
        "--entrypoint=python3",
        image,
        "-c",
        LOOK,
    ]
    found: dict[str, list[list[str]]] = json.loads(engine.run(*words).stdout)
    return found


def write_sbom(engine: Engine, image: str, path: Path) -> int:
    """Write it.

    Returns:
        How many packages it names.
    """
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    rows = listed(engine, image)
    name, _, tag = image.rpartition("/")[2].partition(":")
    bom = Bom(components=[*map(_debian, rows["debian"]), *map(_python, rows["python"])])
    bom.metadata.component = Component(
        name=name,
        version=tag,
        type=ComponentType.CONTAINER,
        bom_ref="image",
        purl=PackageURL("oci", name=name, version=tag),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, JsonV1Dot6(bom).output_as_string(indent=1) + "\n")
    return len(bom.components)


def _debian(row: list[str]) -> Any:
    from cyclonedx.model.component import Component
    from packageurl import PackageURL

    name, version, architecture = row
    purl = PackageURL("deb", "debian", name, version, {"arch": architecture})
    return Component(name=name, version=version, purl=purl, bom_ref=str(purl))


def _python(row: list[str]) -> Any:
    from cyclonedx.model.component import Component
    from packageurl import PackageURL

    name, version, _ = row
    purl = PackageURL("pypi", name=name.lower().replace("_", "-"), version=version)
    return Component(name=name, version=version, purl=purl, bom_ref=str(purl))
