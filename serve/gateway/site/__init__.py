"""The pages: / with what is served, /docs, and OpenAPI of the models that are loaded."""
