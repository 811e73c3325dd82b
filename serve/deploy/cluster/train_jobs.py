"""A recovery training on several machines of a cluster: torchrun's elastic launch as an indexed Job.

The pods meet at the first one's; who comes back, or is left, goes on from the state on the volume that all of them
have. The training is through when the first pod is: none ends before what comes out is written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from posixpath import join, normpath
from typing import Any

from compress.errors import ServerError
from serve.deploy.cluster.manifests import pod_security
from serve.deploy.cluster.naming import labels
from serve.deploy.cluster.storage import secured
from serve.deploy.options import CPU, NAME, SMALL, image_of

__all__ = ["TrainJob", "lines_first", "training_of"]

Object = dict[str, Any]
PORT = 29400
MOST_NODES = 256
RESTARTS = 20  # of pods, for each of them
MISTAKE = 2  # how a command ends that would fail again
DATA = "/data"
# c10d: a pod that is gone is missed after some 15 s; those that are left wait for others as long as --wait-s. Each loss
# takes a restart of those that are left; who has none any more is made again as a pod.
STARTS = (
    'exec python -m compress.cli.elastic --nnodes "$NODES" --nproc-per-node "$PROCESSES" --max-restarts 3 '
    '--rdzv-backend c10d --rdzv-id "$TRAINING" --rdzv-endpoint "$MEETING" '
    '--rdzv-conf "last_call_timeout=$WAIT_S,join_timeout=1800,'
    'is_host=$([ "$JOB_COMPLETION_INDEX" = 0 ] && echo true || echo false)" -- "$@"'
)
OURS = ("--devices", "--tune-training")


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Who trains, and where.

    Raises:
        ServerError: a value that can't work.
    """

    image: str
    """Of deploy/docker/compress.Dockerfile, with a tag or a digest; for GPUs, one with torch for CUDA."""

    claim: str
    """PersistentVolumeClaim that all pods can write at once (ReadWriteMany), with model and data: the folder that the
    command is run in."""

    nodes: int = 2
    """Pods."""

    least_nodes: int = 1
    """With fewer of them nothing is trained."""

    gpus: int = 0
    """Of each pod, a process each; 0 for one process on the CPU."""

    name: str = "train"
    """Of the training."""

    namespace: str = "training"
    """Where it goes."""

    cpu: str = "4"
    """Processors of a pod."""

    memory: str = "8Gi"
    """Of a pod."""

    wait_s: int = 30
    """How long those that are there wait for others, where they are enough, in seconds."""

    deadline_s: int = 86400
    """When all of it ends, however far it is, in seconds; the same training goes on from there."""

    def __post_init__(self) -> None:
        image_of(self.image, "--image")
        for flag, text in (("--name", self.name), ("--namespace", self.namespace), ("--claim", self.claim)):
            if not NAME.fullmatch(text):
                raise _unusable(f"{flag} {text!r}", SMALL)
        if not 1 <= self.least_nodes <= self.nodes <= MOST_NODES:
            what = f"--least-nodes {self.least_nodes} of --nodes {self.nodes}"
            raise _unusable(what, f"take 1 to {MOST_NODES}, and no more of the least than of all")
        if not 0 <= self.gpus <= 16:
            raise _unusable(f"--gpus {self.gpus}", "take 0 to 16, those of one machine")
        if not CPU.fullmatch(self.cpu):
            raise _unusable(f"--cpu {self.cpu!r}", "write it as Kubernetes does, as in 2 or 1500m")
        if not re.fullmatch(r"0*[1-9]\d*([KMGT]i|[kMGT])?", self.memory):
            raise _unusable(f"--memory {self.memory!r}", "write it as Kubernetes does, as in 8Gi")
        for flag, value in (("--wait-s", self.wait_s), ("--deadline-s", self.deadline_s)):
            if value < 1:
                raise _unusable(f"{flag} {value}", "take 1 or more")

    @property
    def meeting(self) -> str:
        """Where the pods meet."""
        return f"{self.name}-0.{self.name}.{self.namespace}.svc:{PORT}"


def training_of(options: TrainJob, arguments: Sequence[str]) -> list[Object]:
    """The objects.

    Args:
        arguments: the command, as in finetune pruned.pt --data train.npz -o recovered; its paths are on the volume.

    Raises:
        ServerError: another command than `compress finetune`, or flags that don't go with several machines.
    """
    if not arguments or arguments[0] != "finetune":
        why = "nothing follows --" if not arguments else f"what follows -- is {arguments[0]!r}"
        mend = "write the training as it would be typed: -- finetune pruned.pt --data train.npz -o recovered"
        raise ServerError("can't write the training's manifests", why=why, mend=mend)
    if own := [word for word in arguments if word.partition("=")[0] in OURS]:
        why = f"{own[0]} is among what follows --"
        mend = "leave it out: --nodes and --gpus say how many train, and settings are searched for on one machine"
        raise ServerError("can't write the training's manifests", why=why, mend=mend)
    if not _kept(arguments):
        why = "what it makes would not be on the volume"
        mend = f"let the command have an output there, which pods see as {DATA}: -o recovered"
        raise ServerError("can't write the training's manifests", why=why, mend=mend)
    return [_service(options), _job(options, arguments), _policy(options)]


