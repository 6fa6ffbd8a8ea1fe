"""`hitherto serve | config | key | replica | explain | plan | doctor ...`: flags in, exit code out.

Flags are made from the schema in `gateway.settings`, so that a setting has one name, one help text and one check
whether it comes from a file, the environment or the command line. Each verb imports what it needs when it runs, so that
`hitherto config` answers in a fraction of a second.

Exit codes: 0 success, 1 a failure or a problem found, 2 wrong flags or configuration.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import shtab

from gateway import __version__
from gateway.settings import ALIASES, SIZES, Config, ConfigError, Settings, flag, load, unknown_variables
from replicas import cli_errors
from replicas.sizes import show_bytes
from replicas.spelling import known_or_meant

USAGE_ERROR = 2
METAVARS = {
    "admin_token": "@FILE",
    "engine_api_key": "@FILE",
    "replica_url": "URL",
    "redis_url": "URL",
    "pools": "YAML",
    "discover": "YAML",
    "allow_path": "PATH,...",
    "allow_origin": "ORIGIN,...",
    "admin_allow_host": "NAME,...",
    "slo": "LIMITS",
    "scheduler": "YAML",
    "request_router": "YAML",
    "admission": "YAML",
}


# Headings of the settings in `--help`, by the first field below each. The schema declares its fields in this order.
SUBJECTS = {
    "host": "where it listens",
    "api_keys": "who may ask",
    "model": "the model",
    "replica_url": "engines that run already",
    "launch": "engines that it starts",
    "policy": "where requests go",
    "slo": "overload",
    "redis_url": "several gateways",
    "max_body_bytes": "limits",
    "allow_path": "what clients get, and what is logged",
}


ACTIONS = ("list", "add", "drain", "remove")  # actions of the verb `replicas`
OF_ITS_OWN = {"explain": "BODY.json ", "replicas": "[ACTION] [URL|ID] "}  # a verb's arguments before the settings


class Parser(cli_errors.PlainParser):
    """A parser for one verb, which raises ConfigError for wrong arguments."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.add_argument("-V", "--version", action="version", version=f"hitherto {__version__}",
                          help="show the version and exit")  # fmt: skip

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise ConfigError(cli_errors.unknown(unknown[0], self))
        return found

    def refuse(self, why: str) -> NoReturn:
        raise ConfigError(why)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of the schema; a flag not given sets nothing, so files and environment apply."""
    group = parser
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS,
                        help="YAML file with settings (default: ./hitherto.yaml if there is one)")  # fmt: skip
    for name, field in Settings.model_fields.items():
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": _help(name, field)}
        if field.annotation is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif name == "replica_url":
            options |= {"nargs": "+", "action": "extend", "metavar": "URL"}
        else:
            options["metavar"] = metavar(name, field.annotation)
        if name in SUBJECTS:
            group = parser.add_argument_group(SUBJECTS[name])
        group.add_argument(flag(name), *ALIASES.get(name, ()), **options)


def _help(name: str, field: Any) -> str:
    text = field.description.replace("%", "%%")
    if field.default in (None, (), {}):
        return text
    if field.annotation is bool:
        return f"{text} (default: {'on' if field.default else 'off'})"
    return f"{text} (default: {show_bytes(field.default) if name in SIZES else field.default})"


def metavar(name: str, annotation: Any) -> str:
    """Return the placeholder for a setting's value in `--help`, by the setting's name and type."""
    if typing.get_origin(annotation) is typing.Literal:
        return "{" + ",".join(typing.get_args(annotation)) + "}"
    if name in METAVARS:
        return METAVARS[name]
    if isinstance(annotation, types.UnionType):
        annotation = typing.get_args(annotation)[0]
    if name in SIZES:
        return "BYTES"
    if typing.get_origin(annotation) is tuple:
        return "POLICY,..."
    return "SECONDS" if name.endswith("_s") else {int: "N", str: "NAME"}.get(annotation, "FILE")


def build_parser() -> Parser:
    parser = Parser(
        prog="hitherto",
        description="A gateway that sends each LLM request to the replica that already holds its prefix.",
    )
    verbs = parser.add_subparsers(title="commands", dest="verb", metavar="COMMAND", required=True, parser_class=Parser)

    serve = verbs.add_parser(
        "serve",
        help="run the gateway",
        description="Run the gateway, in front of engines that run already (--replica-url) or that it starts itself (--launch, --pools).",
    )
    config = verbs.add_parser("config", help="print the effective settings and where each came from",
                              description="Print the effective settings and where each came from. "
                              "The output is itself a valid configuration file.")  # fmt: skip
    config.add_argument("--json", action="store_true", help="as JSON")
    explain = verbs.add_parser("explain", help="say what would happen to a request",
                               description="Say what would happen to a request: tokens, blocks, overlap and cost per replica, the choice and why. "
                               "Nothing is sent to an engine for an answer.")  # fmt: skip
    explain.add_argument("body", metavar="BODY.json", nargs="?", help="the request's body; - reads standard input")
    explain.add_argument(
        "--path", default="/v1/chat/completions", help="the endpoint it would be posted to (default: %(default)s)"
    )
    explain.add_argument(
        "--admin", metavar="URL", help="admin side of a running gateway (default: http://ADMIN_HOST:ADMIN_PORT)"
    )
    explain.add_argument("--json", action="store_true", help="as JSON")
    doctor = verbs.add_parser("doctor", help="check everything that can be wrong",
                              description="Check everything that can be wrong, one line each, with what to do about it. "
                               "Exit code 1 if something is.")  # fmt: skip
    replicas = verbs.add_parser("replicas", help="list, add, drain and remove the replicas of a running gateway",
                                description="List the replicas of a running gateway, or add one by its URL, drain or remove one by its "
                                "id. A drain is over when what the replica has is finished: its state tells.")  # fmt: skip
    replicas.add_argument(
        "action",
        metavar="ACTION",
        nargs="?",
        default="list",
        choices=ACTIONS,
        help=f"{', '.join(ACTIONS)} (default: list)",
    )
    replicas.add_argument("which", metavar="URL|ID", nargs="?", help="the URL of a replica to add, else its id")
    replicas.add_argument(
        "--admin", metavar="URL", help="admin side of that gateway (default: http://ADMIN_HOST:ADMIN_PORT)"
    )
    replicas.add_argument("--json", action="store_true", help="as JSON")
    for verb in (serve, config, explain, doctor, replicas):
        verb.elsewhere = "; docs/migrating.md has the flags of other routers"
        verb.usage = f"{verb.prog} {OF_ITS_OWN.get(verb.prog.split()[-1], '')}[--config FILE] [settings]"
        add_settings(verb)
    completion = verbs.add_parser("completion", help="print a script that completes commands and flags in a shell",
                                  description="Print a script that completes commands and flags in a shell, as in: "
                                  "eval \"$(hitherto completion bash)\"")  # fmt: skip
    completion.add_argument(
        "shell", metavar="SHELL", choices=shtab.SUPPORTED_SHELLS, help=", ".join(shtab.SUPPORTED_SHELLS)
    )
    verbs.add_parser("version", help="print the version")
    verbs.add_parser("key", help="make an API key for a client", add_help=False)
    verbs.add_parser("replica", help="run one simulated engine", add_help=False)
    verbs.add_parser(
        "assets",
        help="write compose files with the sources of their image, dashboards, alert rules and a systemd unit into a folder",
        add_help=False,
    )
    verbs.add_parser("plan", help="what a model's KV cache holds, and the replicas that a load needs", add_help=False)
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown and unknown[0].partition("=")[0] == "--admin":  # a flag of `explain` and `replicas` only
        raise ConfigError("unknown argument '--admin'. Say where the admin side is with --admin-host and --admin-port")
    verb = next(action for action in parser._actions if action.dest == "verb").choices[args.verb]
    if unknown:
        raise ConfigError(cli_errors.unknown(unknown[0], verb))
    _take_back(args, verb)
    return args


def _take_back(args: argparse.Namespace, verb: argparse.ArgumentParser) -> None:
    """Move a command's own arguments out of --replica-url, which takes every word that follows it.

    A URL contains a colon, so a file name without a colon, or the name of an action, is no URL.
    """
    urls = getattr(args, "replica_url", [])
    is_given = bool(urls)
    if args.verb == "explain" and args.body is None:
        files = [word for word in urls if ":" not in word]
        if len(files) != 1:
            verb.error("the following arguments are required: BODY.json")
        args.body = files[0]
        urls.remove(args.body)
    elif (
        args.verb == "replicas"
        and (at := next((at for at, word in enumerate(urls) if word in ACTIONS), None)) is not None
    ):
        args.action, *which = urls[at:]
        if len(which) > 1 or args.which is not None:
            verb.error(
                f"{args.action} takes one URL or id: write it before --replica-url, which takes all words behind it"
            )
        args.which = which[0] if which else None
        del urls[at:]
    if is_given and not urls:
        verb.error("argument --replica-url: expected at least one argument")


def load_config(args: argparse.Namespace, without_files: bool = False) -> Config:
    given = {name: value for name, value in vars(args).items() if name in Settings.model_fields}
    config = load(given, file=getattr(args, "config", None), without_files=without_files)
    _warn_of_ignored_variables()
    return config


def _warn_of_ignored_variables() -> None:
    """Warn of environment variables that look like settings but are none; `load` refuses misspelt settings."""
    for variable, near in unknown_variables(os.environ).items():
        hint = f". Did you mean {near}?" if near else ""
        print(f"hitherto: environment {variable}: this is no setting, so it changes nothing{hint}", file=sys.stderr)


@contextlib.contextmanager
def _placing(config: Config) -> Iterator[None]:
    """Prefix configuration errors with the source of the setting: a flag, a variable or a file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.placed(config.sources)) from None


