"""Files of `torch.save`: their pickle runs on a machine of our own, which imports and calls nothing."""
