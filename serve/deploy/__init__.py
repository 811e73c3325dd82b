"""What carries a model repository from one machine to a fleet: so far its monitoring."""
