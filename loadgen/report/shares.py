"""Round shares so that only 0 and 1 themselves become 0 and 1: one miss in 100,000 requests is not 100 %."""

from __future__ import annotations

_DIGITS = 4  # of a share in a report
_MOST = 12  # digits at most; differences beyond them are rounding errors of floats


def share(part: float | None, whole: float | None) -> float | None:
    """Return `part / whole` with 4 digits, or as many as it takes to differ from 0 and 1.

    Returns None if `whole` is 0 or None.
    """
    if not whole:
        return None
    exact = part / whole
    rounded = round(exact, _DIGITS)
    if rounded in (0.0, 1.0):
        rounded = next((more for digits in range(_DIGITS, _MOST) if (more := round(exact, digits)) != rounded), rounded)
    return rounded


def percent(value: float, digits: int = 1) -> str:
    """Return a share as a percentage: `0.998` -> "99.8 %".

    `digits`: decimals. More of them are written if a share other than 0 or 1 would otherwise read as 0 % or 100 %.
    """
    exact = 100 * value
    number = f"{exact:.{digits}f}"
    if float(number) in (0.0, 100.0) and exact != float(number):
        longer = (f"{exact:.{more}f}" for more in range(digits + 1, _MOST - 1))
        number = next((more for more in longer if float(more) != float(number)), number)
    return f"{number} %"
