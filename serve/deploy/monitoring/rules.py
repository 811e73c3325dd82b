"""What Prometheus computes: rates, shares of slow and failed requests, Triton's own account, autoscaling."""

from __future__ import annotations

from typing import Any

from serve.deploy.monitoring.objectives import Objectives

__all__ = ["INFERENCE", "recording_rules"]

WINDOWS = ("5m", "30m", "1h", "6h", "3d")
INFERENCE = "/v2/.+/infer|/predict/.+|/v1/embeddings|/v1/rerank|ModelInfer"  # INFERENCE_ROUTES of the gateway


def recording_rules(goal: Objectives) -> dict[str, Any]:
    """The rules file: rates, shares of slow and failed requests over each window, Triton's own account."""
    asked = f'gateway_requests_total{{route=~"{INFERENCE}"}}'
    failed = f'gateway_requests_total{{route=~"{INFERENCE}",code=~"5.."}}'
    seconds = "gateway_request_duration_seconds"
    rules = [
        _record("serving:requests:rate5m", f"sum by (model) (rate({asked}[5m]))"),
        *(
            _record(f"serving:latency_{name}_seconds:5m", f"histogram_quantile({share}, sum by (model, le) "
                    f"(rate({seconds}_bucket[5m])))")
            for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
        ),
    ]  # fmt: skip
    for window in WINDOWS:
        # A counter that is not there yet counts nothing, which is not the same as no figure.
        rules.append(
            _record(
                f"serving:request_errors:ratio_rate{window}",
                f"(sum by (model) (rate({failed}[{window}])) or 0 * sum by (model) (rate({asked}[{window}]))) "
                f"/ sum by (model) (rate({asked}[{window}]))",
            )
        )
        rules.append(
            _record(
                f"serving:request_slow:ratio_rate{window}",
                f'1 - sum by (model) (rate({seconds}_bucket{{le="{goal.slow_s}"}}[{window}])) '
                f"/ sum by (model) (rate({seconds}_count[{window}]))",
            )
        )
    return {"groups": [{"name": "serving", "rules": rules}, {"name": "triton", "rules": _triton()}]}


def _triton() -> list[dict[str, str]]:
    success = "rate(nv_inference_request_success[5m])"
    return [
        _record("triton:requests:rate5m", f"sum by (model) ({success})"),
        # The sum of the queue's times over requests that ended: what a request waited, on average.
        _record("triton:queue_seconds:mean5m", _mean("nv_inference_queue_duration_us", "5m")),
        _record("triton:compute_seconds:mean5m", _mean("nv_inference_compute_infer_duration_us", "5m")),
        _record("triton:batch_size:mean5m",
                "sum by (model) (rate(nv_inference_count[5m])) / sum by (model) (rate(nv_inference_exec_count[5m]))"),
        _record("triton:pending:sum", "sum by (model) (nv_inference_pending_request_count)"),
        _record("triton:failures:ratio_rate5m",
                "sum by (model) (rate(nv_inference_request_failure[5m])) / (sum by (model) "
                f"({success}) + sum by (model) (rate(nv_inference_request_failure[5m])))"),
        # What an autoscaler looks at, over all replicas.
        _record("autoscale:queue_seconds:mean1m",
                "sum(rate(nv_inference_queue_duration_us[1m])) / sum(rate(nv_inference_request_success[1m])) / 1e6"),
        _record("autoscale:pending:mean", "sum(nv_inference_pending_request_count) / count(up{job=\"triton\"} == 1)"),
        _record("autoscale:requests:rate1m", "sum(rate(nv_inference_request_success[1m]))"),
        _record("autoscale:latency_p99_seconds:1m",
                "histogram_quantile(0.99, sum by (le) (rate(gateway_request_duration_seconds_bucket[1m])))"),
    ]  # fmt: skip


def _mean(microseconds: str, window: str) -> str:
    """Seconds of a request, from Triton's sum over all of them."""
    requests = f"sum by (model) (rate(nv_inference_request_success[{window}]))"
    return f"sum by (model) (rate({microseconds}[{window}])) / {requests} / 1e6"


def _record(name: str, expr: str) -> dict[str, str]:
    return {"record": name, "expr": expr}
