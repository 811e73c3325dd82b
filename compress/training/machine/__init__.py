"""What a training runs on: devices, processes that share a batch, compilation, memory, and where the time goes."""
