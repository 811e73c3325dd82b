"""FP16 and BF16: which nodes may become half precision, and what it rounds too much."""
