"""The cells of `bench.field`: what is asked, of which fleet, how fast."""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass, replace

from bench.conversations import DATA, TAU
from loadgen.plan.fleet_size import by_tokens
from loadgen.simulate import Outage, Setting, simulate
from loadgen.simulate.prompts import Prompts, Said
from loadgen.workload import generators, limits, traces
from loadgen.workload.arrivals import conversation_starts
from loadgen.workload.conversations import Conversation, Turn, Workload, span
from loadgen.workload.datasets import DATASETS
from loadgen.workload.generators import say
from loadgen.workload.limits import set_limits
from loadgen.workload.synthetic import VOCABULARY
from replicas.simulated.profile import Profile, load_profile

MOONCAKE, AZURE = "mooncake_conversation_blk512.jsonl.gz", "azure2023_conv.csv.gz"
_FILES = {"mooncake": MOONCAKE, "tau": TAU, "azure": AZURE}
_SHAPES = {
    "mooncake": {"trace_jitter": 3.0},
    "tau": {"think_time": 0.5},
    "agents": {"think_time": 0.3},
    "coders": {
        "best_of": 1,
        "num_prefixes": 3,
        "prefix_len": 6000,
        "suffix_len": 600,
        "output_len": 120,
        "think_time": 1.0,
    },
    "rollouts": {"think_time": 1.0},
}
_DATASETS = {"tau": "conversations", "coders": "rollouts"}
_TRACES = ("mooncake", "azure")  # have times of their own
_ENGINE = by_tokens(load_profile("gpu-8b"))  # as fast whatever its cache is, which the cells' differ in
_AZURE_PART = 500.0  # seconds, with 2,000 requests and more in each
_OPEN = 32  # conversations a replica at saturation
_HOT = 1 << 40  # names of a hot prefix: above those of a generator
_TRAJECTORIES, _TURNS = 2, 40  # of each user; turns are from half to one and a half times as many
SLOS = {load: {"ttft": 100.0, "tpot": 30.0} for load in ("tau", "agents", "rag", "azure", "coders", "rollouts")}
SLOS["mooncake"] = {"ttft": 1000.0, "tpot": 50.0}


@dataclass(frozen=True)
class Cell:
    load: str
    requests: int
    at: float = 0.7  # of saturation
    cache: float = 1.0  # x the working set; 0: the profile's own, where nothing is shared
    replicas: int = 8
    gateways: int = 1
    own_ledgers: bool = False
    speeds: tuple[float, ...] = (1.0,)
    special: str = ""  # "hot": a prefix that appears at once; "lost": a replica, and back
    # A closed loop: so many users a replica, each with one conversation at a time, who ask again when they are answered
    # and a tool has run. `at` and `cache` mean nothing then: caches are the profile's own.
    users: int = 0
    blocks: int = 0  # of a replica's cache, where a closed loop has another

    @property
    def basis(self) -> tuple:
        """What its saturation depends on."""
        return self.load, self.requests, self.cache, self.replicas, self.speeds, self.special == "hot"

    @property
    def fleet(self) -> str:
        return " ".join(map(str, self.basis))

    @property
    def name(self) -> str:
        parts = [f"{self.load} {self.users} users a replica" if self.users else f"{self.load} {self.at:.0%}"]
        parts += [f"cache {self.cache:g}"] * (self.cache not in (0, 1.0)) + [f"{self.replicas} replicas"] * (
            self.replicas != 8
        )
        parts += [f"{self.gateways} gateways{', own ledgers' * self.own_ledgers}"] * (self.gateways > 1)
        parts += ["two speeds"] * (len(self.speeds) > 1)
        parts += {"hot": ["hot prefix"], "lost": ["replica lost"], "thrash": ["thrash"]}.get(self.special, [])
        return ", ".join(parts)

    def about(self, blocks: int) -> str:
        slo = SLOS[self.load]
        limits = f"TTFT <= {slo['ttft']:g} ms, TPOT <= {slo['tpot']:g} ms"
        return f"{self.requests} requests, {self.profiles(blocks)[0].num_blocks} blocks a replica, {limits}"

    def profiles(self, blocks: int) -> list[Profile]:
        size = max(2048, int(self.cache * blocks / self.replicas)) if self.cache else self.blocks
        profile = replace(_ENGINE, num_blocks=size or _ENGINE.num_blocks)
        return [replace(profile, speedup=self.speeds[index % len(self.speeds)]) for index in range(self.replicas)]


