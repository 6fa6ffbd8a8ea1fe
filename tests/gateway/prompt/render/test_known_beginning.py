"""A conversation of which only the beginning is known."""

import json

import pytest

from gateway.prompt.pipeline import Pipeline
from gateway.prompt.prompt import CHAT

from ..reference import model_dir


def turn(beginning: list[dict], more: int) -> bytes:
    unknown = {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}
    rest = [{"role": "user", "content": f"word {i} " * 20} for i in range(more)]
    return json.dumps({"messages": [*beginning, unknown, *rest]}).encode()


def test_a_known_beginning_is_rendered_once_and_not_at_every_turn(monkeypatch):
    pipeline = Pipeline(model_dir("sim"), "m", 16)
    template, rendered = pipeline.renderers["default"].template, []
    render = template.render
    monkeypatch.setattr(template, "render", lambda *given: (rendered.append(1), render(*given))[1])
    one = [{"role": ("user", "assistant")[i % 2], "content": f"text {i} " * 20} for i in range(30)]
    other = [{"role": "user", "content": "another text " * 40}, *one[1:]]
    first: dict[str, list[int]] = {}
    for more in range(3):
        for name, beginning in (("one", one), ("other", other)):
            before = len(rendered)
            found = pipeline.prepare(CHAT, turn(beginning, more))
            assert found.mode == "partly" and found.hashes.known > 20
            assert (len(rendered) > before) == (more == 0)
            names = list(found.hashes[: found.hashes.known])
            assert first.setdefault(name, names) == names
    assert first["one"] != first["other"]


@pytest.mark.parametrize(
    "more", [{"tools": [{"type": "function", "function": {"name": "f"}}]}, {"chat_template_kwargs": {"a": 1}}]
)
def test_what_else_is_rendered_tells_beginnings_apart(more):
    beginning = [{"role": "user", "content": "text " * 40}, {"role": "assistant", "content": "b"}]
    body = json.loads(turn(beginning, 1))
    pipeline = Pipeline(model_dir("sim"), "m", 16)
    for given in (body, {**body, **more}):
        fresh = Pipeline(model_dir("sim"), "m", 16).prepare(CHAT, json.dumps(given).encode())
        assert list(pipeline.prepare(CHAT, json.dumps(given).encode()).hashes) == list(fresh.hashes)
