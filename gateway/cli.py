"""The command line, `hitherto serve | config | key | replica | explain | plan | doctor ...`.

Flags are made from the schema in `gateway.settings`. A setting therefore has one name, one help text and one check,
whether it comes from a file, the environment or the command line. Each command imports what it needs when it runs, so
`hitherto config` answers in a fraction of a second.

Exit codes: 0 success, 1 a failure or a problem found, 2 wrong flags or configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import shtab

from gateway import __version__, assets
from gateway.settings import ALIASES, SIZES, Config, ConfigError, Settings, flag, load, unknown_variables
from gateway.tenants import verb as key
from replicas import cli_errors
from replicas.simulated import cli as replica
from replicas.sizes import show_bytes
from replicas.spelling import known_or_meant

USAGE_ERROR = 2
METAVARS = {
    **dict.fromkeys(("admin_token", "engine_api_key"), "@FILE"),
    **dict.fromkeys(("replica_url", "redis_url"), "URL"),
    **dict.fromkeys(("pools", "discover", "scheduler", "request_router", "admission"), "YAML"),
    "allow_path": "PATH,...",
    "allow_origin": "ORIGIN,...",
    "admin_allow_host": "NAME,...",
    "slo": "LIMITS",
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


class Parser(cli_errors.PlainParser):
    """An argument parser for one command, which raises ConfigError for wrong arguments."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.add_argument("-V", "--version", action="version", version=f"hitherto {__version__}",
                          help="show the version and exit")  # fmt: skip

    def refuse(self, why: str) -> NoReturn:
        raise ConfigError(why)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add a flag to the parser for each field of the settings' schema.

    A flag that is not given has no default value, so the setting comes from the file or the environment.
    """
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
    """Make the parser of all commands. The parsed arguments have the command's function as `run`."""
    parser = Parser(
        prog="hitherto",
        description="A gateway that sends each LLM request to the replica that already holds its prefix.",
    )
    verbs = parser.add_subparsers(title="commands", dest="verb", metavar="COMMAND", required=True, parser_class=Parser)

    def verb(name: str, run: Callable[[Any], int], help: str, more: str = "", own: str | None = None) -> Parser:
        """Add a command and return its parser.

        `run`: the function that executes the command and returns its exit code. `help`: its line in the list of
        commands. `more`: the sentences after `help` in the command's own help. `own`: the arguments that the usage line
        shows before the settings; None for a command that takes no settings.
        """
        made: Parser = verbs.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}. {more}")
        made.set_defaults(run=run, reads_settings=own is not None)
        if own is not None:
            made.elsewhere = "; docs/migrating.md has the flags of other routers"
            made.usage = f"{made.prog} {own}[--config FILE] [settings]"
        return made

    more = "Its engines run already (--replica-url), or it starts them itself (--launch, --pools)."
    serving = verb("serve", serve, "run the gateway", more, "")
    more = "The output is itself a valid configuration file."
    config = verb("config", show_config, "print the effective settings and where each came from", more, "")
    more = "It tells tokens, blocks, overlap and cost per replica, the choice and why. Nothing is sent to an engine for an answer."
    explaining = verb("explain", explain, "say what would happen to a request", more, "BODY.json ")
    explaining.add_argument("body", metavar="BODY.json", help="the request's body; - reads standard input")
    path = "the endpoint it would be posted to (default: %(default)s)"
    explaining.add_argument("--path", default="/v1/chat/completions", help=path)
    more = "There is one line for each check, with what to do about it. Exit code 1 if something is wrong."
    checking = verb("doctor", doctor, "check everything that can be wrong", more, "")
    more = (
        "A replica is added by its URL, and drained or removed by its id. "
        "A drain is over when what the replica has is finished: its state tells."
    )
    help = "list, add, drain and remove the replicas of a running gateway"
    changing = verb("replicas", replicas, help, more, "[ACTION] [URL|ID] ")
    actions = ("list", "add", "drain", "remove")
    help = f"{', '.join(actions)} (default: %(default)s)"
    changing.add_argument("action", metavar="ACTION", nargs="?", default="list", choices=actions, help=help)
    changing.add_argument("which", metavar="URL|ID", nargs="?", help="the URL of a replica to add, else its id")
    admin = "admin side of a running gateway (default: http://ADMIN_HOST:ADMIN_PORT)"
    required = "admin side of a gateway that has to run (default: look for one at ADMIN_HOST:ADMIN_PORT)"
    for one in (explaining, checking, changing):
        one.add_argument("--admin", metavar="URL", help=required if one is checking else admin)
    for one in (config, explaining, changing):
        one.add_argument("--json", action="store_true", help="as JSON")
    for one in (serving, config, explaining, checking, changing):
        add_settings(one)

    help = "print a script that completes commands and flags in a shell"
    completing = verb("completion", completion, help, 'To use it in bash: eval "$(hitherto completion bash)".')
    shells = ", ".join(shtab.SUPPORTED_SHELLS)
    completing.add_argument("shell", metavar="SHELL", choices=shtab.SUPPORTED_SHELLS, help=shells)
    verb("version", version, "print the version")
    key.add_arguments(verb("key", key.run, "make an API key for a client", key.ABOUT))
    replica.add_arguments(verb("replica", replica.run, "run one simulated engine", replica.ABOUT))
    assets.add_arguments(verb("assets", assets.run, assets.HELP, assets.ABOUT))
    verbs.add_parser("plan", help="what a model's KV cache holds, and the replicas that a load needs", add_help=False)
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments, with the command's function as `run`. Raises ConfigError for wrong arguments."""
    parser = build_parser()
    verbs = next(action for action in parser._actions if action.dest == "verb").choices
    if argv[0].startswith("-") and argv[0] not in cli_errors.HELP_AND_VERSION:
        raise ConfigError(cli_errors.before_command(argv[0], "hitherto"))
    if not argv[0].startswith("-") and argv[0] not in verbs:
        raise ConfigError(f"unknown command {argv[0]!r}{known_or_meant(argv[0], verbs)}")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(cli_errors.unknown(unknown[0], verbs[args.verb]))
    return args


