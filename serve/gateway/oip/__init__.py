"""The Open Inference Protocol v2: messages, tensors, and the contract that a request is held against."""
