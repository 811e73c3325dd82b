"""An HTTP gateway in front of Triton: identity, friendly input and output, telemetry; bytes in, bytes out."""
