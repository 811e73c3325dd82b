"""How many replicas a traffic needs, by simulation with what a load test measured."""
