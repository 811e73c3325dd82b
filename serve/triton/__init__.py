"""A real tritonserver, found, checked and run as a process of this machine."""
