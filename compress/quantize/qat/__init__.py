"""Quantization-aware training: what is trained computes what the exported file will."""
