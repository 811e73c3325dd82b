"""The tokenizer that came with a model, opened the same way where it is evaluated and where it is packed."""
