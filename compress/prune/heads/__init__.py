"""Heads of attention: which channels are a head's, and a graph that runs with fewer of them.

Begin with `opened` in open_heads.py.
"""
