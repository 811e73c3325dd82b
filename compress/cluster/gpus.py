"""Which GPUs of its node a task sees: those that Ray gave it, and none where it asked for none."""

from __future__ import annotations

import os

from compress.errors import ServerError

__all__ = ["VISIBLE", "see_gpus"]

VISIBLE = "CUDA_VISIBLE_DEVICES"


def see_gpus(count: int) -> None:
    """On a node, before CUDA begins in this process. Ray itself leaves all to a task that asked for none.

    Args:
        count: that the task asked for.

    Raises:
        ServerError: Ray gave it another number.
    """
    if not count:
        os.environ[VISIBLE] = ""
        return
    import ray

    given = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    if len(given) != count:
        raise ServerError(
            "a task can't have the GPUs that it asked for",
            why=f"it asked for {count}, and Ray gave it {len(given)} ({', '.join(given)})",
            mend="start Ray anew on that node, with --num-gpus as many as torch sees there",
        )
    os.environ[VISIBLE] = ",".join(given)
