"""Models run and measured on this machine: backends, latency, memory, MACs, roofs.

Begin with `backends`. Imports formats, model, console.
"""
