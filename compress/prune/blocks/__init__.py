"""Residual blocks that go whole: found in the graph, taken out, proven, and chosen by calibration data.

Begin with `compress.prune.drop_blocks`. Imports what is under `compress.prune`.
"""
