"""What a load test tells: JSON, terminal, a page with plots, reports laid over each other."""
