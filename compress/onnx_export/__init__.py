"""From a torch module to an ONNX file: exported, proven against torch, folded, shared weights stored once.

Imports evaluate, runtime and what lies under them.
"""
