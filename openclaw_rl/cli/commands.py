"""The commands: their arguments, where their configuration comes from, and their exit status."""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

from openclaw_rl import __version__
from openclaw_rl.cli.supervisor import stop_with_parent
from openclaw_rl.config import Config, add_flags, load_config, render_config, settings
from openclaw_rl.errors import MISCONFIGURED, ConfigError, HookError, OpenClawRLError

_OVERVIEW = """\
openclaw-rl trains a personal agent while it is being used.

  openclaw-rl up --model FOLDER      everything on this machine: serve, judge, train
  openclaw-rl connect                let OpenClaw talk to it (shows the change; --yes makes it)
  openclaw-rl doctor                 what is wrong, and how to fix it
  openclaw-rl status                 what became of every turn
  openclaw-rl pause | resume         training stops, or goes on; serving and judging always do
  openclaw-rl rollback VERSION       serve an earlier version again

Other agents: point them at http://127.0.0.1:30000/v1. What you answer becomes the reward; the
model you talk to changes while you go on.

Past conversations can be a start: put them into --data, or openclaw-rl replay PATH. What was kept
of the new ones:
  openclaw-rl inspect | export | purge

The loops can also run one by one, sharing only the journal in --data:
  openclaw-rl serve | judge | train
"""

_COMMANDS = (
    *("up", "serve", "judge", "train", "status", "connect", "doctor", "replay"),
    *("pause", "resume", "rollback", "inspect", "export", "purge"),
)
_LOOPS = ("up", "serve", "judge", "train", "replay")
"""What `up` is, and what it starts."""

_LISTED = {
    **dict.fromkeys(("pause", "resume", "rollback", "inspect", "export", "purge"), ("data",)),
    "status": ("data", "rollout"),
    "doctor": ("model", "data", "gateway", "engine", "rollout"),
}
"""Sections that --help lists, where not all: the others' flags are taken too, so that the words
given to `up` can be given again."""


def _command(name: str) -> ModuleType:
    """The module of a command: its docstring is the help, `run(config, options)` does it, and
    `add_arguments(parser)` adds what is no setting."""
    return importlib.import_module(f"openclaw_rl.cli.{name}")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="openclaw-rl",
        description=_OVERVIEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"openclaw-rl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in _COMMANDS:
        module = _command(name)
        words = (module.__doc__ or "").partition("\n")[0].rstrip(".")
        command = commands.add_parser(
            name,
            help=words[0].lower() + words[1:],
            description=words + ".",
            allow_abbrev=False,
            epilog="Settings come from --config, then the environment, then flags; later wins.",
        )
        command.add_argument("--config", metavar="FILE", help="TOML file with the settings below")
        add_flags(command, listed=_LISTED.get(name))
        if hasattr(module, "add_arguments"):
            module.add_arguments(command)
        if name in _LOOPS:
            command.add_argument("--verbose", action="store_true", help="log more")
            command.add_argument(
                "--print-config",
                action="store_true",
                help="print all settings as TOML, each with where it comes from, and start nothing",
            )
            command.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)
    return parser


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status (2: misconfigured)."""
    options, unknown = build_parser().parse_known_args(argv)
    supervised = getattr(options, "supervised", False)
    printing = options.command in ("status", "rollback", "inspect", "export", "doctor", "connect")
    if argv is None and (printing or getattr(options, "print_config", False)):
        # Ends quietly in `status | head`. Never in a server: a client that hangs up would kill it.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        if unknown:
            flags = [setting.flag or "" for setting in settings()]
            close = difflib.get_close_matches(unknown[0].partition("=")[0], flags, 1)
            fix = f"did you mean {close[0]}?" if close else f"see {options.command} --help"
            raise ConfigError(f"{options.command}: no such argument {unknown[0]}; {fix}")
        config = _config(options)
        if getattr(options, "print_config", False):
            print(render_config(config))
            return 0
        if options.command in _LOOPS:
            _log_to_stderr(options.verbose)
        if supervised:
            stop_with_parent()
        status: int = _command(options.command).run(config, options)
        return status
    except OpenClawRLError as error:
        print(f"openclaw-rl: {error}", file=sys.stderr)
        # A loop that failed while it ran (a full disk, a dead engine) is worth starting again.
        again = supervised and not isinstance(error, ConfigError | HookError)
        return 1 if again else MISCONFIGURED
    except KeyboardInterrupt:
        return 130


def _config(options: argparse.Namespace) -> Config:
    """The configuration of the sources, or (`--config -`) a supervisor's, one line of JSON on
    standard input."""
    if options.config == "-":
        return Config.model_validate_json(sys.stdin.buffer.readline())
    flags = {key: value for key, value in vars(options).items() if "." in key}
    return load_config(flags, os.environ, options.config)


def _log_to_stderr(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("openclaw_rl").setLevel(logging.DEBUG if verbose else logging.INFO)
    for noisy in ("aiohttp.access", "httpx", "transformers", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
