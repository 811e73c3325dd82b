"""The versions that ONNX Runtime takes operators in where a model does not say which."""

from __future__ import annotations

import functools

from onnx import TensorProto, defs, helper

__all__ = ["newest"]


@functools.cache
def newest(domain: str) -> int | None:
    """Of a domain: the newest that ONNX Runtime has; None of one that it has not.

    Of ONNX's own it has operators of versions, too, that are not released yet, and takes no model that says so.
    """
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema  # as most need none of this

    versions = [schema.since_version for schema in get_all_operator_schema() if schema.domain == domain]
    known = max(map(int, versions), default=None)
    if domain or known is None:
        return known
    newer = max(known, defs.onnx_opset_version())
    return next((version for version in range(newer, 1, -1) if _opens(version)), known)


def _opens(opset: int) -> bool:
    import onnxruntime as ort

    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # of its own classes, without a common base
        return False
    return True
