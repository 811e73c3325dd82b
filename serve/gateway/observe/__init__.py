"""What is told of requests: metrics, history, access log, traces."""
