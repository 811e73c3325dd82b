"""Writing the monitoring: what Prometheus scrapes and computes, what it wakes people for, what Grafana shows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from compress.errors import ServerError
from compress.vetting.replace import mend_of, replace_file
from serve.deploy.cluster.yaml_text import yaml_text
from serve.deploy.monitoring.alerts import alert_rules
from serve.deploy.monitoring.dashboards import dashboard
from serve.deploy.monitoring.objectives import DEFAULT, objectives_of
from serve.deploy.monitoring.rules import recording_rules

__all__ = ["DATA", "LIMITS", "MonitoringOptions", "files", "write_monitoring"]

HEAD = "# Written by `serve deploy monitoring`; another run replaces it.\n"
RULES_HEAD = HEAD + "# For a Prometheus that watches one application: of several, it would add all up.\n"
LIMITS: dict[str, int | str] = {
    "sample_limit": 50_000, "body_size_limit": "16MB", "label_limit": 32, "label_name_length_limit": 128,
    "label_value_length_limit": 1024,
}  # fmt: skip
"""Of one look at one server: whoever answers in its place, or breaks it, fills no Prometheus. A look past them is none,
so that the alert says that the server is down. A gateway has some 25 samples of a model, of a thousand at most; Triton
13 of each version."""
DATA = ("--storage.tsdb.retention.time=15d", "--storage.tsdb.retention.size=2GB")
"""What a Prometheus in a container keeps: the oldest goes first."""
TARGET = re.compile(r"[\w.\-]+:\d+|\[[0-9a-fA-F:]+\]:\d+")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MonitoringOptions:
    """What is watched, and what it is held to.

    Attributes:
        gateway: host:port of each gateway.
        triton: host:port of each Triton's metrics.
        slo: a percentile of the latency and the share of errors, as `serve load` takes them.
        interval_s: seconds between two looks.
        by_name: look up anew who answers to each name, and scrape all of them: a headless service, a network alias.
        key_file: where Prometheus finds the gateway's key with --metrics; a path on its machine, never the key itself.
    """

    gateway: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ("127.0.0.1:8080",)
    triton: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ("127.0.0.1:8002",)
    slo: str = DEFAULT
    interval_s: int = 15
    by_name: bool = False
    key_file: str | None = None

    def __post_init__(self) -> None:
        for target in (*self.gateway, *self.triton):
            if not TARGET.fullmatch(target):
                raise ServerError(
                    f"can't scrape {target!r}", why="it is not host:port", mend="write it as in gateway:8080"
                )
        if self.interval_s < 1:
            raise ServerError(
                f"can't look every {self.interval_s} s", why="the least is one second", mend="give --interval-s 15"
            )


def files(options: MonitoringOptions) -> dict[str, str]:
    """Every file by its path."""
    goal = objectives_of(options.slo)
    provider = {"name": "serving", "type": "file", "options": {"path": "/etc/grafana/dashboards"}}
    source = {"name": "Prometheus", "type": "prometheus", "url": "http://prometheus:9090", "isDefault": True}
    return {
        "prometheus/prometheus.yml": yaml_text(_scraping(options), HEAD),
        "prometheus/recording.yml": yaml_text(recording_rules(goal), RULES_HEAD),
        "prometheus/alerts.yml": yaml_text(alert_rules(goal), RULES_HEAD),
        "grafana/dashboards/serving.json": json.dumps(dashboard(goal), indent=2) + "\n",
        "grafana/provisioning/dashboards/serving.yml": yaml_text({"apiVersion": 1, "providers": [provider]}, HEAD),
        "grafana/provisioning/datasources/prometheus.yml": yaml_text({"apiVersion": 1, "datasources": [source]}, HEAD),
    }


def write_monitoring(folder: Path, options: MonitoringOptions) -> list[Path]:
    """Write all files below a folder; each is written beside and renamed.

    Raises:
        ServerError: an objective or a target that can't be watched, or the disk refuses.
        MissingExtraError: PyYAML is not installed.
    """
    made = []
    for name, text in files(options).items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text)
        except OSError as err:
            mend = mend_of(err, "name a folder that can be written")
            raise ServerError(f"can't write {path}", why=str(err), mend=mend) from err
        made.append(path)
    return made


def _scraping(options: MonitoringOptions) -> dict[str, Any]:
    every = f"{options.interval_s}s"
    gateway: dict[str, Any] = {"job_name": "gateway", **LIMITS, **_targets(options, options.gateway)}
    if options.key_file is not None:
        gateway["authorization"] = {"type": "Bearer", "credentials_file": options.key_file}
    return {
        "global": {"scrape_interval": every, "evaluation_interval": every},
        "rule_files": ["recording.yml", "alerts.yml"],
        "scrape_configs": [gateway, {"job_name": "triton", **LIMITS, **_targets(options, options.triton)}],
    }


def _targets(options: MonitoringOptions, addresses: Sequence[str]) -> dict[str, Any]:
    if not options.by_name:
        return {"static_configs": [{"targets": list(addresses)}]}
    parts = [address.rpartition(":") for address in addresses]
    each = f"{min(options.interval_s, 5)}s"
    return {
        "dns_sd_configs": [
            {"names": [host], "type": "A", "port": int(port), "refresh_interval": each} for host, _, port in parts
        ]
    }
