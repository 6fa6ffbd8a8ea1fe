"""For the chat templates of some ninety models the gateway makes the token ids that vLLM's own renderer makes, or it
declines and says why.

Neither an engine nor weights are needed: `rendering.py` builds vLLM's serving classes on model folders without either.
The gateway compiles each shape when it comes for the first time, and compiled prompts are not checked against Jinja
here: vLLM's ids are what they are compared with.
"""

import json
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.prompt import CHAT, MESSAGES, RESPONSES
from gateway.prompt.render import renderer
from loadgen.demo.tiny_model import tiny_model
from replicas.engines.vllm.versions import version_quirks

from ..gateway.prompt.reference import model_dir
from .bodies import CORPUS, PLAIN, WEATHER, Body, call, chat, message, result, said, system, text, user
from .chat_templates import PACKAGES, chat_templates, model_folder
from .engines import release, rendered, version
from .odd_bodies import STEERED

pytestmark = [pytest.mark.exact, pytest.mark.timeout(900)]

SUMMARY = Path(__file__).with_name("templates.json")
LLAMA_CPP, XINFERENCE = PACKAGES
# Of the second package: what the first has not, by what is particular to it.
FROM_XINFERENCE = (
    "Baichuan-M2", "Ernie4.5", "MiniMax-M2.7", "Qwen3-VL-Instruct", "deepseek-v2.5", "deepseek-v3", "gemma-3-it", "glm-4.5", "glm-4.5v",
    "glm-5.3", "glm4-0414", "internlm3-instruct", "llama-2-chat", "llama-3-instruct", "mistral-instruct-v0.3", "phi-3-mini-4k-instruct",
    "qwen2.5-vl-instruct", "qwen3.6", "qwen3.8", "seed-oss", "Yi-chat",
)  # fmt: skip
# Models with one template for requests with tools and another for those without; Hermes' other one is ChatML.
PAIRS = {
    "Hermes-3": ((XINFERENCE, "openhermes-2.5"), (LLAMA_CPP, "NousResearch-Hermes-3-Llama-3.1-8B-tool_use")),
    "Command-R7B": ((LLAMA_CPP, "Cohere2MoE"), (LLAMA_CPP, "CohereForAI-c4ai-command-r7b-12-2024-tool_use")),
    "Hermes-2-Pro": ((XINFERENCE, "openhermes-2.5"), (LLAMA_CPP, "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use")),
}
LLAMA_3 = "Llama-3"  # as it was first published; the packages have others that print the special token themselves
GIVEN = (LLAMA_3, "Mistral-Small-3.2-24B-Instruct-2506", "Qwen3.5-4B")  # once more, with --chat-template
# They take a system message anywhere, and fail in the sandbox that vLLM probes them in.
PROBED = (
    LLAMA_3, "Mistral-Small-3.2-24B-Instruct-2506", "LFM2.5-8B-A1B", "meetkai-functionary-medium-v3.1", "meetkai-functionary-medium-v3.2",
    "upstage-Solar-Open-100B", "poolside-Laguna-XS.2", "poolside-Laguna-XS-2.1", "poolside-Laguna-S-2.1",
)  # fmt: skip
# They ask of a message's content whether it `is iterable` or `is sequence`, or loop over its parts.
OF_PARTS = (
    "GLM-4.6", "GLM-4.7-Flash", "glm-4.5", "glm-4.5v", "Qwen3.5-4B", "qwen3.6", "MiniMax-M2", "MiniMax-M2.7", "MiniMax-M3",
    "ibm-granite-granite-4.0", "ibm-granite-granite-4.1", "gemma-3-it", "google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved",
    "StepFun3.5-Flash", "tencent-Hy3",
)  # fmt: skip

