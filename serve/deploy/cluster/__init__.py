"""Kubernetes manifests: Triton behind a gateway, scaling, canaries, storage, GPUs."""