def load_config(args: argparse.Namespace, without_files: bool = False) -> Config:
    """Return the settings of a command, and set `args.sources` to where each came from. Raises ConfigError.

    `without_files`: the command can do without files that settings name. Settings whose files cannot be used are then
    listed in `Config.unusable` of the result. Otherwise they raise ConfigError.
    """
    given = {name: value for name, value in vars(args).items() if name in Settings.model_fields}
    config = load(given, file=getattr(args, "config", None), without_files=without_files)
    args.sources = config.sources  # for `main`
    _warn_of_ignored_variables()
    return config


def _warn_of_ignored_variables() -> None:
    """Print a warning for each environment variable that is named like a setting but is none."""
    for variable, near in unknown_variables(os.environ).items():
        hint = f". Did you mean {near}?" if near else ""
        print(f"hitherto: environment {variable}: this is no setting, so it changes nothing{hint}", file=sys.stderr)


def serve(args: argparse.Namespace) -> int:
    settings = load_config(args).settings
    if not (settings.replica_url or settings.launches or settings.replica_file or settings.discover):
        raise ConfigError(
            "there is no replica to send requests to. Give --replica-url http://HOST:PORT for engines that run already, "
            "--launch 2 to start simulated ones, --discover for pods of a cluster, or --replica-file FILE to add them by POST /replicas"
        )
    if settings.workers > 1:
        from gateway.workers.supervisor import serve as run
    else:
        from gateway.app import serve as run
    return run(settings)


def show_config(args: argparse.Namespace) -> int:
    config = load_config(args)
    if config.settings.launches:
        from gateway.model import check_roles

        check_roles(config.settings)
    if args.json:
        plain = config.plain()
        shown = {name: {"value": plain[name], "source": source} for name, source in config.sources.items()}
        print(json.dumps(shown, indent=2))
    else:
        print(config.to_yaml())
    settings = config.settings
    if settings.has_overload or settings.api_keys or settings.replica_file:
        from gateway.settings.warnings import find_warnings  # it imports numpy, which takes a while

        for warning in find_warnings(config.settings):
            print(f"hitherto: {warning}", file=sys.stderr)
    return 0


def replicas(args: argparse.Namespace) -> int:
    from gateway.ops import replicas_verb

    return replicas_verb.run(args, load_config(args, without_files=True))


def explain(args: argparse.Namespace) -> int:
    from gateway.ops import explain as room

    return room.run(args, load_config(args, without_files=True))


def doctor(args: argparse.Namespace) -> int:
    from gateway.ops import doctor as room

    try:
        config = load_config(args, without_files=True)
    except ConfigError as error:
        return room.report_bad_config(str(error))
    return room.run(args, config)


def plan(argv: Sequence[str]) -> int:
    """Run the load generator's `plan` command, and return its exit code.

    The command is found by its entry point, since the gateway imports nothing of the load generator.
    """
    from importlib.metadata import entry_points

    for command in entry_points(group="hitherto.commands", name="plan"):
        return command.load()(argv)
    raise ConfigError("the load generator, whose verb this is, is not installed: `pip install` this package again")


def completion(args: argparse.Namespace) -> int:
    from policies import NAMES

    parser = build_parser()
    for verb in next(action for action in parser._actions if action.dest == "verb").choices.values():
        if "--policy" in verb._option_string_actions:
            verb._option_string_actions["--policy"].choices = sorted(NAMES)
    print(shtab.complete(parser, args.shell))
    return 0


def version(args: argparse.Namespace) -> int:
    print(f"hitherto {__version__}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `hitherto` command and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = argparse.Namespace()
    try:
        if not argv:
            build_parser().print_help()
            return 0
        if argv[0] == "plan":
            return plan(argv[1:])
        args = _parse(argv)
        if not args.reads_settings:
            _warn_of_ignored_variables()
        return args.run(args)
    except ConfigError as error:
        said = error.placed(args.sources) if "sources" in args else str(error)
        for line in said.splitlines():
            print(f"hitherto: {line}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `hitherto config | head`
        sys.stderr.close()
        return 1