# Left out of the named bodies: what concerns texts, not templates, or what is done behind them.
_ELSEWHERE = (
    "odd text",
    "odd message",
    "truncated",
    "sampling",
    "a format",
    "unknown fields",
    "ids beside",
    "no ids",
    "echo",
)
_KEPT = ("odd text: special tokens", "odd text: blanks", "odd text: jinja", "odd message: markup")
_PARTS = [system([text("a"), text("b")]), user([text("one"), text(" two ")]), said([text("x")]), user([text("z")])]
_SAID_WITH_TOOLS = [user("Open an account, please."), said("Gladly."), user("Now.")]
BODIES: dict[str, tuple[str, Body]] = {
    **{name: case for name, case in CORPUS.items() if case[0] in (CHAT, MESSAGES) and (name in _KEPT or not name.startswith(_ELSEWHERE))},
    # tools, then none, and the other way round: the same texts
    "said with tools": chat(*_SAID_WITH_TOOLS, tools=[WEATHER]),
    "said without tools": chat(*_SAID_WITH_TOOLS),
    "said before without tools": chat(*PLAIN),
    "said then with tools": chat(*PLAIN, tools=[WEATHER]),
    "Messages said with tools": message(*_SAID_WITH_TOOLS, tools=[{"name": "open", "description": "d", "input_schema": {"type": "object"}}]),
    "Messages said without tools": message(*_SAID_WITH_TOOLS),
    # parts
    "parts without a system": chat(*_PARTS[1:]),
    "parts and texts": chat(_PARTS[0], user("one"), *_PARTS[2:]),
    "parts with tools": chat(*_PARTS, tools=[WEATHER]),
    "parts around a call": chat(
        user([text("?")]), said([text("I look.")], tool_calls=[call('{"city": "Paris"}')]), result([text("rain")]), user([text("so?")]), tools=[WEATHER]
    ),
    # system messages within
    "inline system": message(user("one"), system("now be kind"), user("two"), system="Be brief."),
    "inline system in blocks": message(user("one"), said("two"), system([text("now"), text("be kind")]), user("three")),
    "inline systems": message(system("first"), user("one"), system("second"), said("two"), system("third"), user("three")),
    "inline system at the end": message(user("one"), said("two"), user("three"), system("and be kind")),
    "inline system with tools": message(user("one"), said("two"), system("now be kind"), user("three"), tools=[{"name": "open", "input_schema": {}}]),
    "inline empty system": message(user("one"), said("two"), system(""), user("three"), system="S"),
}  # fmt: skip
INLINE = [name for name in BODIES if name.startswith(("inline", "a system among"))]
# Tool calls stay out: of those, many templates loop over the arguments, which is not compiled.
IN_PARTS = ("one part", "several parts", "part with a cache mark")
IN_PARTS += ("parts without a system", "parts and texts", "parts with tools")
STEERABLE = ("sim", "qwen3", "llama3_2")


@dataclass
class Case:
    """One model folder and what was made of the bodies, by name."""

    name: str
    folder: Path
    given: Path | None = None
    bodies: Mapping[str, tuple[str, Body]] = field(default_factory=lambda: BODIES)
    theirs: dict[str, dict] = field(default_factory=dict)
    equal: list[str] = field(default_factory=list)
    declined: dict[str, str] = field(default_factory=dict)
    different: dict[str, str] = field(default_factory=dict)
    compiled: list[str] = field(default_factory=list)  # bodies in parts that a plan was found for
    uncompiled: list[str] = field(default_factory=list)  # those that it was not found for
    why_not: str = ""  # compiling was given up


def cases(store: Path) -> list[Case]:
    sources = {LLAMA_CPP: chat_templates(LLAMA_CPP), XINFERENCE: chat_templates(XINFERENCE)}
    single = {**sources[LLAMA_CPP], **{name: sources[XINFERENCE][name] for name in FROM_XINFERENCE}}
    single[LLAMA_3] = json.loads((model_dir("llama3") / "tokenizer_config.json").read_text())["chat_template"]
    made = [Case(name, model_folder(store / name, {"default": source})) for name, source in single.items()]
    for name, (default, tool_use) in PAIRS.items():
        both = {"default": sources[default[0]][default[1]], "tool_use": sources[tool_use[0]][tool_use[1]]}
        made.append(Case(name, model_folder(store / name, both)))
    for name in GIVEN:
        given = store / f"{name}.jinja"
        given.write_text(single[name])
        folder = model_folder(store / f"{name}-given", {"default": "{{ messages[0].content }}"})
        made.append(Case(f"{name}, given", folder, given))
    return made


def gateway_says(case: Case) -> dict[str, list]:
    """For each body the prompts, or the refusals, of its rounds."""
    pipeline = Pipeline(case.folder, "tiny", 16, chat_template=case.given, max_model_len=131_072)
    pipeline.follow(version_quirks(release()))
    made: dict[str, list] = {name: [] for name in case.bodies}
    for turn in range(3):  # by Jinja and learned, by plan, by what is known of prefixes
        for name in list(made)[:: -1 if turn == 1 else 1]:
            path, body = case.bodies[name]
            before = sum(one.by_plan for one in pipeline.renderers.values())
            try:
                made[name].append(prompt := pipeline.prepare(path, json.dumps(body).encode()))
            except ApiError as error:
                made[name].append(error)
                continue
            if turn == 2 and prompt.mode == "exact" and name in IN_PARTS:
                by_plan = sum(one.by_plan for one in pipeline.renderers.values()) > before
                (case.compiled if by_plan else case.uncompiled).append(name)
    case.why_not = "; ".join(one.compiled.why_not for one in pipeline.renderers.values() if one.compiled.why_not)
    return made


