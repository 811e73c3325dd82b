"""`python -m compress.cli.elastic OPTIONS -- finetune …`: torchrun, where a Job would start it again and again.

torchrun starts a command with a wrong option as often as one whose machine has died, and ends with exit code 1 either
way. Here options are read before anything is started, and what every process would end with ends as it does without
torchrun, with exit code 2, by which a Job gives up.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import CycloptsError

from compress.cli.commands import app
from compress.errors import ToolkitError
from compress.jobs.running import spread
from compress.options.ranges import check_ranges

__all__ = ["main"]

MISTAKE = ToolkitError.exit_code


def main(arguments: Sequence[str] | None = None) -> None:
    """Launch; ends with exit code 2 where the same command would fail again."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--") if "--" in words else len(words)
    command = words[at + 1 :]
    _look_at(command)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args([*words[:at], "-m", "compress", *command]))  # type: ignore[no-untyped-call]
    except ChildFailedError as err:
        _, first = err.get_first_failure()
        print(f"error: a process ended with exit code {first.exitcode}", file=sys.stderr)
        sys.exit(MISTAKE if first.exitcode == MISTAKE else 1)


def _look_at(command: Sequence[str]) -> None:
    try:
        _, bound, _ = app.parse_args(spread(command), exit_on_error=False)
        if "options" in bound.arguments:
            check_ranges(bound.arguments["options"])
    except CycloptsError:  # which was printed
        sys.exit(MISTAKE)
    except ToolkitError as err:
        print(f"error: {err}", file=sys.stderr)
        sys.exit(err.exit_code)


if __name__ == "__main__":
    main()
