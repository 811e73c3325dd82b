"""Kubernetes objects held against schemas: its own by kubernetes-validate, custom ones by golden/custom_resources.json.

That file has the field names, types and required fields of the custom resources that deploy/ uses, read off their
published types: its `source` names each. Where one embeds an object of Kubernetes', that is checked by Kubernetes' own.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importlib.resources.path, of which it will hear soon enough
    import kubernetes_validate

__all__ = ["VERSIONS", "check"]

VERSIONS = ("1.31.0", "1.34.0", "1.37.0")
Object = dict[str, Any]
IN_A_POD = {"Container": "containers", "Volume": "volumes"}


def check(document: Object, version: str) -> None:
    """Raise unless a document fits its schema, strictly: a field that there is not is an error."""
    group = document["apiVersion"]
    known = next((told for name, told in _schemas().items() if group == name or group.startswith(name + "/v1")), None)
    if known is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kubernetes_validate.validate(document, version, strict=True)
        return
    root = known["kinds"][document["kind"]]
    schema = {"$ref": f"#/definitions/{root}", "definitions": known["definitions"]}

    def embedded(_validator: Any, kind: str, value: Any, _schema: Any) -> Iterator[jsonschema.ValidationError]:
        try:
            if kind == "JobSpec":
                check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "it"}, "spec": value}, version)
            elif kind in IN_A_POD:
                spec = {"containers": [{"name": "it"}], IN_A_POD[kind]: [value]}
                check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "it"}, "spec": spec}, version)
            elif kind == "HorizontalPodAutoscalerBehavior":
                target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "it"}
                scaler: Object = {"scaleTargetRef": target, "maxReplicas": 2, "behavior": value}
                whole = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "spec": scaler}
                check({**whole, "metadata": {"name": "it"}}, version)
        except kubernetes_validate.ValidationError as err:
            yield jsonschema.ValidationError(f"{kind}: {err.message}")

    checker = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"kubernetes": embedded})
    checker(schema).validate(document)


@cache
def _schemas() -> dict[str, Any]:
    path = Path(__file__).parent / "golden/custom_resources.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
