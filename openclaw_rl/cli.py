"""The command line: `openclaw-rl COMMAND`, each a thin call of the module that does it."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from openclaw_rl import __version__, browse, preflight
from openclaw_rl.config import Config, add_flags, hook_args, load_config, render_config
from openclaw_rl.errors import ConfigError, HookError, OpenClawRLError
from openclaw_rl.supervisor import MISCONFIGURED, Loop, leashed, stop_with_parent, supervise

_OVERVIEW = """\
openclaw-rl trains a personal agent while it is being used.

  openclaw-rl up --model FOLDER      everything on this machine: serve, judge, train
  openclaw-rl connect                let OpenClaw talk to it (shows the change; --yes makes it)
  openclaw-rl doctor                 what is wrong, and how to mend it
  openclaw-rl status                 what became of every turn

Other agents: point them at http://127.0.0.1:30000/v1. What you answer becomes the reward; the
model you talk to changes while you go on.

Past conversations can be a start: put them into --data, or openclaw-rl replay PATH. What was kept
of the new ones:
  openclaw-rl inspect | export | purge

The loops can also run one by one, sharing only the journal in --data:
  openclaw-rl serve | judge | train
"""

_COMMANDS = {
    "up": "everything on one machine: gateway, judge, and engine with trainer",
    "serve": "the gateway alone: the HTTP service that agents talk to",
    "judge": "the judge alone: reads what happened next, writes rewards and hints",
    "train": "the embedded host alone: the engine that samples and the trainer",
    "status": "what became of every turn; all counts add up",
    "connect": "let OpenClaw talk to the gateway: its provider entry and our plugin",
    "doctor": "what is wrong, and how to mend it; exit status 1 where something is",
    "replay": "learn from past conversations: JSONL of messages, or OpenClaw's own sessions",
    "inspect": "the sessions in the journal, or one of them, or one turn",
    "export": "write turns, with all that was said, to a file of JSON lines",
    "purge": "delete turns with all that was said in them",
}

_BROWSE = ("inspect", "export", "purge")
_LOOPS = ("up", "serve", "judge", "train", "replay")
"""What `up` is, and what it starts."""

_LOOKS_AT = {
    **dict.fromkeys(_BROWSE, ("data",)),
    "status": ("data", "rollout"),
    "doctor": ("model", "data", "gateway", "engine", "rollout"),
}
"""Sections that --help lists, where not all: the others' flags are taken too, so that the words
given to `up` can be given again."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="openclaw-rl",
        description=_OVERVIEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"openclaw-rl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, words in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=words,
            description=words[0].upper() + words[1:] + ".",
            allow_abbrev=False,
            epilog="Settings come from --config, then the environment, then flags; later wins.",
        )
        command.add_argument("--config", metavar="FILE", help="TOML file with the settings below")
        add_flags(command, listed=_LOOKS_AT.get(name))
        if name == "status":
            command.add_argument("--json", action="store_true", help="print it as JSON")
            command.add_argument("--watch", action="store_true", help="print it anew every 2 s")
        elif name == "connect":
            _add_connect_flags(command)
        elif name in _BROWSE:
            browse.add_arguments(name, command)
        if name == "replay":
            _add_replay_arguments(command)
        if name in _LOOPS:
            command.add_argument("--verbose", action="store_true", help="log more")
            command.add_argument(
                "--print-config",
                action="store_true",
                help="print all settings as TOML, each with where it comes from, and start nothing",
            )
            command.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)
    return parser


def _add_connect_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--yes", action="store_true", help="make the change, not only show it")
    command.add_argument("--undo", action="store_true", help="take the connection back")
    command.add_argument(
        "--keep-model", action="store_true", help="leave the agents' default model as it is"
    )
    command.add_argument("--url", help="the gateway's address (default: --host and --port)")
    command.add_argument("--openclaw-version", metavar="VERSION", help="default: found")


def _add_replay_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "path", nargs="*", type=Path, metavar="PATH",
        help="files or folders (OpenClaw's state folder is one); default: *.jsonl in --data",
    )  # fmt: skip
    command.add_argument("--dry-run", action="store_true", help="only count, write nothing")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status (2: misconfigured)."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = build_parser().parse_args(words)
    try:
        config = _config_of(options)
        if options.command == "status":
            return _status(config, options.json, options.watch)
        if options.command == "doctor":
            return _doctor(config, port_given=options.__dict__["gateway.port"] is not None)
        if options.command == "connect":
            return _connect(config, options)
        if options.command in _BROWSE:
            return browse.run(options, config.journal_path)
        _log_to_stderr(options.verbose)
        if options.supervised:
            stop_with_parent()
        if options.print_config:
            print(render_config(config))
            return 0
        if options.command == "replay":
            return _replay(config, options)
        run: dict[str, Callable[[Config, bool], int]] = {
            "up": _up,
            "serve": _serve,
            "judge": _judge,
            "train": _train,
        }
        return run[options.command](config, options.supervised)
    except OpenClawRLError as error:
        print(f"openclaw-rl: {error}", file=sys.stderr)
        # A loop that failed while it ran (a full disk, a dead engine) is worth starting again.
        again = "--supervised" in words and not isinstance(error, ConfigError | HookError)
        return 1 if again else MISCONFIGURED
    except KeyboardInterrupt:
        return 130


def _config_of(options: argparse.Namespace) -> Config:
    """The configuration: the supervisor's as one line on standard input, or that of the sources."""
    if getattr(options, "supervised", False):
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


