"""What is wrong with an ONNX file, as whoever opens it tells apart."""

from __future__ import annotations

__all__ = ["ForeignOperatorError", "FunctionsError", "OnnxFileError"]


class OnnxFileError(ValueError):
    """An ONNX file that is damaged, or reaches beyond itself; says what."""


class ForeignOperatorError(OnnxFileError):
    """It calls an operator that a library would have to bring."""


class FunctionsError(OnnxFileError):
    """Its functions don't end, or make too much where they are called."""
