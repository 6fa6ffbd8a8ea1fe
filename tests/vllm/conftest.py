"""The vLLM these tests ask, and engines that they share. They are no part of `make test`: an environment has 2.3 GB."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadgen.demo.tiny_model import tiny_model

from .engines import Engine, block_size, lora
from .fleet import fleet, single
from .witness import Chains, Witness

__all__ = ["fleet", "single"]

ADAPTERS = ("red", "blue")  # LoRA adapters of the shared engines, beside the base model "tiny"
# Tokens in the cache of a shared engine: of prompts of a few hundred tokens, some ten.
SHARED_TOKENS = 4096


def pytest_collection_modifyitems(items):
    """Whoever asks first for an engine waits for its start: 40 s for two, more where the machine has other work."""
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def vllm() -> None:
    """Skip the test unless HITHERTO_VLLM names an environment with a vLLM."""
    if not os.environ.get("HITHERTO_VLLM"):
        pytest.skip("needs a vLLM: `make test-vllm` installs one and runs this, HITHERTO_VLLM names another's folder")


@pytest.fixture(scope="session")
def model(vllm, tmp_path_factory) -> Path:
    """A tiny model with a tokenizer of its own; `tiny_model` makes others."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@contextmanager
def starting(model: Path, tmp_path_factory):
    """`start(*flags, model=..., blocks=..., ...)` starts an engine and does not wait; all end with the block, which
    fails if one ended by itself."""
    started: list[Engine] = []

    def start(*flags: str, model: Path = model, **options) -> Engine:
        log = tmp_path_factory.mktemp("logs") / "engine.log"
        started.append(Engine(model, *flags, log=log, **options))
        return started[-1]

    yield start
    died = [engine.tail() for engine in started if engine.died]
    for engine in started:
        engine.stop()
    assert not died, "\n\n".join(["engines ended by themselves:", *died])


@pytest.fixture(scope="session")
def start_shared(model, tmp_path_factory):
    """As `start_engine`, but engines end with the session."""
    with starting(model, tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="module")
def start_engine(model, tmp_path_factory):
    """`start_engine(*flags, model=..., blocks=..., ...)` starts one and does not wait; all end with the file's
    tests."""
    with starting(model, tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="session")
def engines(start_shared, tmp_path_factory) -> list[Engine]:
    """Two engines for all tests: small caches, two adapters, resettable, and they keep responses. One writes block
    hashes as integers, one as bytes. They hold what the tests before put there; a new gateway learns it from their
    replay."""
    folder = tmp_path_factory.mktemp("adapters")
    paths = [f"{name}={lora(folder / name, seed)}" for seed, name in enumerate(ADAPTERS)]
    flags = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", *paths)
    options = {"blocks": SHARED_TOKENS // block_size(), "env": {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}}
    both = [start_shared(*flags, events=events, **options) for events in ("ints", "bytes")]
    return [engine.wait() for engine in both]


@pytest.fixture(scope="session")
def engine(engines) -> Engine:
    """One of the two."""
    return engines[0]


@pytest.fixture
def witness_of():
    """`witness_of(engine)` reads its events beside the gateway; those of one test name equal blocks alike."""
    chains, opened = Chains(), []

    def witness(engine) -> Witness:
        opened.append(Witness(engine, chains))
        return opened[-1]

    yield witness
    for one in opened:
        one.close()
