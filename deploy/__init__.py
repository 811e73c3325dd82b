"""Files for containers and clusters, and `deploy.containers`, which runs them on one machine."""
