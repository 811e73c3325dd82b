"""TensorRT engines: options, building, the script that builds where TensorRT is, and what the engine is made of."""
