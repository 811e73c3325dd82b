"""The commands' work from start to end: from options to stages, their run, the proof, the report, the output in its
place.

Begin with `export`. Imports every room below.
"""
