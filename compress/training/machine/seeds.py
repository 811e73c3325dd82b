"""The seed of what is random in a step."""

from __future__ import annotations

import torch

__all__ = ["seed_device"]


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the CPU's generator and that of the device which trains.

    torch.manual_seed sets those of all kinds of devices, and keeps the stack's trace for each kind that was not begun
    with: a millisecond of each step.

    Args:
        seed: from 0 to 2**64 - 1.
        device: of the training; of several GPUs the current one.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
