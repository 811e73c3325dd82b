"""The toolkit's own model file: a graph of plain data, with the `torch.nn` layers that it may name."""