def _cells() -> list[Cell]:
    agents, rag, tau = Cell("agents", 1600), Cell("rag", 1600), Cell("tau", 1600)
    mooncake, azure = Cell("mooncake", 900), Cell("azure", 2000, cache=0)
    found = [replace(cell, at=at) for cell in (agents, mooncake) for at in (0.1, 0.3, 0.5, 0.7, 0.9, 1.1)]
    found += [replace(cell, at=at) for cell in (rag, tau, azure) for at in (0.1, 0.3, 0.5, 0.7, 0.9)]
    found += [replace(rag, at=1.1)]
    found += [replace(cell, cache=cache) for cell in (agents, mooncake) for cache in (0.5, 2.0)]
    found += [replace(cell, cache=0.5) for cell in (rag, tau)]
    found += [
        replace(agents, replicas=64, requests=4000, cache=2.0),
        replace(mooncake, replicas=64, requests=1800),
    ]
    found += [replace(agents, gateways=4), replace(agents, gateways=4, own_ledgers=True), replace(mooncake, gateways=4)]
    found += [replace(cell, speeds=(1.0, 0.5)) for cell in (agents, mooncake)]
    found += [replace(rag, special="hot"), replace(rag, special="hot", at=0.9)]
    found += [replace(cell, special="lost") for cell in (agents, rag)]
    return found + _closed()


def _closed() -> list[Cell]:
    """Coding agents and the samples of reinforcement learning, until all trajectories are over."""
    coders, rollouts = (Cell(load, 0, 0.0, 0.0, users=4) for load in ("coders", "rollouts"))
    found = [
        replace(cell, users=users, replicas=replicas)
        for cell in (coders, rollouts)
        for users, replicas in ((2, 8), (4, 4), (8, 4), (2, 16))
    ]
    # Together the caches hold what all users have said; a replica that gets more users than its share does not.
    found += [replace(rollouts, users=12, replicas=4, special="thrash", blocks=8192)]
    return [replace(cell, requests=_TRAJECTORIES * _TURNS * cell.users * cell.replicas) for cell in found]


CELLS = _cells()
QUICK = (
    "agents 10%",
    "agents 30%",
    "agents 70%",
    "mooncake 30%",
    "rag 10%",
    "rag 70%",
    "tau 30%",
    "azure 30%",
    "coders 2 users a replica",
    "coders 4 users a replica, 4 replicas",
    "rollouts 4 users a replica, 4 replicas",
    "rollouts 12 users a replica, 4 replicas, thrash",
)


def files() -> str:
    """What to say when the data is not there; empty when it is."""
    gone = [name for name in _FILES.values() if not (DATA / name).exists()]
    return f"skipped: no {', '.join(gone)} in {DATA}; set HITHERTO_DATA to the folder that has them" if gone else ""


def _conversations(load: str, requests: int, rng: random.Random, **shape: object) -> Workload:
    where = {"dataset_path": DATA / _FILES[load]} if load in _FILES else {}
    return DATASETS[_DATASETS.get(load, load)](rng, requests, **where, **_SHAPES.get(load, {}), **shape)


def work(cell: Cell, rate: float, seed: int) -> Workload:
    """The cell's load at `rate` requests a second; a trace keeps its own times, faster or slower."""
    load = _work(cell, rate, seed)
    set_limits(load.conversations, "mixed", seed)
    return load


def _work(cell: Cell, rate: float, seed: int) -> Workload:
    rng = random.Random(seed)
    if cell.load in _TRACES:
        # Mooncake's times are coarse, so seeds jitter them; Azure's are not, and another seed is another part of it.
        part = {"trace_start": _AZURE_PART * (seed - 1)} if cell.load == "azure" else {}
        load = _conversations(cell.load, cell.requests, rng, **part)
        pace = (len(load.starts) - 1) / load.starts[-1] / rate
        load.starts = [start * pace for start in load.starts]
        return load
    hot = cell.requests // 4 if cell.special == "hot" else 0
    load = _conversations(cell.load, cell.requests - hot, rng)
    if cell.users:
        load.starts = [0.0] * len(load.conversations)
        return load
    if hot:
        load.conversations = _with_hot(load.conversations, hot, rng)
    load.starts = conversation_starts([conversation.requests for conversation in load.conversations], rate, rng)
    return load


