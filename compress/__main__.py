"""`python -m compress`, where another `compress` comes first on PATH."""

from __future__ import annotations

import gc
import os
import signal
import sys


def main() -> None:
    """Run the command line; an interruption while it is being imported is none to speak of."""
    os.environ["PYTHONSAFEPATH"] = "1"  # no process that starts here takes modules out of the current folder
    try:
        from compress.host.cores import bound_pools

        bound_pools(os.environ)
        from compress.cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    try:
        run()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN if sys.exc_info()[0] is None else signal.SIG_DFL)
        gc.freeze()  # or the end of the process looks through all of torch's modules, several times


if __name__ == "__main__":
    main()