def serve(args: argparse.Namespace) -> int:
    config = load_config(args)
    settings = config.settings
    if not (settings.replica_url or settings.launches or settings.replica_file or settings.discover):
        raise ConfigError(
            "there is no replica to send requests to. Give --replica-url http://HOST:PORT for engines that run already, "
            "--launch 2 to start simulated ones, --discover for pods of a cluster, or --replica-file FILE to add them by POST /replicas"
        )
    if settings.workers > 1:
        from gateway.workers.supervisor import serve as run
    else:
        from gateway.app import serve as run
    with _placing(config):
        return run(settings)


def show_config(args: argparse.Namespace) -> int:
    config = load_config(args)
    if config.settings.launches:
        from gateway.model import check_roles

        with _placing(config):
            check_roles(config.settings)
    if args.json:
        plain = config.plain()
        print(
            json.dumps(
                {name: {"value": plain[name], "source": source} for name, source in config.sources.items()}, indent=2
            )
        )
    else:
        print(config.to_yaml())
    settings = config.settings
    if any(setting is not None for setting in (settings.scheduler, settings.admission, settings.api_keys)):
        from gateway.settings.warnings import find_warnings  # it imports numpy, which takes a while

        for warning in find_warnings(config.settings):
            print(f"hitherto: {warning}", file=sys.stderr)
    return 0


