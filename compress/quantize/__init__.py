"""INT8 and half precision of ONNX graphs: calibration, schemes for each target, what is put back into float.

Begin with `quantize_onnx`. Imports onnx_export, evaluate, runtime; `qat` imports training.
"""
