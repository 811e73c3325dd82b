"""Rollouts: what is asked, the evidence, what is decided from it, and where they are kept."""
