"""Files of a model that hold anything: they are used, or the error names the file."""

import json
import shutil
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.prompt.pipeline import Pipeline
from gateway.prompt.tokens.model import ModelError, contents
from replicas.simulated.model import sim_model_dir

ODD = st.sampled_from([None, True, 5, -1, 1.5, "x", "", [], {}, [[]], [{}], [5], {"a": 1}, [{"a": 1}], {"content": 5}])
TOKENS = ("bos_token", "pad_token", "extra_special_tokens", "additional_special_tokens")
FIELDS = {
    "config.json": ("architectures", "model_type", "text_config", "vision_config", "tokenizer_class"),
    "tokenizer_config.json": (*TOKENS, "chat_template", "added_tokens_decoder", "auto_map", "tokenizer_class"),
    "tokenizer.json": ("normalizer", "pre_tokenizer", "post_processor", "model", "added_tokens", "padding", "decoder"),
    "special_tokens_map.json": TOKENS,
    "added_tokens.json": ("a",),
    "chat_template.json": ("chat_template",),
}
PLACES = st.sampled_from([(name, field) for name, fields in FIELDS.items() for field in fields])
KNOWN = {name: json.loads(path.read_bytes()) for name in FIELDS if (path := sim_model_dir() / name).is_file()}


@given(place=PLACES, inner=st.lists(st.integers(0, 9), max_size=2), value=ODD, without_template=st.booleans())
@example(("config.json", "architectures"), [], 5, False)
@example(("tokenizer_config.json", "chat_template"), [], [{"a": 1}], True)
@example(("tokenizer.json", "normalizer"), [], [[]], False)
@example(("tokenizer.json", "model"), [], [[]], False)
@example(("added_tokens.json", "a"), [], [[]], False)
@example(("tokenizer_config.json", "bos_token"), [], 5, False)
@example(("special_tokens_map.json", "extra_special_tokens"), [], 5, False)
@settings(max_examples=20, deadline=None)
def test_whatever_types_a_models_files_have_the_error_names_the_file(place, inner, value, without_template):
    name, field = place
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        shutil.copytree(sim_model_dir(), folder)
        if without_template:
            (folder / "chat_template.jinja").unlink()
        changed = deepcopy(KNOWN.get(name, {}))
        at, key = changed, field
        for number in inner:  # the value goes deeper, where there is something deeper
            below = at.get(key) if isinstance(at, dict) else at[key]
            if not isinstance(below, (dict, list)) or not below:
                break
            at, key = below, list(below)[number % len(below)] if isinstance(below, dict) else number % len(below)
        at[key] = value
        (folder / name).write_text(json.dumps(changed))
        contents(folder)
        try:
            Pipeline(folder, "m", 16).prepare(
                "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}]}'
            )
        except ModelError as error:
            assert name in str(error)
