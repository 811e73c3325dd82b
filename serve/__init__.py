"""From an artifact to a Triton model repository, a running server, a gateway and a load test."""

__version__ = "0.1.0"
