"""What `serve deploy render` can be asked for."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import Parameter

from compress.errors import ServerError
from compress.vetting.texts import parse_json, read_bytes
from serve.deploy.addresses import bucket_of, is_claim, is_url
from serve.deploy.monitoring.objectives import DEFAULT

__all__ = ["RenderOptions", "image_of", "read_plan"]

NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
IMAGE = re.compile(
    r"(?P<name>[a-z0-9]+(?:[._:/-][a-z0-9]+)*?)(?::(?P<tag>[\w][\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
CPU = re.compile(r"\d+(\.\d+)?|\d+m")
SMALL = "take small letters, digits and -, a letter first, 40 at most"
Many = Parameter(consume_multiple=True, negative_iterable="")


@dataclass(frozen=True, kw_only=True)
class RenderOptions:
    """What runs where.

    Raises:
        ServerError: a value that can't work.
    """

    gateway_image: str
    """Of deploy/docker/gateway.Dockerfile, with a tag or a digest."""

    image: str = "nvcr.io/nvidia/tritonserver:26.07-py3"
    """Of Triton; one of deploy/docker/triton.Dockerfile where hooks require packages."""

    name: str = "serving"
    """Of the application; its parts are NAME-triton and NAME-gateway.
    The Helm chart has the release's name there."""

    namespace: str = "serving"
    """Where it goes."""

    storage: str = "pvc:models"
    """Where the model repository is: pvc:CLAIM, s3://BUCKET/PATH (of another service than AWS
    s3://https://HOST:PORT/BUCKET/PATH), or image:REFERENCE (an image volume)."""

    target: float | None = None
    """Requests a second that one Triton shall have; by default that of --plan, else 0.7 of the most that --load saw
    within the objective, else 50."""

    min_replicas: int | None = None
    """Tritons at least; by default that of --plan, or 2."""

    max_replicas: int | None = None
    """Tritons at most; by default that of --plan, or 10."""

    plan: Path | None = None
    """What `serve plan --output` wrote as .json: target, replicas and objective."""

    load: Path | None = None
    """What `serve load --output` wrote as .json, of one replica on such a machine: what is requested of a node."""

    slo: str | None = None
    """The objective that canaries and scaling are held to; by default that of --plan."""

    max_queue_ms: float = 25.0
    """Mean wait in Triton's queue, from which on there shall be more replicas."""

    start_s: int = 300
    """How long Triton may take to load and warm up, in seconds."""

    drain_s: int = 30
    """How long requests in flight may take to end when a pod stops, in seconds."""

    max_drop: float = 1.0
    """The most that a canary's model may have lost in compression, in points of its metric."""

    prometheus: str = "http://prometheus.monitoring.svc:9090"
    """Where KEDA and Argo Rollouts ask."""

    monitoring_namespace: str = "monitoring"
    """Where Prometheus runs: it alone may read Triton's metrics."""

    fetch_image: str = "public.ecr.aws/aws-cli/aws-cli:2.17.0"
    """With AWS's command line, which copies a bucket into each pod."""

    prometheus_image: str = "localhost/compress-serve-prometheus:0.1.0"
    """Of Prometheus beside the pods that Podman plays; deploy/docker/prometheus.Dockerfile, or any with `http-ok`."""

    gateway_port: int = 8080
    """Of this machine, where Podman publishes the gateway, on 127.0.0.1 alone."""

    prometheus_port: int = 9090
    """The same, of Prometheus."""

    signed_by: str = ""
    """A ConfigMap whose public.pem is the key of `serve sign`: pods then serve nothing else."""

    engine_script: Path | None = None
    """What `compress engine-script` wrote: each Triton of the GPU overlay builds the plan for its own GPU before it
    starts, from the artifact that then is in the storage instead of a repository."""

    gpu_product: str = ""
    """The node label nvidia.com/gpu.product of the GPUs that an engine is for, such as NVIDIA-H100-80GB-HBM3."""

    def __post_init__(self) -> None:
        image_of(self.image, "--image")
        image_of(self.gateway_image, "--gateway-image")
        image_of(self.fetch_image, "--fetch-image")
        image_of(self.prometheus_image, "--prometheus-image")
        for flag, name in (("--name", self.name), ("--namespace", self.namespace)):
            if not NAME.fullmatch(name):
                raise _unusable(flag, name, "it is no name for Kubernetes", SMALL)
        if self.signed_by and not NAME.fullmatch(self.signed_by):
            raise _unusable("--signed-by", self.signed_by, "it is no name for Kubernetes", f"name a ConfigMap: {SMALL}")
        if not NAMESPACE.fullmatch(self.monitoring_namespace):
            why, mend = "it is no name for Kubernetes", "take small letters, digits and -, 63 at most"
            raise _unusable("--monitoring-namespace", repr(self.monitoring_namespace), why, mend)
        if not is_url(self.prometheus):
            mend = "give http://HOST:PORT, or https://HOST/PATH, without a password"
            raise _unusable("--prometheus", "…", "it is no address of a server", mend)
        if self.gpu_product and not LABEL.fullmatch(self.gpu_product):
            mend = "give what `kubectl get nodes -L nvidia.com/gpu.product` shows"
            raise _unusable("--gpu-product", repr(self.gpu_product), "it is no value of a label", mend)
        kind, _, where = self.storage.partition(":")
        if self.engine_script is not None and (kind == "s3" or not self.engine_script.is_file()):
            why = "a bucket can't be mounted" if kind == "s3" else "there is no such file"
            mend = "make it with `compress engine-script`, and keep the artifact on a volume"
            raise _unusable("--engine-script", self.engine_script, why, mend)
        if self.engine_script is not None and self.signed_by:
            why = "each pod builds what it serves, which nobody has signed"
            raise _unusable("--signed-by", self.signed_by, why, "leave one of --signed-by and --engine-script out")
        if kind not in ("pvc", "s3", "image") or not where.strip("/"):
            raise _unusable(
                "--storage", self.storage, "it is none of the kinds", "pvc:CLAIM, s3://BUCKET/PATH, image:REF"
            )
        if kind == "image":
            image_of(where, "--storage")
        if kind == "pvc" and not is_claim(where):
            mend = "name a claim: small letters, digits, - and dots, as in pvc:models"
            raise _unusable("--storage", repr(self.storage), "Kubernetes takes it for no claim's name", mend)
        if kind == "s3":
            try:
                bucket_of(self.storage)
            except ValueError as err:
                mend = "give s3://BUCKET/PATH, or s3://https://HOST:PORT/BUCKET/PATH; the key goes into a Secret"
                raise _unusable("--storage", "s3://…", str(err), mend) from err
        for flag, port in (("--gateway-port", self.gateway_port), ("--prometheus-port", self.prometheus_port)):
            if not 0 < port < 65536:
                raise _unusable(flag, port, "it is no port", "give one of 1 to 65535")
        for field in ("target", "min_replicas", "max_replicas", "max_queue_ms", "start_s", "drain_s", "max_drop"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value > 0):
                why = "it is no number" if not math.isfinite(value) else "it is too small"
                raise _unusable(f"--{field.replace('_', '-')}", value, why, "give more than 0")
        if self.min_replicas is not None and self.max_replicas is not None and self.min_replicas > self.max_replicas:
            why = f"--max-replicas is {self.max_replicas}"
            raise _unusable("--min-replicas", self.min_replicas, why, "give no more than that")


