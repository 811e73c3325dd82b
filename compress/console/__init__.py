"""What a user reads on the way: wording, durations and sizes, libraries kept quiet, Ctrl-C.

Imports `compress.errors` alone.
"""
