"""Tokenizer files read as transformers reads them: `transformers.json` holds what 5.19 and 5.23 made of the folders in
`folders` (recorded by `record_reading`)."""

import gc
import json

import pytest

from gateway.prompt.pipeline import Pipeline
from gateway.prompt.quirks import Transformers
from gateway.prompt.tokens.agreement import Answer
from gateway.prompt.tokens.model import ModelError
from gateway.prompt.tokens.reading import AS_IT_IS, Readings
from gateway.prompt.tokens.tokenizer import Tokenizer
from replicas.engines.vllm.versions import version_quirks

from ..folders import SHAPES, TEXTS, digest, write
from ..reference import HERE, ids_of, model_dir

RECORDED = json.loads((HERE / "transformers.json").read_text())
RELEASES = {release: Transformers(number, (number[0], number[1] + 1))
            for release in RECORDED for number in [tuple(map(int, release.split(".")))]}  # fmt: skip
VERSIONS = {"0.32.0": "5.19", "0.99.0": None}  # of vLLM, with the one release of transformers that it has, or several


def readings(folder) -> Readings:
    files = [
        json.loads(path.read_text()) if path.is_file() else {}
        for path in (folder / "tokenizer_config.json", folder / "config.json")
    ]
    return Readings(folder, *files)


def ids(tokenizer, text, special):
    return memoryview(tokenizer.encode(text, special)).cast("I").tolist()


@pytest.mark.parametrize("name", SHAPES)
def test_as_transformers(name, tmp_path):
    found = readings(write(name, tmp_path))
    for release, known in RELEASES.items():
        reading, doubt = found.likeliest(known)
        assert not doubt and reading.special_tokens == RECORDED[release][name]["named"]
        for backend in ("fastokens", "tokenizers"):
            tokenizer = Tokenizer(tmp_path, backend, reading)
            for special, key in ((False, "bare"), (True, "special")):
                for text, theirs in zip(TEXTS, RECORDED[release][name][key], strict=True):
                    assert digest(ids(tokenizer, text, special)) == theirs, (release, backend, text, special)


@pytest.mark.parametrize("name", SHAPES)
def test_a_pipeline_makes_an_engines_tokens_or_says_that_it_may_not(name, tmp_path):
    pipeline = Pipeline(write(name, tmp_path), "m", 16)
    for version, release in VERSIONS.items():
        pipeline.follow(version_quirks(version))
        for i, text in enumerate(TEXTS):
            prompt = pipeline.prepare("/v1/completions", json.dumps({"prompt": text}).encode())
            if prompt.mode == "exact":
                assert {digest(ids_of(prompt))} == {
                    RECORDED[one][name]["special"][i] for one in ([release] if release else RECORDED)
                }
            else:
                assert release is None and prompt.mode == "text" and "transformers" in prompt.note and not prompt.kind
        assert pipeline.prepare("/v1/completions", b'{"prompt": [1, 2, 3]}').mode == "exact"  # no text, no doubt


def test_releases_that_differ_are_a_doubt(tmp_path):
    """R1-Distill-Llama in a folder: 5.19 splits it at blanks, 5.23 leaves it byte-level."""
    found = readings(write("r1_distill_llama", tmp_path))
    assert (
        found.likeliest(RELEASES["5.19"])[0].how == "rebuilt as LlamaTokenizer"
        and found.likeliest(RELEASES["5.23"])[0].how == AS_IT_IS
    )
    assert "5.16 or newer" in found.likeliest(Transformers((5, 16)))[1]


@pytest.mark.parametrize(
    "config, settings, why",
    [
        ({"tokenizer_class": "BertTokenizer"}, {}, "BertTokenizer"),
        ({}, {"model_type": "xlm-roberta"}, "XLMRobertaTokenizer"),
        ({"auto_map": {"AutoTokenizer": ["a", None]}}, {}, "auto_map"),
        ({"fix_mistral_regex": True}, {}, "fix_mistral_regex"),
        ({"tokenizer_class": "MyTokenizer"}, {}, ""),
        ({}, {}, ""),
    ],
)
def test_what_is_not_followed_is_a_doubt(tmp_path, config, settings, why):
    write("llama_3", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps(settings))
    doubt = readings(tmp_path).likeliest(RELEASES["5.19"])[1]
    assert why in doubt and bool(doubt) == bool(why)
    prompt = Pipeline(tmp_path, "m", 16).prepare("/v1/completions", b'{"prompt": "hi"}')
    assert prompt.mode == ("text" if why else "exact") and why in prompt.note


