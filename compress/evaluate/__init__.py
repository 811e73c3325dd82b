"""What a model is judged by: outputs and their kinds, metrics, scores, intervals, and whether a budget is kept.

Imports runtime, data and what lies under them; no stage.
"""
