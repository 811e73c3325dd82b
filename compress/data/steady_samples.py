"""Samples that models are judged on have to be the same for each of them, and for whoever runs it again."""

from __future__ import annotations

from compress.data.dataset import Dataset
from compress.errors import DatasetError

__all__ = ["refuse_unsteady"]

LOOKED_AT = 8


def refuse_unsteady(option: str, data: Dataset) -> None:
    """Refuse a torch Dataset whose samples are made otherwise each time, by a few that are made twice.

    What it draws from the global generators is seeded by the sample's number; generators of its own are not known.

    Args:
        option: that named the data.
        data: to judge on.

    Raises:
        DatasetError: they differ.
    """
    if data.fetcher is None:
        return
    unlike = data.fetcher.unsteady(data.places(LOOKED_AT))
    if unlike:
        raise DatasetError(
            f"can't judge on {data.source}",
            why=f"sample {unlike[0]} of {option} is another one each time that it is read: no two models would be "
            "judged on the same",
            mend="take random transforms out of it, or seed its own generator by the sample's number",
        )
