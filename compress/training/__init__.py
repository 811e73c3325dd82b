"""The training loop: one for recovery, fake quantization and training from scratch, on a CPU, a GPU or many."""
