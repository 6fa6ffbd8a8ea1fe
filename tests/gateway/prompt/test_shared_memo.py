"""One memo serves all templates of a model and all versions of its engine: none of them gets what another one made."""

import json
import shutil

import pytest

from gateway.prompt.pipeline import Pipeline
from replicas.engines.vllm.versions import version_quirks

from .reference import ids_of, model_dir

CHAT = "/v1/chat/completions"
ROLES = "{% for m in messages %}<｜User｜>HEAD {{ m.role }}: {{ m.content }}{% endfor %}<｜Assistant｜>"
DEFAULT = ROLES.replace("HEAD", "talk,")
TOOL_USE = ROLES.replace("HEAD", "{{ tools | tojson }}")
TOOL = {
    "type": "function",
    "function": {"name": "open_account", "description": "Only for the other client.", "parameters": {}},
}


def two_templates(directory, default, tool_use):
    """A model with two templates, as Hermes-3 and Command R have them."""
    shutil.copytree(model_dir("sim"), directory)
    for file in directory.glob("*.jinja"):
        file.unlink()
    config = json.loads((directory / "tokenizer_config.json").read_text())
    named = {"default": default, "tool_use": tool_use}
    config["chat_template"] = [{"name": name, "template": source} for name, source in named.items()]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return two_templates(tmp_path_factory.mktemp("models") / "two", DEFAULT, TOOL_USE)


def talk(*texts):
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]


def ids(pipeline, messages, **more):
    prompt = pipeline.prepare(CHAT, json.dumps({"messages": messages, **more}).encode())
    assert prompt.mode == "exact", prompt.note
    return ids_of(prompt)


def expected(pipeline, messages, name, tools=None):
    """What a tokenizer makes of that template, without a memo."""
    text = pipeline.renderers[name].template.render(messages, tools, {"add_generation_prompt": True})
    return memoryview(pipeline.tokenizer.encode(text)).cast("I").tolist()


def compiled(pipeline, **more):
    """Ask until both templates are plans, which are checked no longer."""
    for turn in range(50):
        for texts in ([f"{turn} a {len(more)}"], [f"{turn} a {len(more)}", "b", "c"]):
            ids(pipeline, talk(*texts), **more)


def test_a_text_sent_with_tools_is_not_given_back_without_them(folder):
    pipeline = Pipeline(folder, "m", 16)
    compiled(pipeline)
    compiled(pipeline, tools=[TOOL])
    assert all(renderer.by_plan > 32 for renderer in pipeline.renderers.values())
    for turn in range(40):
        messages = talk(f"Open an account, please ({turn}).", "Gladly.", "Now.")
        first, second = ((None, "default"), ([TOOL], "tool_use"))[:: 1 if turn % 2 else -1]
        for tools, name in (first, second):
            more = {"tools": tools} if tools else {}
            assert ids(pipeline, messages, **more) == expected(pipeline, messages, name, tools), (turn, name)


def test_a_new_version_of_the_engine_meets_nothing_of_the_one_before(folder):
    """In a rolling upgrade templates are compiled again, in another order: what was a user's text stays one."""
    pipeline = Pipeline(folder, "m", 16)
    for version, order in (("0.31.0", 1), ("0.32.0", -1), ("0.28.0", 1), ("0.32.1", -1)):
        pipeline.follow(version_quirks(version))
        roles = ("user", "assistant")[::order]
        for turn in range(45):
            for role in roles:
                said = "the same words" if turn > 35 else f"{version} {turn} words"
                messages = [{"role": role, "content": said}]
                assert ids(pipeline, messages) == expected(pipeline, messages, "default"), (version, turn, role)