def _up(config: Config, _: bool) -> int:
    from openclaw_rl.status import progress_line

    preflight.check_model(config)
    preflight.check_data(config)
    preflight.check_engine_address(config)  # before what is there is asked what it is
    preflight.check_training(config)
    preflight.check_reward(config)
    preflight.check_reply_format(config)
    preflight.check_port(config.gateway.host, config.gateway.port, "--port")
    past = preflight.check_conversations(config)
    tree = config.model_dump_json()
    loops = [  # each asks those before it
        Loop(
            name,
            [sys.executable, "-m", "openclaw_rl.cli", name, "--supervised"],
            tree,
            once=name == "replay",
        )
        for name in ("train", "judge", "serve", *(["replay"] if past else []))
    ]
    if config.engine.command:
        loops.insert(0, leashed("engine", config.engine.command))
    elif not config.engine.url:
        preflight.check_port("127.0.0.1", config.engine.port, "--engine-port")

    def emit(line: str) -> None:
        print(line, flush=True)

    async def report() -> None:
        last = ""
        while True:
            await asyncio.sleep(5)
            line = await asyncio.to_thread(progress_line, config)
            if line and line != last:
                emit(f"[up] {line}")
                last = line

    if past:
        emit(f"[up] files of past conversations in the data folder, to learn from: {len(past)}")
    emit(
        f"[up] model {config.served_name} at http://{config.gateway.host}:{config.gateway.port}/v1"
        f" · method {config.train.method} · data {config.data.path}"
    )
    return asyncio.run(supervise(loops, emit, report))


def _serve(config: Config, supervised: bool) -> int:
    from openclaw_rl.gateway.app import run
    from openclaw_rl.upkeep import keep_up

    preflight.check_model(config)
    preflight.check_data(config)
    preflight.check_reply_format(config)
    preflight.check_port(config.gateway.host, config.gateway.port, "--port")
    # An engine with our adapters is announced by the trainer once the first is loaded.
    if supervised or config.engine.kind != "auto":
        engine = config.engine.model_copy(update={"url": ""})
        config = config.model_copy(update={"engine": engine})

    async def serve() -> None:
        tidying = asyncio.create_task(keep_up(config))
        try:
            await run(config)
        finally:
            tidying.cancel()

    asyncio.run(serve())
    return 0


def _judge(config: Config, _: bool) -> int:
    from openclaw_rl.judge.worker import run_judge

    preflight.check_model(config)
    preflight.check_data(config)
    preflight.check_reward(config)
    asyncio.run(run_judge(hook_args(config)))
    return 0


def _train(config: Config, _: bool) -> int:
    preflight.check_model(config)
    preflight.check_data(config)
    preflight.check_training(config)
    if not config.engine.url:
        preflight.check_port("127.0.0.1", config.engine.port, "--engine-port")
    from openclaw_rl.local.host import run_host

    run_host(hook_args(config))
    return 0


def _status(config: Config, as_json: bool, watch: bool) -> int:
    from openclaw_rl.status import probe, read_status, render_status

    while True:
        status = read_status(config)
        probe(status)
        print(json.dumps(status, indent=2) if as_json else render_status(status), flush=True)
        if not watch:
            return 0
        time.sleep(2)
        if not as_json:
            print()


def _doctor(config: Config, *, port_given: bool) -> int:
    from openclaw_rl.doctor import at_published_port, examine

    if not port_given and not os.environ.get("PORT"):
        config = at_published_port(config)
    failed = False
    for finding in examine(config, os.environ):
        print(finding, flush=True)
        failed |= finding.level == "fail"
    return 1 if failed else 0


def _connect(config: Config, options: argparse.Namespace) -> int:
    from openclaw_rl.doctor import served_at, window
    from openclaw_rl.openclaw.connect import OpenClaw, plan_connect, plan_undo

    notes: list[str] = []
    openclaw = OpenClaw.find(os.environ, options.openclaw_version)
    if options.undo:
        change = plan_undo(openclaw)
    else:
        url = options.url or config.gateway.url
        served = served_at(url, config)
        change = plan_connect(openclaw, served, default=not options.keep_model)
        notes = [f"note     {found.words}" for found in window(openclaw, served)]
    if change.empty:
        print("nothing to change")
        return 0
    print("\n".join([change.shown(), *notes]))
    if not options.yes:
        print("nothing was changed; add --yes to do it")
        return 0
    change.apply()
    done = "disconnected" if options.undo else "connected"
    print(f"{done}; if OpenClaw's gateway runs: openclaw gateway restart")
    return 0


def _replay(config: Config, options: argparse.Namespace) -> int:
    from openclaw_rl.replay.files import find, in_data
    from openclaw_rl.replay.run import new_files, replay
    from openclaw_rl.replay.turns import Reader

    preflight.check_model(config)
    preflight.check_reply_format(config)
    if not options.dry_run:
        preflight.check_data(config)
    paths = [path.expanduser() for path in options.path]
    folder = Path(config.data.path).expanduser()
    if options.supervised and not paths:
        paths = new_files(folder, config.journal_path)
    else:
        paths = paths or in_data(folder)
    if not any(map(find, paths)):
        print(f"no new conversations in {folder}")
        return 0
    gateway = config.gateway
    reader = Reader.open(
        config.model.path, config.served_name, gateway.reply_format, gateway.context_length or None
    )
    done = replay(
        paths,
        reader,
        config.journal_path,
        time.time(),
        dry_run=options.dry_run,
        emit=lambda line: print(line, flush=True),
    )
    print(f"{done.files} files, {done.conversations} conversations: "
          f"{done.describe(options.dry_run)}")  # fmt: skip
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] in (["status"], ["inspect"], ["export"]):
        # Ends quietly in `status | head`. Never in a server: a client that hangs up would kill it.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