@pytest.mark.parametrize("kind", ["step5", "step5_vl", "deepseek_v4", "internlm2"])
def test_files_of_types_that_vllm_itself_takes_as_they_are_are_not_rebuilt(tmp_path, kind):
    """Whatever class they name."""
    write("r1_distill_llama", tmp_path)
    rebuilt = readings(tmp_path).likeliest(RELEASES["5.19"])[0].how
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert (readings(tmp_path).likeliest(RELEASES["5.19"])[0].how, rebuilt) == (AS_IT_IS, "rebuilt as LlamaTokenizer")


def test_mistral_common_may_read_a_mistral(tmp_path):
    write("mistral_7b", tmp_path)
    assert not readings(tmp_path).unknown
    (tmp_path / "tekken.json").write_text("{}")
    assert "mistral-common" in readings(tmp_path).unknown


@pytest.mark.parametrize("name", ["llama_3", "r1_distill_llama", "tokens_in_config_only"])
def test_files_are_not_kept_once_they_are_loaded(name, tmp_path):
    """What is read of a large tokenizer.json is tens of megabytes."""

    def parsed() -> int:
        gc.collect()
        return sum(type(one) is dict and "model" in one and "added_tokens" in one for one in gc.get_objects())

    folder, before = write(name, tmp_path), parsed()
    pipeline = Pipeline(folder, "m", 16)
    pipeline.follow(version_quirks("0.32.0"))
    pipeline.read_as("of another process")
    assert pipeline.judge([Answer("x", False, (999_999,))]).differs
    assert parsed() <= before
    again = readings(folder)
    made = [one.content for one in again.all()]
    again.let_go()
    assert [one.content for one in again.all()] == made


def test_files_that_cannot_be_read_say_so(tmp_path):
    write("llama_2", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"x": 1}}))
    with pytest.raises(ModelError, match="can't use .*/tokenizer_config.json: ValueError"):
        readings(tmp_path)


def test_text_is_not_split_at_special_tokens_where_the_config_says_so(tmp_path):
    pipeline = Pipeline(write("split_special_tokens", tmp_path), "m", 16)
    assert "<s>" not in pipeline.tokenizer.safe_cuts() and pipeline.tokenizer.backend == "tokenizers"


def test_whatever_the_files_call_a_token_is_asked_of_the_engine(tmp_path):
    """One that is none here may be one there: three ordinary texts would not show it, and the ids would be
    forwarded."""
    folder = write("tokens_of_a_models_own_as_untyped_objects", tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {
        "unheard_of_tokens": ["<new>", {"content": "<newer>"}]
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "added_tokens.json").write_text('{"<older>": 9}')
    pipeline = Pipeline(folder, "m", 16)
    assert any("<new>" in text and "<newer>" in text for text in pipeline.fixed_texts())
    known = {token["content"] for token in pipeline.tokenizer.added_tokens}
    assert all(
        any(one in text for text in pipeline.fixed_texts()) for one in {"<older>", "<image>", "<|extra|>"} | known
    )


@pytest.mark.parametrize(
    "name, told, bos",
    [
        ("CohereTokenizer", {}, "<BOS_TOKEN>"),
        ("CohereTokenizerFast", {"bos_token": "<s>"}, "<s>"),
        ("CohereTokenizer", {"bos_token": None}, None),
        ("CodeLlamaTokenizer", {}, "<s>"),
        ("CodeGenTokenizer", {}, "<|endoftext|>"),
        ("PreTrainedTokenizerFast", {}, None),
    ],
)
def test_a_class_has_special_tokens_of_its_own_where_the_files_name_none(name, told, bos, tmp_path):
    """As transformers 5.19 has them by default; a template may print them."""
    for file in ("tokenizer.json", "config.json"):
        (tmp_path / file).symlink_to(model_dir("sim") / file)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **told}))
    reading, _ = readings(tmp_path).likeliest(Transformers())
    assert reading.special_tokens.get("bos_token") == bos
