"""Calibration, evaluation and training data: checked against a model's inputs, sharded, compared, and what sizes it
has.

Imports formats, storage, options and model.
"""
