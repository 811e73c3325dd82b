"""`serve up`: Triton and the gateway together, checked before the start, followed while they run, stopped in order."""
