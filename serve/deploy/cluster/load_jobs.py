"""A load from several pods of a cluster: workers as an indexed Job, and a Job that gives them their load.

Workers listen over TLS, for whoever knows their token, and end when the load has. Keys, token and certificate are in no
manifest: the command prints what makes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compress.errors import ServerError
from serve.deploy.cluster.manifests import pod_security
from serve.deploy.cluster.naming import labels, meta
from serve.deploy.cluster.storage import secured
from serve.deploy.options import CPU, NAME, SMALL, image_of

__all__ = ["LoadJobs", "jobs_of", "lines_first"]

Object = dict[str, Any]
PORT = 9200
MOST_WORKERS = 256
RESULT = "/tmp/load.json"  # noqa: S108  a volume of the pod's own
SENDS = (  # a shell that is process 1 passes no signal on: then the load would go on through the grace period
    f'serve load "$@" --output {RESULT} & load=$!; trap "kill -TERM $load" TERM; wait $load; code=$?; '
    f"while kill -0 $load 2>/dev/null; do wait $load; code=$?; done; test ! -s {RESULT} || cat {RESULT}; exit $code"
)
WAIT_S = 600
"""For pods to be placed, and their image to come."""
SECRETS = re.compile(r"(--header=)?\s*[^\s:]*(authorization|cookie|key|token|secret|password)[^\s:]*\s*:", re.I)
FINAL = (1, 3, 4)  # exit codes of a load that was sent: only what could not be sent is tried again
OURS = (
    "--worker", "--worker-ca", "--worker-plain", "--worker-wait", "--output", "--allow-remote", "--processes", "--cpus",
    "--ray", "--ray-workers",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LoadJobs:
    """What sends load, and from where.

    Raises:
        ServerError: a value that can't work.
    """

    image: str
    """Of deploy/docker/gateway.Dockerfile, with a tag or a digest."""

    url: str = "http://serving-gateway:8080"
    """The gateway or Triton, as the cluster's pods reach it."""

    workers: int = 4
    """Pods that send."""

    name: str = "load"
    """Of the load; its parts are NAME-workers and NAME-coordinator."""

    namespace: str = "serving"
    """Where it goes."""

    cpu: str = "1"
    """Processor of a worker, whole ones best: one that is throttled is late."""

    deadline_s: int = 3600
    """When all of it ends, however far it is, in seconds."""

    def __post_init__(self) -> None:
        image_of(self.image, "--image")
        for flag, text in (("--name", self.name), ("--namespace", self.namespace)):
            if not NAME.fullmatch(text):
                raise _unusable(f"{flag} {text!r}", SMALL)
        if not 1 <= self.workers <= MOST_WORKERS:
            raise _unusable(f"--workers {self.workers}", f"take 1 to {MOST_WORKERS}")
        if not CPU.fullmatch(self.cpu):
            raise _unusable(f"--cpu {self.cpu!r}", "write it as Kubernetes does, as in 2 or 1500m")
        if self.deadline_s < 1:
            raise _unusable(f"--deadline-s {self.deadline_s}", "take 1 or more")

    @property
    def hosts(self) -> list[str]:
        """Where the workers listen."""
        place = f"{self.name}-workers.{self.namespace}.svc"
        return [f"{self.name}-workers-{number}.{place}" for number in range(self.workers)]


def jobs_of(options: LoadJobs, arguments: Sequence[str]) -> list[Object]:
    """The objects.

    Args:
        arguments: of `serve load`, but for what says who sends.

    Raises:
        ServerError: some say that, too, or are secrets.
    """
    if own := [word for word in arguments if word.partition("=")[0] in OURS]:
        why = f"{own[0]} is among what follows --"
        raise ServerError("can't write the load's manifests", why=why, mend="leave it out: the manifests say it")
    if any(SECRETS.match(word) for word in arguments):
        raise ServerError(
            "can't write the load's manifests",
            why="a header among what follows -- is a secret, and they are no place for one",
            mend=f"put the key into the Secret {options.name}-key: `serve load` sends it as a bearer token",
        )
    return [_service(options), _workers(options), _coordinator(options, arguments), _policy(options)]


def lines_first(options: LoadJobs) -> list[str]:
    """What has to be in the cluster first, with the commands that make it."""
    name, space = options.name, f"kubectl -n {options.namespace}"
    wildcard = f"*.{name}-workers.{options.namespace}.svc"
    token = f"{space} create secret generic {name}-token --from-literal=token=$(openssl rand -hex 32)"
    made = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=workers "
        f"-addext 'subjectAltName=DNS:{wildcard}' -keyout tls.key -out tls.crt"
    )
    key = f"{space} create secret generic {name}-key --from-literal=key=KEY"
    return [
        f"the workers' token: {token}",
        f"their certificate: {made}; {space} create secret tls {name}-tls --cert=tls.crt --key=tls.key",
        f"a key of the gateway's for the load (serve keys add load), where one is asked for: {key}",
        f"the figures are the coordinator's output, tables and then JSON: {space} logs -f job/{name}-coordinator",
    ]


