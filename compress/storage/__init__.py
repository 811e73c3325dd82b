"""Files written whole or not at all, keys of data and code, machines that have not enough.

Imports options (a user's code by name), console and errors.
"""
