"""What a run tells: terminal tables, JSON, self-contained pages with plots, the script that repeats it.

Imports evaluate, prune (its sensitivity) and what lies under them; no job.
"""