def _kept(arguments: Sequence[str]) -> bool:
    """Whether the command names an output on the volume, as far as can be told without its parser."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    outputs = [words[at + 1] for at, word in enumerate(words[:-1]) if word in ("-o", "--output")]
    return bool(outputs) and normpath(join(DATA, outputs[-1])).startswith(f"{DATA}/")


def lines_first(options: TrainJob) -> list[str]:
    """What has to be in the cluster first, and how the training is followed."""
    space = f"kubectl -n {options.namespace}"
    claim = f"a PersistentVolumeClaim {options.claim} that {options.nodes} pods can write (ReadWriteMany)"
    return [
        f"{claim}, with the files that the command names, writable by the group {pod_security()['fsGroup']}",
        f"its progress: {space} logs -f job/{options.name}; torchrun asks for no key: keep the namespace to yourself",
    ]


def _meta(options: TrainJob) -> Object:
    return {"name": options.name, "namespace": options.namespace, "labels": _labels(options)}


def _labels(options: TrainJob) -> dict[str, str]:
    return labels(options, "training")


def _service(options: TrainJob) -> Object:
    """Gives each pod a name, before it is ready, as nothing else waits for that."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(options),
        "spec": {
            "clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(options),
            "ports": [{"name": "meeting", "port": PORT}],
        },
    }  # fmt: skip


def _job(options: TrainJob, arguments: Sequence[str]) -> Object:
    """Pods that are moved off a machine don't count as failed; one that is lost is made again; a mistake ends all."""
    moved = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    wrong = {
        "action": "FailJob",
        "onExitCodes": {"containerName": "training", "operator": "In", "values": [MISTAKE]},
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _meta(options),
        "spec": {
            "completions": options.nodes, "parallelism": options.nodes, "completionMode": "Indexed",
            "backoffLimit": RESTARTS * options.nodes, "activeDeadlineSeconds": options.deadline_s,
            "podFailurePolicy": {"rules": [moved, wrong]},
            "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
            "template": _pod(options, arguments),
        },
    }  # fmt: skip


def _pod(options: TrainJob, arguments: Sequence[str]) -> Object:
    asks = {"cpu": options.cpu, "memory": options.memory}
    bounds = {"memory": options.memory} | ({"nvidia.com/gpu": str(options.gpus)} if options.gpus else {})
    environ = {
        "NODES": f"{options.least_nodes}:{options.nodes}",
        "PROCESSES": str(options.gpus or 1),
        "TRAINING": options.name,
        "MEETING": options.meeting,
        "WAIT_S": str(options.wait_s),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else who comes back is never told where the others are
    }
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    tolerated = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}] if options.gpus else []
    return {
        "metadata": {"labels": _labels(options)},
        "spec": {
            "restartPolicy": "Never",
            "subdomain": options.name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 30,
            "securityContext": pod_security(),
            "topologySpreadConstraints": [spread | {"labelSelector": {"matchLabels": _labels(options)}}],
            **({"tolerations": tolerated} if tolerated else {}),
            "containers": [
                {
                    "name": "training",
                    "image": options.image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["sh", "-c", STARTS, "compress"],
                    "args": [word.replace("$(", "$$(") for word in arguments],
                    "workingDir": DATA,
                    "env": [{"name": name, "value": value} for name, value in environ.items()],
                    "resources": {"requests": asks, "limits": bounds},
                    "securityContext": secured(),
                    "volumeMounts": [
                        {"name": "data", "mountPath": DATA},
                        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  a volume of the pod's own
                        {"name": "shared", "mountPath": "/dev/shm"},  # noqa: S108  what loaders hand over
                    ],
                }
            ],
            "volumes": [
                {"name": "data", "persistentVolumeClaim": {"claimName": options.claim}},
                {"name": "tmp", "emptyDir": {"sizeLimit": "8Gi"}},
                {"name": "shared", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
            ],
        },
    }


def _policy(options: TrainJob) -> Object:
    """The pods hear one another alone: neither torchrun nor gloo nor NCCL asks for a key."""
    own = {"podSelector": {"matchLabels": _labels(options)}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _meta(options),
        "spec": {
            "podSelector": {"matchLabels": _labels(options)},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [own]}],
        },
    }


def _unusable(what: str, mend: str) -> ServerError:
    return ServerError("can't write the training's manifests", why=f"{what} can't be", mend=mend)
