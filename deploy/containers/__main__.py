"""`python -m deploy.containers build | up REPOSITORY | roll REPOSITORY | keys | down | check`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run a command; an interruption while it is being imported is none to speak of."""
    try:
        from deploy.containers.commands import run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
