"""`python -m serve`, and what the command `serve` runs."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; an interruption while it is being imported is none to speak of."""
    try:
        from serve.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":  # a process that it spawns reads this file, too
    main()