def image_of(text: str, flag: str) -> str:
    """An image that stays what it is.

    Raises:
        ServerError: it has neither a tag nor a digest, or the tag `latest`.
    """
    found = IMAGE.fullmatch(text)
    if found is None or not (found["tag"] or found["digest"]) or found["tag"] == "latest":
        why = "it is no image" if found is None else "what it stands for changes"
        raise _unusable(flag, text, why, "give a tag other than latest, or a digest (name@sha256:…)")
    return text


def read_plan(path: Path | None) -> dict[str, Any]:
    """Scaling and objective of a plan; without one, what is careful.

    Raises:
        ServerError: it is no plan.
    """
    if path is None:
        return {"objective": DEFAULT, "scaling": {"least": 2, "most": 10, "target": None, "down_window_s": 300.0}}
    try:
        data = parse_json(read_bytes(path, named=True))
        if data["kind"] != "serve plan" or data["schema_version"] != 1:
            raise ValueError("it is of something else")
        data["scaling"]["target"], data["objective"]
        found: dict[str, Any] = data
        return found
    except OSError as err:
        raise ServerError(f"can't read {path}", why=err.strerror or str(err), mend="name a file that is there") from err
    except (KeyError, TypeError, ValueError) as err:
        raise ServerError(
            f"can't read {path}", why=f"it is no plan: {err!r}", mend="name a .json that `serve plan --output` wrote"
        ) from err


def _unusable(flag: str, value: object, why: str, mend: str) -> ServerError:
    return ServerError(f"can't deploy with {flag} {value}", why=why, mend=mend)