def _with_hot(conversations: list[Conversation], hot: int, rng: random.Random) -> list[Conversation]:
    """From the middle on every other request is about one long document which nobody has asked about before."""
    half = len(conversations) - hot
    asked = [
        Conversation(
            f"hot-{number}", [Turn([say("system", span(_HOT, 8000)), say("user", span(_HOT + 1 + number, 50))], 150)]
        )
        for number in range(hot)
    ]
    later = conversations[half:] + asked
    rng.shuffle(later)
    return conversations[:half] + later


def setting(cell: Cell, policy: str, blocks: int, rate: float, seed: int) -> Setting:
    outages = []
    if cell.special == "lost":
        lasts = cell.requests / rate
        outages = [Outage(0, 0.4 * lasts, 0.6 * lasts)]
    return Setting(
        policy,
        cell.profiles(blocks),
        seed,
        cell.gateways,
        not cell.own_ledgers,
        outages=outages,
        engine_replies=True,
        users=cell.users * cell.replicas or None,
    )


def saturated(cell: Cell, blocks: int, seed: int) -> float:
    """Requests a second that 8 such replicas get through by `round_robin`."""
    blocks = blocks * 8 // cell.replicas
    cell = replace(cell, replicas=8, gateways=1, special="hot" * (cell.special == "hot"))
    users, rng = _OPEN * cell.replicas, random.Random(seed)
    load = work(cell, 1.0, seed)
    asked, times = load.conversations, 0
    if cell.load not in _TRACES:
        conversations: list[Conversation] = []
        while len(conversations) < 2.5 * users:
            conversations += _marked(work(cell, 1.0, seed + times).conversations, times)
            times += 1
        asked = rng.sample(conversations, len(conversations))
    for conversation in asked:
        for turn in conversation.turns:
            turn.think = 0.0
    done = simulate(
        Workload(asked, [0.0] * len(asked)), replace(setting(cell, "round_robin", blocks, 1.0, seed), users=users)
    ).done
    begun: dict[str, float] = {}
    for record in done:
        root = record.conversation.split(".")[0]
        begun[root] = min(begun.get(root, record.sent), record.sent)
    ends = sorted(record.last for record in done)
    first, last = ends[len(ends) // 4], max(begun.values())
    return sum(first < end <= last for end in ends) / (last - first)


def _marked(conversations: list[Conversation], times: int) -> list[Conversation]:
    """The same with other names, so that a second pass over a file does not find the first one's blocks."""
    for conversation in conversations:
        conversation.id = f"{times}-{conversation.id}"
        head, *rest = conversation.turns[0].messages
        said = head["content"]
        other = f"{times} {said}" if isinstance(said, str) else (span(2 * _HOT + times, 1), *said)
        conversation.turns[0].messages = [{**head, "content": other}, *rest]
    return conversations


def made_of() -> str:
    """What a load and its fleet are made of, for the hash of a run."""
    return repr(_SHAPES) + "".join(
        map(inspect.getsource, (generators, traces, limits, _work, _conversations, _with_hot, setting, Cell.profiles))
    )


def working_set(load: Workload) -> int:
    """How many different blocks the prompts of a load have."""
    prompts, blocks = Prompts(16, 0, VOCABULARY, engine_replies=True), set()

    def follow(conversation: Conversation, said: Said) -> None:
        for number, turn in enumerate(conversation.turns):
            said, request = prompts.ask(said, turn, conversation.extra)
            blocks.update(request.hashes)
            if turn.forks or number + 1 < len(conversation.turns):
                said = prompts.answer(said, turn)
            for fork in turn.forks:
                follow(fork, said)

    for conversation in load.conversations:
        follow(conversation, Said())
    return len(blocks)
