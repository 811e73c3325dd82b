"""Where a pod has its model repository from, and what looks at it before Triton does, whatever the storage.

A signed repository is copied into the pod while it is verified, and Triton serves the copy: what changes in the storage
later reaches no container that starts again. A bucket is fetched into the pod first, for the same reason, and because
a Triton that reads a bucket by itself can't be preceded by any check.

Copies are on the node's disk, without a bound of their own: whoever checks needs no more memory for a large repository,
as the pages of its files are given back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serve.deploy.addresses import bucket_of
from serve.deploy.options import RenderOptions

__all__ = ["MODELS", "Stored", "helper", "models_volume", "secured", "stored"]

Object = dict[str, Any]
MODELS = "/models"
TRUST = "/run/trust"


@dataclass(frozen=True)
class Stored:
    """A pod's share in it.

    Attributes:
        volumes: of the pod; the one called "models" is what Triton serves.
        first: containers that come before it.
    """

    volumes: tuple[Object, ...]
    first: tuple[Object, ...]


def stored(options: RenderOptions) -> Stored:
    """The repository at MODELS, checked."""
    source = models_volume(options)
    own: Object = {"name": "models", "emptyDir": {}}
    trust: Object = {"name": "trust", "configMap": {"name": options.signed_by}}
    signed = ["--public-key", f"{TRUST}/public.pem"] if options.signed_by else []
    trusted = [{"name": "trust", "mountPath": TRUST, "readOnly": True}] if signed else []
    writable = {"name": "models", "mountPath": MODELS}
    if source is None:
        check = helper(options, "check", ["check", MODELS, *signed], [{**writable, "readOnly": True}, *trusted])
        tmp = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108  a volume of the pod's own
        return Stored((own, *([trust] if signed else [])), (_fetch(options, [writable, tmp]), check))
    if not signed:
        check = helper(options, "check", ["check", MODELS], [{**writable, "readOnly": True}])
        return Stored((source,), (check,))
    given = {"name": "source", "mountPath": "/source", "readOnly": True}
    check = helper(options, "check", ["check", "/source", *signed, "--into", MODELS], [given, writable, *trusted])
    return Stored(({**source, "name": "source"}, own, trust), (check,))


def models_volume(options: RenderOptions) -> Object | None:
    """The storage itself; None where it is a bucket, which can't be mounted."""
    kind, _, where = options.storage.partition(":")
    if kind == "pvc":
        return {"name": "models", "persistentVolumeClaim": {"claimName": where, "readOnly": True}}
    if kind == "image":
        return {"name": "models", "image": {"reference": where, "pullPolicy": "IfNotPresent"}}
    return None


def helper(options: RenderOptions, name: str, args: list[str], mounts: list[Object], image: str = "") -> Object:
    """A container that does one thing before the others, and ends."""
    return {
        "name": name,
        "image": image or options.gateway_image,
        "args": args,
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}},
        "securityContext": secured(),
        "volumeMounts": mounts,
    }


def secured() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _fetch(options: RenderOptions, mounts: list[Object]) -> Object:
    """Copy a bucket, s3://BUCKET/PATH or s3://https://HOST:PORT/BUCKET/PATH as Triton writes it."""
    bucket = bucket_of(options.storage)
    endpoint = ["--endpoint-url", bucket.endpoint] if bucket.endpoint else []
    # A pod that starts again has what it fetched before: what has gone from the bucket goes, what changed is fetched.
    anew = ["--delete", "--exact-timestamps"]
    args = ["s3", "sync", bucket.url, MODELS, "--only-show-errors", *anew, *endpoint]
    container = helper(options, "fetch", args, mounts, image=options.fetch_image)
    container["env"] = [{"name": "HOME", "value": "/tmp"}]  # noqa: S108  a volume of the pod's own
    container["envFrom"] = [{"secretRef": {"name": f"{options.name}-bucket"}}]
    container["resources"] = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"cpu": "2", "memory": "512Mi"}}
    return container
