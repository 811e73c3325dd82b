"""Images built, and what `serve deploy render` writes for Podman run, on one machine: `python -m deploy.containers`."""
