"""An ONNX graph as a torch.fx graph of layers: begin at `graph`; a value on the way is of `values`."""
