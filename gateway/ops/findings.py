"""The data types of `hitherto doctor`: a check, and a finding that a check reports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple


class Finding(NamedTuple):
    """One line of the doctor's report: what was found, and what to do about it (`remedy`)."""

    level: Literal["ok", "warn", "fail"]
    text: str
    remedy: str = ""
    subject: str = ""  # what the line is about; "": the name of the check, and the id of the fact that it looked at


ok, warn, fail = (partial(Finding, level) for level in ("ok", "warn", "fail"))


class Check(NamedTuple):
    """A check for something that can be wrong.

    `needs`: the type of the facts (data such as settings, an engine or a model's files) that the check looks at.
    `run`: returns or yields the findings about one fact of that type.
    `remedy`: what to do about findings that have no remedy of their own.
    """

    name: str
    needs: type
    run: Callable[[Any], Iterable[Finding] | AsyncIterator[Finding]]
    remedy: str = ""

    async def findings(self, fact: Any) -> AsyncIterator[Finding]:
        """Yield the findings about one fact of the type that the check needs, with their subjects and remedies."""
        found, subject = self.run(fact), f"{self.name} {getattr(fact, 'id', '')}".rstrip()
        async for one in found if isinstance(found, AsyncIterator) else _each(found):
            remedy = "" if one.level == "ok" else one.remedy or self.remedy
            yield one._replace(subject=one.subject or subject, remedy=remedy)


async def _each(findings: Iterable[Finding]) -> AsyncIterator[Finding]:
    for one in findings:
        yield one
