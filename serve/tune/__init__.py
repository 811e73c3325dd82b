"""Finding the configuration of a model that gives the most throughput within a latency, on this machine."""
