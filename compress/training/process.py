"""One of several processes that train together: `python -m compress.training.process FOLDER`, launched."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from compress.errors import ToolkitError
from compress.storage.steady import refuse_changed
from compress.training.in_processes import read_job, write_error, write_result
from compress.training.machine.launch import end_with_parent
from compress.training.machine.setup import rank

EVERY = 0.1  # seconds between two words on how it goes


def main() -> None:
    end_with_parent()
    job = Path(sys.argv[1])
    first = rank() == 0
    told = 0.0

    def progress(done: int, total: int, note: str) -> None:
        nonlocal told
        now = time.monotonic()
        if first and (now - told > EVERY or done == total):
            told = now
            print(json.dumps({"done": done, "total": total, "note": note}), flush=True)

    try:
        with read_job(job) as (stage, model):
            given = stage.run(model, job.parent, progress)  # where one process keeps its state: it may go on from this
            refuse_changed()
    except ToolkitError as err:
        write_error(job, err)
        raise SystemExit(err.exit_code) from err
    if first:
        write_result(job, given)


if __name__ == "__main__":
    main()
