"""`sticky_least_loaded`: a new session goes to the replica with the fewest active sessions, and stays there.

Formula: argmin of active sessions, ties by the highest hash(replica, session) (rendezvous hashing); every later request
of the session goes to the same replica, whatever the load. A session is active until its client says that it is over
(`POST /finish_session`), or until nobody has asked for 600 s. A replica that is lost loses its sessions, which are
placed as new ones. No session: the fewest requests. Source: vllm-project/router pull request 235 and NovaSky-AI/SkyRL
pull request 1791; the default of prime-rl since its pull request 3563.

Approximated: the seconds until a session that nobody ends is forgotten are not stated there; every client here ends its
sessions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from policies import Candidate, Choice, Demand

_FORGOTTEN = 600.0


class _Session(NamedTuple):
    replica: str
    asked: float  # when it last was


class StickyLeastLoaded:
    name = "sticky_least_loaded"
    source = "vllm-project/router pull request 235; NovaSky-AI/SkyRL pull request 1791; prime-rl pull request 3563"

    def __init__(self, seed: int = 0) -> None:
        self._sessions: dict[str, _Session] = {}  # least recently asked first

    def choose(self, asked: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        self._forget(asked.now)
        if asked.session is None:
            loads = [candidate.load.requests for candidate in candidates]
            return Choice(loads.index(min(loads)), "no session, fewest requests")
        replicas = [candidate.replica for candidate in candidates]
        session = self._sessions.get(asked.session)
        if session is not None and session.replica in replicas:
            return Choice(replicas.index(session.replica), "home of the session")
        active = Counter(one.replica for one in self._sessions.values())
        key = xxh3_64_intdigest(asked.session.encode())
        costs = [(active[replica], -xxh3_64_intdigest(replica.encode(), seed=key)) for replica in replicas]
        index = costs.index(min(costs))
        return Choice(index, f"new session, {active[replicas[index]]} active ones there")

    def placed(self, asked: Demand, candidates: Sequence[Candidate], choice: Choice) -> None:
        if asked.session is not None:
            self._sessions.pop(asked.session, None)
            self._sessions[asked.session] = _Session(candidates[choice.index].replica, asked.now)

    def session_finished(self, session: str) -> None:
        """Its client says that it is over."""
        self._sessions.pop(session, None)

    def gone(self, replica: str) -> None:
        self._sessions = {name: one for name, one in self._sessions.items() if one.replica != replica}

    def _forget(self, now: float) -> None:
        while self._sessions:
            oldest = next(iter(self._sessions))
            if now - self._sessions[oldest].asked < _FORGOTTEN:
                return
            del self._sessions[oldest]
