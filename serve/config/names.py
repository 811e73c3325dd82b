"""What a model and a version may be called: one rule for packing, linting, releasing, routing and asking."""

__all__ = ["MODEL_NAME", "VERSION"]

# Triton does not decode its paths, so no other name can be served over HTTP. "." and ".." stay out, and so does
# "stats": /v2/models/stats gives every model's statistics.
MODEL_NAME = r"(?!(?:\.{1,2}|stats)(?:/|$))[A-Za-z0-9_.+:@=~-]{1,256}"
VERSION = r"[0-9]{1,18}"
