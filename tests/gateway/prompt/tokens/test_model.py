"""Finding and reading a model directory, and what is said about its template."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gateway.prompt.pipeline import Pipeline
from gateway.prompt.report import template_report
from gateway.prompt.tokens.model import ModelError, find_model, load_model
from replicas.engines.vllm.versions import version_quirks

from ..reference import model_dir


def write(directory, **files):
    for name, content in files.items():
        path = directory / name.replace("__", "/").replace("_json", ".json").replace("_jinja", ".jinja")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def test_a_directory_is_taken_as_it_is(tmp_path):
    assert find_model(tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/dir", "./nothing", "a/b/c"])
def test_a_path_that_is_not_there(name):
    with pytest.raises(ModelError, match="no directory"):
        find_model(name)


def test_a_name_nobody_has(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="not in the Hugging Face cache and HF_HUB_OFFLINE is set: unset it"):
        find_model("some/model")
    with pytest.raises(ModelError, match="neither a directory nor a model name"):
        find_model("not a name!")


def said_of_a_hub(address, monkeypatch, tmp_path) -> str:
    """What is said when a model is not in the cache and has to come from there."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ModelError) as raised:
        find_model("some/model")
    return str(raised.value)


def test_a_hub_that_nobody_reaches_is_named_in_one_line(monkeypatch, tmp_path):
    assert said_of_a_hub("http://127.0.0.1:1", monkeypatch, tmp_path) == (
        "the tokenizer of some/model is not in the cache of Hugging Face, and its hub can't be reached: connect this "
        "machine to it, or set model to a directory with tokenizer.json"
    )


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (403, {}, "403 Forbidden"),
        (429, {}, "429 Too Many Requests"),
        (401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Restricted."}, "Cannot access gated repo"),
        (404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Not found."}, "Repository Not Found"),
    ],
)
def test_a_hub_that_refuses_says_why_in_one_line(status, headers, said, monkeypatch, tmp_path):
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            for name, value in {"X-Request-Id": "Root=1-abc;dead", "Content-Length": "0", **headers}.items():
                self.send_header(name, value)
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        why = said_of_a_hub(f"http://127.0.0.1:{hub.server_port}", monkeypatch, tmp_path)
        hub.shutdown()
    assert said in why and "\n" not in why and "Error: " not in why
    assert re.fullmatch(r"the tokenizer of some/model can't be fetched \([^:]*(4\d\d|C|R).*\): set HF_TOKEN if .*", why)


def test_a_snapshot_in_the_cache(monkeypatch, tmp_path):
    commit = "0123456789" * 4
    snapshot = tmp_path / "models--some--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_text("{}")
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_model("some/model") == snapshot


TWO = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
LEGACY, TOOL_USE = {"chat_template_json": {"chat_template": "c"}}, {"additional_chat_templates__tool_use_jinja": "t"}


@pytest.mark.parametrize(
    "in_config, files, templates",
    [
        (None, {}, {}),
        ("a", {}, {"default": "a"}),
        (TWO, {}, {"default": "a", "tool_use": "b"}),
        ("a", LEGACY, {"default": "a"}),
        (None, LEGACY, {}),
        ("a", {**LEGACY, "preprocessor_config_json": {}}, {"default": "c", "tool_use": "a"}),
        (None, {**LEGACY, "tokenizer_config_json": {"processor_class": "X"}}, {"default": "c"}),
        (None, {**LEGACY, "chat_template_jinja": "c", "config_json": {"vision_config": {}}}, {"default": "c"}),
        (TWO, {"chat_template_jinja": "j"}, {"default": "j"}),
        ("a", TOOL_USE, {"tool_use": "t"}),
        ("a", {"chat_template_jinja": "j", **TOOL_USE}, {"default": "j", "tool_use": "t"}),
    ],
)
def test_where_templates_are(tmp_path, in_config, files, templates):
    config = {} if in_config is None else {"tokenizer_config_json": {"chat_template": in_config}}
    assert load_model(write(tmp_path, tokenizer_json={}, **config, **files)).templates == templates


def test_a_given_template_replaces_all(tmp_path):
    write(tmp_path, tokenizer_json={}, tokenizer_config_json={"chat_template": TWO[1:]}, own_jinja="o")
    assert load_model(tmp_path, tmp_path / "own.jinja").templates == {"default": "o"}
    with pytest.raises(ModelError, match="can't read .*missing.jinja: No such file"):
        load_model(tmp_path, tmp_path / "missing.jinja")


