"""Accuracy regained after pruning without training: layers fitted by least squares to what the original gave.

Begin with `compress.prune.repair_channels`. Imports what is under `compress.prune`.
"""
