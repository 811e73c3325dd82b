"""What a run tells: terminal tables, JSON, self-contained pages with plots, the script that repeats it.

Imports evaluate, prune (its sensitivity) and what lies under them; no job.
"""

import logging

# It makes a folder of its own where the user's cache can't be written, and says so: no word of a run's.
logging.getLogger("matplotlib").addFilter(
    lambda record: all(
        words not in str(record.msg)
        for words in ("mkdir -p failed", "is not a writable directory", "created a temporary cache directory")
    )
)
