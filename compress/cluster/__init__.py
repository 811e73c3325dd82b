"""A Ray cluster that candidates are made on: reached, looked at before any work, and given tasks.

Begin with `connect.py`. Scheduling, queues and what goes over the network are Ray's; files go through a folder that
every node has (`shared.py`).
"""
