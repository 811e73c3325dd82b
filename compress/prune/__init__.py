"""Structural pruning: which channels go together, how much each matters, how many go, and the proof.

Begin with `prune_channels`. Imports training (its losses), evaluate, runtime and what lies under them.
"""
