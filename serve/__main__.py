"""`python -m serve`, and what the command `serve` runs."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line; an interruption while it is being imported is none to speak of."""
    # NumPy's OpenBLAS would start a thread for every core of the machine as it is imported, and nothing here needs one.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from compress.host.cores import bound_pools

        bound_pools(os.environ)
        from serve.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":  # a process that it spawns reads this file, too
    main()