def _meta(options: LoadJobs, part: str) -> Object:
    return meta(options, part) | {"namespace": options.namespace}


def _service(options: LoadJobs) -> Object:
    """Gives each worker a name; before it is ready, as nothing else waits for that."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(options, "workers"),
        "spec": {
            "clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels(options, "workers"),
            "ports": [{"name": "load", "port": PORT}],
        },
    }  # fmt: skip


def _workers(options: LoadJobs) -> Object:
    arguments = [
        "load", "worker", "--host", "0.0.0.0", "--port", str(PORT), "--allow-remote", "--once",  # noqa: S104
        "--tls-certificate", "/run/secrets/tls/tls.crt", "--tls-key", "/run/secrets/tls/tls.key",
    ]  # fmt: skip
    pod = _pod(options, "workers", {"args": arguments}, ("tls.crt", "tls.key"))
    pod["spec"]["subdomain"] = f"{options.name}-workers"
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    spread |= {"labelSelector": {"matchLabels": labels(options, "workers")}}
    pod["spec"]["topologySpreadConstraints"] = [spread]
    indexed = {"completions": options.workers, "parallelism": options.workers, "completionMode": "Indexed"}
    return _job(options, "workers", pod, indexed)


def _coordinator(options: LoadJobs, arguments: Sequence[str]) -> Object:
    workers = [f"{host}:{PORT}" for host in options.hosts]
    wait = str(min(WAIT_S, options.deadline_s))
    given = [
        *(word.replace("$", "$$") for word in (options.url, *arguments)),  # Kubernetes would put in its variables
        "--allow-remote", "--worker", *workers, "--worker-ca", "/run/secrets/tls/tls.crt", "--worker-wait", wait,
    ]  # fmt: skip
    container = {"command": ["sh", "-c", SENDS, "serve"], "args": given}
    final = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": list(FINAL)}}
    return _job(
        options, "coordinator", _pod(options, "coordinator", container, ("tls.crt",)),
        {"podFailurePolicy": {"rules": [final]}},
    )  # fmt: skip


def _job(options: LoadJobs, part: str, pod: Object, more: Object) -> Object:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _meta(options, part),
        "spec": {"backoffLimit": 6, "activeDeadlineSeconds": options.deadline_s, **more, "template": pod},
    }


def _pod(options: LoadJobs, part: str, container: Object, files: Sequence[str]) -> Object:
    secrets = [("SERVE_LOAD_TOKEN", "token", "token", False)]
    if part == "coordinator":
        secrets.append(("SERVE_API_KEY", "key", "key", True))
    memory = {"memory": "1Gi"}
    return {
        "metadata": {"labels": labels(options, part)},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": pod_security(),
            "containers": [
                {
                    "name": part,
                    "image": options.image,
                    "imagePullPolicy": "IfNotPresent",
                    **container,
                    "env": [
                        {
                            "name": variable,
                            "valueFrom": {
                                "secretKeyRef": {"name": f"{options.name}-{secret}", "key": key, "optional": optional}
                            },
                        }
                        for variable, secret, key, optional in secrets
                    ],
                    "resources": {"requests": {"cpu": options.cpu, **memory}, "limits": memory},
                    "securityContext": secured(),
                    "volumeMounts": [
                        {"name": "tls", "mountPath": "/run/secrets/tls", "readOnly": True},
                        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  a volume of the pod's own
                    ],
                }
            ],
            "volumes": [
                {
                    "name": "tls",
                    "secret": {
                        "secretName": f"{options.name}-tls", "defaultMode": 0o440,
                        "items": [{"key": name, "path": name} for name in files],
                    },
                },
                {"name": "tmp", "emptyDir": {"sizeLimit": "256Mi"}},
            ],
        },
    }  # fmt: skip


def _policy(options: LoadJobs) -> Object:
    """Workers hear the coordinator alone."""
    coordinator = {"podSelector": {"matchLabels": labels(options, "coordinator")}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _meta(options, "workers"),
        "spec": {
            "podSelector": {"matchLabels": labels(options, "workers")},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [coordinator], "ports": [{"port": PORT, "protocol": "TCP"}]}],
        },
    }


def _unusable(what: str, mend: str) -> ServerError:
    return ServerError("can't write the load's manifests", why=f"{what} can't be", mend=mend)
