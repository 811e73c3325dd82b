"""What Prometheus computes: rates, shares of slow and failed requests, Triton's own account, autoscaling."""

from __future__ import annotations

from typing import Any

from serve.deploy.monitoring.objectives import Objectives
from serve.deploy.monitoring.scope import Scope

__all__ = ["FAILURE", "INFERENCE", "SUCCESS", "autoscaling", "recording_rules"]

WINDOWS = ("5m", "30m", "1h", "6h", "3d")
INFERENCE = "/v2/.+/infer|/predict/.+|/v1/embeddings|/v1/rerank|ModelInfer"  # INFERENCE_ROUTES of the gateway
SUCCESS, FAILURE = "nv_inference_request_success", "nv_inference_request_failure"


def recording_rules(goal: Objectives, scope: Scope = Scope()) -> dict[str, Any]:  # noqa: B008  it is frozen
    """The rules file: rates, shares of slow and failed requests over each window, Triton's own account.

    Args:
        goal: the objective.
        scope: whose series; those that are recorded keep its labels.
    """
    total, seconds = "gateway_requests_total", "gateway_request_duration_seconds"
    asked = scope.of(total, f'route=~"{INFERENCE}"')
    failed = scope.of(total, f'route=~"{INFERENCE}"', 'code=~"5.."')
    bucket, count = scope.of(f"{seconds}_bucket"), scope.of(f"{seconds}_count")
    fast = scope.of(f"{seconds}_bucket", f'le="{goal.slow_s}"')
    by_model = scope.sum_by("model")
    rules = [
        _record("serving:requests:rate5m", f"{by_model} (rate({asked}[5m]))"),
        *(
            _record(f"serving:latency_{name}_seconds:5m", f"histogram_quantile({share}, {scope.sum_by('model', 'le')} "
                    f"(rate({bucket}[5m])))")
            for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
        ),
    ]  # fmt: skip
    for window in WINDOWS:
        # A counter that is not there yet counts nothing, which is not the same as no figure.
        rules.append(
            _record(
                f"serving:request_errors:ratio_rate{window}",
                f"({by_model} (rate({failed}[{window}])) or 0 * {by_model} (rate({asked}[{window}]))) "
                f"/ {by_model} (rate({asked}[{window}]))",
            )
        )
        rules.append(
            _record(
                f"serving:request_slow:ratio_rate{window}",
                f"1 - {by_model} (rate({fast}[{window}])) / {by_model} (rate({count}[{window}]))",
            )
        )
    return {"groups": [{"name": "serving", "rules": rules}, {"name": "triton", "rules": _triton(scope)}]}


def autoscaling(scope: Scope) -> dict[str, str]:
    """What an autoscaler looks at, over all replicas of one application: a number each, by the name it is recorded as.

    Requests are those of clients, in which a load test and a plan say what a replica does. Triton counts an ensemble
    and each of its steps: so it is Triton's count of the models that clients ask for, where they are known. Else it is
    the gateway's, of requests that were answered, which lacks streams and the copies that a candidate gets.

    What requests wait, and how many do, is a sum over all models: an ensemble's steps wait, itself it never does.
    """
    if scope.models:
        requests = f"sum(rate({scope.asked(SUCCESS)}[1m]))"
    else:
        answered = scope.of("gateway_requests_total", f'route=~"{INFERENCE}"', 'code=~"2.."')
        requests = f"sum(rate({answered}[1m]))"
    queue, pending = scope.of("nv_inference_queue_duration_us"), scope.of("nv_inference_pending_request_count")
    up, bucket = scope.of("up", 'job="triton"'), scope.of("gateway_request_duration_seconds_bucket")
    return {
        "autoscale:queue_seconds:mean1m": f"sum(rate({queue}[1m])) / {requests} / 1e6",
        "autoscale:pending:mean": f"sum({pending}) / count({up} == 1)",
        "autoscale:requests:rate1m": requests,
        "autoscale:latency_p99_seconds:1m": f"histogram_quantile(0.99, sum by (le) (rate({bucket}[1m])))",
    }


def _triton(scope: Scope) -> list[dict[str, Any]]:
    by_model = scope.sum_by("model")

    def rate(name: str) -> str:
        return f"{by_model} (rate({scope.of(name)}[5m]))"

    labels = {"labels": dict(scope.labels)} if scope.labels else {}
    return [
        _record("triton:requests:rate5m", rate(SUCCESS)),
        # The sum of the queue's times over requests that ended: what a request waited, on average.
        *(
            _record(f"triton:{name}_seconds:mean5m", f"{rate(spent)} / {rate(SUCCESS)} / 1e6")
            for name, spent in (
                ("queue", "nv_inference_queue_duration_us"), ("compute", "nv_inference_compute_infer_duration_us"),
            )
        ),
        _record("triton:batch_size:mean5m", f"{rate('nv_inference_count')} / {rate('nv_inference_exec_count')}"),
        _record("triton:pending:sum", f"{by_model} ({scope.of('nv_inference_pending_request_count')})"),
        _record("triton:failures:ratio_rate5m", f"{rate(FAILURE)} / ({rate(SUCCESS)} + {rate(FAILURE)})"),
        *(_record(name, expr) | labels for name, expr in autoscaling(scope).items()),
    ]  # fmt: skip


def _record(name: str, expr: str) -> dict[str, Any]:
    return {"record": name, "expr": expr}
