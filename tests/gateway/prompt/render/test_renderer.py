"""Where a plan is not for a conversation, Jinja renders it, and the prompt is as exact."""

import json

from gateway.prompt.pipeline import Pipeline
from replicas.simulated.model import sim_model_dir

CHAT = "/v1/chat/completions"
# What it takes of a text, after it has printed it, is there only in texts with the mark.
TEMPLATE = (
    "{% for m in messages %}<\uff5cUser\uff5c>{{ m.role }}\n{{ m.content }}\n"
    "{% if m.role == 'assistant' and '</think>' in m.content %}"
    "<\uff5cUser\uff5c>note\n{{ m.content.split('</think>')[1] }}\n{% endif %}{% endfor %}"
)


def test_a_text_without_what_a_plan_takes_of_it_is_rendered_by_jinja(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    pipeline = Pipeline(sim_model_dir(), "m", 16, chat_template=template)

    def prepared(said: str):
        messages = [("user", "hi"), ("assistant", said), ("user", "more " * 40)]
        body = {"model": "m", "messages": [{"role": role, "content": text} for role, text in messages]}
        return pipeline.prepare(CHAT, json.dumps(body).encode())

    for number in range(8):
        assert prepared(f"why</think>answer {number}").mode == "exact"
    assert pipeline.renderers["default"].by_plan
    plain = prepared("a plain answer")
    assert (plain.mode, plain.note) == ("exact", "") and len(plain.hashes) > 0
