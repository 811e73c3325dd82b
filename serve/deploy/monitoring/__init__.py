"""What Prometheus scrapes and computes, what it wakes people for, and what Grafana shows."""
