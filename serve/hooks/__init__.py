"""A user's hook module: read, checked, run once on an example.

`packed` is copied as it is into repositories, and needs only numpy.
"""
