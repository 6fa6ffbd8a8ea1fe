"""Run by vLLM's own Python: a list of `vllm serve` argument lists in, what its parser makes of each out (JSON)."""

import contextlib
import io
import json
import sys

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:  # before 0.29
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def judge(parser: FlexibleArgumentParser, words: list[str]) -> dict:
    """{"refused": why} or {"accepted": the values that the engine would be made of}."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = parser.parse_args(words)
            validate_parsed_serve_args(args)
            AsyncEngineArgs.from_cli_args(args)
    except SystemExit:
        return {"refused": said.getvalue().strip().splitlines()[-1]}  # above it is the usage
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"accepted": {name: _plain(value) for name, value in vars(args).items()}}


def _plain(value: object) -> object:
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        shown = getattr(value, "__dict__", None)
        return {name: str(one) for name, one in shown.items()} if shown is not None else str(value)


parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
print(json.dumps([judge(parser, words) for words in json.load(sys.stdin)]))
