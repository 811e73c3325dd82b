"""The generators: arrivals, connections, timers, and the processes that share a load."""
