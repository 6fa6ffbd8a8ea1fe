"""The simulated engine: `SIMULATED` is its dialect.

Its HTTP API and its KV events imitate vLLM, so that every client of vLLM can be tested with it. Only the way it is
launched and its flags differ.
"""

import re
from collections.abc import Mapping

from replicas.answer import Answer
from replicas.engines.vllm import Vllm
from replicas.launch.command import LaunchProfile
from replicas.launch.exits import LogGrammar
from replicas.problems import EVENTS_BY_HAND, Remedies

SAME_VERSION = "run the simulated engine and the gateway in one version of Hitherto"


class Simulated(Vllm):
    """The dialect of the simulated engine, `python -m replicas.simulated`."""

    id = "sim"
    name = "the simulated engine"
    remedies = Remedies(*[SAME_VERSION] * len(Remedies._fields))._replace(
        models="it asks for no key of its own: something before it does; let the gateway reach it directly",
        figures="let the gateway reach its /metrics, or set block_size in the gateway's config",
        repeats="its cache is too small for the prompt: start it with a larger --num-blocks",
        events="start the simulated engine without --no-events",
        unlisted=f"give their address as {EVENTS_BY_HAND}, or start the simulated engine without --no-events",
        ranks="it has one rank: what stands before several has to list the events of each in /kv_event_sources",
        nodes="give the URL of each engine",
        replay="give replay=tcp://HOST:PORT (its --replay-port) where events= is given in the URL",
        cached_tokens="start the simulated engine without --no-cached-tokens",
        transfer="start the simulated engine with --kv-connector",
    )
    log = LogGrammar(stamp=re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?=(DEBUG|INFO|WARNING|ERROR|CRITICAL) )"))

    def speaks(self, answers: Mapping[str, Answer]) -> bool:
        version = answers["/version"].json().get("version")
        return isinstance(version, str) and version.endswith("+simulated")

    def launch_profile(self) -> type[LaunchProfile]:
        from replicas.engines.simulated.profile import SimProfile

        return SimProfile


SIMULATED = Simulated()