def judge(case: Case, name: str, rounds: list) -> None:
    theirs = case.theirs[name]
    if "refused" in theirs:
        return
    for turn, ours in enumerate(rounds):
        if isinstance(ours, ApiError):
            case.different[name] = f"refused: {ours}"
        elif ours.mode != "exact":
            case.declined[name] = ours.note
        elif memoryview(ours.token_ids).cast("I").tolist() != theirs["ids"]:
            case.different[name] = f"other ids in round {turn}"
        else:
            continue
        return
    case.equal.append(name)


def compare(store: Path, made: list[Case]) -> dict[str, Case]:
    """Have vLLM and the gateway make prompts, at the same time, and compare them."""
    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(renderer, "_PATIENCE", 1)
        patch.setattr(renderer, "_FIRST_CHECKED", 0)
        patch.setattr(renderer, "_CHECK_MASK", 2**40 - 1)
        answers = pool.submit(rendered, store, [(case.folder, case.given, case.bodies.values()) for case in made])
        ours = [gateway_says(case) for case in made]
    for case, said_by_us, theirs in zip(made, ours, answers.result(), strict=True):
        case.theirs = dict(zip(case.bodies, theirs, strict=True))
        for name, rounds in said_by_us.items():
            judge(case, name, rounds)
    return {case.name: case for case in made}


@pytest.fixture(scope="module")
def compared(vllm, tmp_path_factory) -> dict[str, Case]:
    store = tmp_path_factory.mktemp("templates")
    return compare(store, cases(store))


@pytest.fixture(scope="module")
def steered(vllm, tmp_path_factory) -> dict[str, Case]:
    store = tmp_path_factory.mktemp("steered")
    bodies = {name: case for name, case in STEERED.items() if case[0] != RESPONSES or version() >= (0, 30)}
    made = [Case(name, tiny_model(store / name, model_dir(name)), None, bodies) for name in STEERABLE]
    return compare(store, made)


def summary(case: Case) -> dict[str, Any]:
    """How many of the bodies that vLLM takes are equal, and why the others are declined."""
    return {"equal": len(case.equal), "declined": dict(Counter(case.declined.values())), "wrong": len(case.different)}


def test_the_ids_are_vllms_or_the_gateway_declines(compared):
    assert not {case.name: case.different for case in compared.values() if case.different}
    taken = [name for case in compared.values() for name, one in case.theirs.items() if "ids" in one]
    equal = sum(len(case.equal) for case in compared.values())
    assert len(taken) > 80 * len(compared) and equal >= 0.9 * len(taken)


def test_the_page_of_exactness_says_what_was_found(compared):
    """`python -m tests.vllm.record_templates` writes it down."""
    told = json.loads(SUMMARY.read_text())["templates"]
    assert told.keys() == compared.keys()
    if version() == tuple(json.loads(SUMMARY.read_text())["vllm"]):
        assert {name: summary(case) for name, case in compared.items()} == told


def test_no_template_is_beyond_compiling(compared):
    assert not {case.name: case.why_not for case in compared.values() if case.why_not}


@pytest.mark.parametrize("name", PAIRS)
def test_two_templates_of_one_model(compared, name):
    """What was said with tools is asked again without them, and the other way round."""
    asked = ["said with tools", "said without tools", "said before without tools", "said then with tools"]
    assert {*asked, "Messages said with tools", "Messages said without tools"} <= set(compared[name].equal)
    assert len({tuple(compared[name].theirs[one]["ids"]) for one in asked}) == len(asked)


@pytest.mark.parametrize("name", [*PROBED, *(f"{name}, given" for name in GIVEN)])
def test_system_messages_within_a_conversation(compared, name):
    """Where vLLM moves them is found by a probe of the template, which fails for more of them than one would think."""
    case = compared[name]
    taken = [one for one in INLINE if "ids" in case.theirs[one]]
    assert len(taken) >= 4 and set(taken) <= set(case.equal)


@pytest.mark.parametrize("name", OF_PARTS)
def test_lists_of_parts_are_compiled(compared, name):
    case = compared[name]
    assert len(case.compiled) >= 4 and not case.uncompiled


@pytest.mark.parametrize("name", STEERABLE)
def test_fields_and_variables_by_which_a_client_steers_the_rendering(steered, name):
    """Of what vLLM takes the gateway makes the same ids, or it says that it does not know them."""
    case = steered[name]
    assert not case.different
    # whether a null reaches the template is not certain of every version, and the demo model's names the role
    assert all(body.startswith("developer") for body in case.declined), case.declined
    assert len(case.equal) >= 40