def test_two_templates_of_which_nothing_says_which_counts(tmp_path):
    some = {**LEGACY, "chat_template_jinja": "b", "config_json": {"vision_config": {}}}
    files = load_model(write(tmp_path, tokenizer_json={}, **some))
    assert files.templates == {} and "processor" in files.no_template


def test_context_length(tmp_path):
    for config, tokens in (
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        ({"max_position_embeddings": 64}, 64),
    ):
        assert load_model(write(tmp_path, config_json=config)).max_model_len == tokens


def test_a_broken_file_says_which(tmp_path):
    with pytest.raises(ModelError, match=r"can't read .*tokenizer_config\.json"):
        load_model(write(tmp_path, tokenizer_config_json="{"))


def report(tmp_path, template):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(model_dir("sim") / name)
    (tmp_path / "chat_template.jinja").write_text(template)
    return template_report(Pipeline(tmp_path, "m", 16))


def test_report_on_a_template_that_extends(sim):
    said = template_report(sim[0])
    assert [turn.what for turn in said.turns] == ["plain", "with reasoning", "with tools"]
    assert all(turn.extends and turn.total > 5 for turn in said.turns)
    assert not (said.prints_date or said.refused or said.not_compiled) and said.cuts > 100


def test_report_on_what_ends_a_cache_early(tmp_path):
    last = "{% for m in messages %}<｜User｜>{% if loop.last %}SYSTEM {% endif %}{{ m.content }}{% endfor %}{{ strftime_now('') }}"
    said = report(tmp_path, last)
    assert said.prints_date and not said.turns[0].extends and 0 < said.turns[0].kept < said.turns[0].total


def test_report_on_a_template_that_drops_reasoning(load_model):
    turns = {turn.what: turn for turn in template_report(load_model("qwen3")[0]).turns}
    assert turns["plain"].extends and turns["with tools"].extends and not turns["with reasoning"].extends


@pytest.mark.parametrize(
    "template, refused", [("{{ raise_exception('not today') }}", "not today"), ("{% if %}", "not valid Jinja")]
)
def test_report_on_a_template_that_fails(tmp_path, template, refused):
    said = report(tmp_path, template)
    assert refused in said.refused and not said.turns


@pytest.mark.parametrize(
    "files, chat, text",
    [
        ({}, "exact", "exact"),
        ({"config_json": {"architectures": ["LlamaForCausalLM"]}}, "exact", "exact"),
        ({"config_json": {"architectures": ["DeepseekV32ForCausalLM"]}}, "exact", "exact"),
        ({"config_json": {"architectures": ["InklingForCausalLM"]}}, "text", "exact"),
        ({"consolidated.safetensors": "", "tekken.json": ""}, "text", "text"),
        ({"consolidated.safetensors": "", "tokenizer.model.v3": ""}, "text", "text"),
        ({"tekken.json": ""}, "exact", "exact"),
        ({"params.json": "", "model.safetensors": ""}, "exact", "exact"),
        ({"params.json": ""}, "text", "text"),
    ],
)
def test_models_that_the_engine_reads_in_its_own_way(tmp_path, files, chat, text):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).symlink_to(model_dir("sim") / name)
    pipeline = Pipeline(write(tmp_path, **files), "m", 16)
    talk = pipeline.prepare("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}]}')
    assert talk.mode == chat and ("the engine" in talk.note) == (chat == "text")
    plain = pipeline.prepare("/v1/completions", b'{"prompt": "hi"}')
    assert plain.mode == text and ("mistral-common" in plain.note) == (text == "text")
    assert pipeline.prepare("/v1/completions", b'{"prompt": [1, 2]}').mode == "exact"
    assert template_report(pipeline).refused == (talk.note if chat == "text" else "")


def test_a_folder_without_tokenizer_json(tmp_path):
    """Kimi and others: the engine has code of its own for such a model."""
    pipeline = Pipeline(
        write(tmp_path, config_json={"model_type": "kimi_k2"}, tokenizer_config_json={"chat_template": "x"}), "m", 16
    )
    talk = pipeline.prepare("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}]}')
    plain = pipeline.prepare("/v1/completions", b'{"prompt": "hi"}')
    assert talk.mode == plain.mode == "text" and "no tokenizer.json" in talk.note and "no tokenizer.json" in plain.note
    assert pipeline.prepare("/v1/completions", b'{"prompt": [1, 2]}').mode == "exact"
    pipeline.follow(version_quirks("0.28.0"))
    assert pipeline.fixed_texts() == []
    with pytest.raises(ModelError, match="nothing else of a model"):
        Pipeline(write(tmp_path / "empty", readme_json={}), "m", 16)
