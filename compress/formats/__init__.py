"""Model files and arrays of anybody's: told apart, read without running their code, and written.

Begin with `checkpoint`. Imports vetting, storage, model and console.
"""
