"""Pruning to a share of the latency: what layers take on this machine, and how many channels each group loses by it.

Begin with `by_latency`; `layers`, `graphs` and `tables` measure, `allocate` chooses.
"""
