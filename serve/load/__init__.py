"""A load tester for Open Inference Protocol servers: this gateway, or a Triton directly."""
