"""Triton's ModelConfig: as data, as config.pbtxt, overlaid from tables, merged with edits by hand."""
