"""Why a question is not answered yet though much was seen of it: in words, for whoever waits."""

from __future__ import annotations

import math

__all__ = ["AGAINST", "ALONE", "beside", "near", "unanswered", "uncopied", "withheld"]

ALONE = "worse by the requests of one key alone; no key decides alone, so this waits for others that bear it out"
AGAINST = "fine by all requests together, but not where those of one key are left out; no key decides alone"
MANY = 500
FAR = 3.0  # times as many as were seen
MOST = 10_000_000


def beside(met: int, judged: int) -> str:
    """What to say of the candidate's answers whose time is not judged; "" where those are few.

    Args:
        met: of them, that met requests which asked the candidate by another name.
        judged: times that were judged.
    """
    if met <= judged:
        return ""
    return (
        f"{met} of its answers met requests that asked it by another name, and how long these took is not judged; "
        "let those wait, or give their key a list of models without it"
    )


def uncopied(dropped: int, judged: int, *, direct: bool, suspected: bool) -> str:
    """What to say where most copies are not made; "" where they are.

    Args:
        dropped: copies that were not made.
        judged: observations so far.
        direct: whether requests asked the candidate by another name meanwhile.
        suspected: whether most of them may end a process.
    """
    if dropped <= judged:
        return ""
    if suspected:
        why = "a model's process has ended, and they, or others of their keys, may have done it"
    elif direct:
        why = "it is kept busy by requests that ask it by another name"
    else:
        why = "it, or the gateway, has enough to do"
    return f"{dropped} requests were not copied to the candidate, since {why}"


def unanswered(going_on: int) -> str:
    """What to say where so many requests are with the candidate for long."""
    return f"the candidate has not answered {_requests(going_on)} yet, in whose place the baseline was asked"


def withheld(count: int) -> str:
    """What to say where so many requests were kept from the candidate."""
    told = "were kept from the candidate while it answered none or had no process, and may have failed with it"
    return f"{_requests(count)} {told}"


def _requests(count: int) -> str:
    return f"{count} request" if count == 1 else f"{count} requests"


def near(share: float, bound: float, count: int, missing: float) -> str:
    """What to say of a share too near its bound to be told from it soon; "" where it is not, or little was seen.

    Args:
        share: seen, 0 to 1.
        bound: allowed.
        count: of observations so far.
        missing: logarithm of the wealth that the gambler whom this share makes richer still lacks; he gains at most
            d² / 2v an observation, at a distance d from the bound and a variance v (Waudby-Smith and Ramdas,
            JRSS B 2024, section 4), which for values between 0 and 1 is at most share x (1 - share).
    """
    distance = share - bound
    more = 2 * share * (1 - share) * missing / distance**2 if distance else math.inf
    if count < MANY or more < FAR * count:
        return ""
    takes = f"some {int(float(f'{more:.0e}')):,}" if more < MOST else f"over {MOST:,}"
    return (
        f"{share:.2%} is too near the {100 * bound:.3g}% allowed to decide soon (that takes {takes} more copies); "
        "abort, and start again with --expect-change if it was trained anew, or with another --tolerance or --agree"
    )
