"""A search over the settings of a training: what is tried (`space`), what a trial leaves (`kept`), `search` itself.

It trains by `compress.training.finetune`; all that the loop knows of it is whom to tell the score of an epoch.
"""
