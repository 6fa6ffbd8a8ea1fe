"""The kinds of engines that the gateway knows; an `EngineDialect` describes each."""

from collections.abc import Mapping

from replicas.answer import Answer
from replicas.engines.dialect import EngineDialect
from replicas.engines.llmd import LLMD
from replicas.engines.sglang import SGLANG
from replicas.engines.simulated import SIMULATED
from replicas.engines.transfer import Transfer
from replicas.engines.vllm import VLLM
from replicas.engines.vllm.transfer import MOONCAKE, NIXL, NIXL_UNCHECKED

DIALECTS: list[EngineDialect] = [SIMULATED, SGLANG, VLLM]
DEFAULT: EngineDialect = VLLM  # assumed for an engine that does not report its kind

# The transfers of KV cache that an operator can name, whatever kind of engine is behind a URL.
TRANSFERS: dict[str, Transfer] = {one.id: one for one in (NIXL, NIXL_UNCHECKED, MOONCAKE, LLMD)}


def recognize(answers: Mapping[str, Answer]) -> EngineDialect:
    """Return the dialect of an engine, which says what kind of engine it is.

    `answers`: the engine's answers to a full probe, by path.
    """
    return next((one for one in DIALECTS if one.speaks(answers)), DEFAULT)


def by_id(id: str) -> EngineDialect:
    """Return the dialect with this id, such as "sglang". Raises KeyError."""
    return {one.id: one for one in DIALECTS}[id]
