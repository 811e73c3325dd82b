"""What Triton runs of hooks: copied into repositories, so it imports numpy and the standard library alone."""
