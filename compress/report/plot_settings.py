"""What a plot looks like is the toolkit's own say.

matplotlib reads a file `matplotlibrc` of the current folder, else of the user, as it is imported: it may have texts
set by a TeX that is then started, or images too large for the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl

__all__ = ["own_settings"]


@contextmanager
def own_settings(style: dict[Any, Any] | None = None) -> Iterator[None]:
    """Draw by matplotlib's defaults and this style, whatever was set before; what was set is put back.

    Artists keep some settings as they are made, others count as they are drawn: both belong inside.

    Args:
        style: rcParams by name.
    """
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(style or {})
        yield
