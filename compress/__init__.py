"""From a trained PyTorch model to a pruned, INT8, measured ONNX file."""

__version__ = "0.1.0"
