"""What this process may have of its machine: cores, and the control groups that bound it."""
