"""What Triton would refuse or do badly in a model repository, found before it starts."""
