"""From an artifact or a model file to Triton models: their configurations, files and steps."""