def replicas(args: argparse.Namespace) -> int:
    from gateway.ops import replicas_verb as room

    config = load_config(args, without_files=True)
    with _placing(config):
        return room.run(args, config)


def replica(argv: Sequence[str]) -> int:
    from replicas.simulated import cli

    parser = Parser(prog="hitherto replica", description=cli.ABOUT)
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(argv))


def plan(argv: Sequence[str]) -> int:
    """Run the load generator's `plan` verb, found by its entry point: the gateway imports nothing of that package."""
    from importlib.metadata import entry_points

    for command in entry_points(group="hitherto.commands", name="plan"):
        return command.load()(argv)
    raise ConfigError("the load generator, whose verb this is, is not installed: `pip install` this package again")


def explain(args: argparse.Namespace) -> int:
    from gateway.ops import explain as room

    config = load_config(args, without_files=True)
    with _placing(config):
        return room.run(args, config)


def doctor(args: argparse.Namespace) -> int:
    from gateway.ops import doctor as room

    try:
        config = load_config(args, without_files=True)
    except ConfigError as error:
        return room.report_bad_config(str(error))
    with _placing(config):
        return room.run(config)


def key(argv: Sequence[str]) -> int:
    from gateway.tenants import verb

    parser = Parser(prog="hitherto key", description=verb.ABOUT)
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(argv))


def assets(argv: Sequence[str]) -> int:
    from gateway import assets as room

    parser = Parser(prog="hitherto assets", description=room.ABOUT)
    room.add_arguments(parser)
    return room.run(parser.parse_args(argv))


WITH_FLAGS_OF_THEIR_OWN = {"key": key, "assets": assets, "replica": replica, "plan": plan}


def completion(args: argparse.Namespace) -> int:
    print(shtab.complete(_whole_parser(), args.shell))
    return 0


def _whole_parser() -> Parser:
    """Build the parser for shell completion: with policy names and the flags of verbs with parsers of their own."""
    from gateway import assets
    from gateway.tenants import verb as key
    from policies import NAMES
    from replicas.simulated import cli as replica

    parser = build_parser()
    verbs = next(action for action in parser._actions if action.dest == "verb").choices
    assert isinstance(verbs, dict)
    for name, room in {"key": key, "assets": assets, "replica": replica}.items():
        room.add_arguments(verbs[name])
    for name in ("serve", "config", "explain", "doctor", "replicas"):
        verbs[name]._option_string_actions["--policy"].choices = sorted(NAMES)
    return parser


def version(args: argparse.Namespace) -> int:
    print(f"hitherto {__version__}")
    return 0


VERBS = {
    "serve": serve,
    "config": show_config,
    "explain": explain,
    "doctor": doctor,
    "replicas": replicas,
    "completion": completion,
    "version": version,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `hitherto` command and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if not argv:
            build_parser().print_help()
            return 0
        if argv[0].startswith("-") and argv[0] not in cli_errors.HELP_AND_VERSION:
            raise ConfigError(cli_errors.before_command(argv[0], "hitherto"))
        if not argv[0].startswith("-") and argv[0] not in {**WITH_FLAGS_OF_THEIR_OWN, **VERBS}:
            raise ConfigError(
                f"unknown command {argv[0]!r}{known_or_meant(argv[0], {**VERBS, **WITH_FLAGS_OF_THEIR_OWN})}"
            )
        if argv[0] in WITH_FLAGS_OF_THEIR_OWN:
            _warn_of_ignored_variables()
            return WITH_FLAGS_OF_THEIR_OWN[argv[0]](argv[1:])
        args = _parse(argv)
        return VERBS[args.verb](args)
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"hitherto: {line}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `hitherto config | head`
        sys.stderr.close()
        return 1
