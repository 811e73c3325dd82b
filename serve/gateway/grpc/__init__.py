"""The Open Inference Protocol over gRPC, with the identity, limits and releases of HTTP."""
