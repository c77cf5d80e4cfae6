"""`python -m openclaw_rl.slime.launch [settings] -- flags of slime's train script`

Checks everything that can be checked without a GPU, divides the GPUs, computes the model's
arguments from its config.json, writes slime's --sglang-config and --custom-config-path, and runs
slime's train_async.py through Ray until it ends. The run_*.sh scripts call it; all after `--` goes
to slime as it is and wins over what is computed. --dry-run 1 shows all of it and starts nothing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from openclaw_rl.cli import checks
from openclaw_rl.cli.supervisor import MISCONFIGURED
from openclaw_rl.config import Config, add_flags, environment, load_config
from openclaw_rl.errors import ConfigError, OpenClawRLError
from openclaw_rl.slime import cluster
from openclaw_rl.slime.plan import Plan, is_used, make_plan, runtime_env


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all that stands before `--`."""
    parser = argparse.ArgumentParser(
        prog="python -m openclaw_rl.slime.launch",
        usage="%(prog)s [settings] -- [flags of slime's train script]",
        description=(__doc__ or "").partition("\n\n")[2],
        epilog="Settings come from the environment, then from flags; later wins.",
        allow_abbrev=False,
    )
    add_flags(parser, is_used)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status (2: misconfigured)."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    options = build_parser().parse_args(words[:cut])
    environ = environment()
    try:
        given = {key: value for key, value in vars(options).items() if "." in key}
        config = load_config(given, environ)
        plan = make_plan(config, words[cut + 1 :], environ, python=sys.executable)
        _check_past(config, words[cut + 1 :])
        home = Path(config.data.path) / "slime"
        private, job = home / "runtime_env.json", f"openclaw-rl-{time.strftime('%Y%m%d-%H%M%S')}"
        way = cluster.way(config.slime, plan.train, private, runtime_env(plan), job)
        if config.slime.dry_run:
            print(render(plan, way, private))
            return 0
        cluster.check_machine(config.slime, way)
        checks.check_data(config)
        write(home, {**plan.files, private: runtime_env(plan)})
        for line in plan.picture:
            print(f"[openclaw-rl] {line}")
        return cluster.run(way, environ, home / "ray.log", _emit, _join(config))
    except OpenClawRLError as error:
        print(f"openclaw-rl: {error}", file=sys.stderr)
        return MISCONFIGURED


def _check_past(config: Config, flags: Sequence[str]) -> None:
    """Past conversations must be readable, and nothing may need what nobody has sampled."""
    if not checks.check_conversations(config):
        return
    for flag in ("--use-tis", "--use-rollout-logprobs"):
        if flag in flags:
            raise ConfigError(
                f"{flag} needs the engine's log-probs, which the past conversations in DATA_PATH "
                "have none of: leave it out, or DATA_REPLAY=off"
            )


def _emit(line: str) -> None:
    print(f"[openclaw-rl] {line}", flush=True)


def _join(config: Config) -> str | None:
    slime = config.slime
    if slime.num_nodes == 1:
        return None
    return f"ray start --address {slime.master_addr}:{slime.ray_port} --num-gpus {slime.num_gpus}"


def write(home: Path, files: Mapping[Path, str]) -> None:
    """Write the files of a launch, readable by their owner only."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path, content in files.items():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.fchmod(descriptor, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(content)


def render(plan: Plan, way: cluster.Way, private: Path) -> str:
    """All of a launch as text, without secrets."""
    lines = [f"# {line}" for line in plan.picture]
    for path, content in plan.files.items():
        lines += ["", f"# file {path}", content.rstrip()]
    lines += ["", f"# environment of the job (file {private})"]
    lines += [f"# {name}={shlex.quote(value)}" for name, value in plan.variables.items()]
    lines += [f"# {name} is given, and not shown" for name in plan.secrets]
    for command in filter(None, (way.start, way.command)):
        lines += ["", as_shell(command)]
    return "\n".join(lines)


def as_shell(command: Sequence[str]) -> str:
    """`command` as a shell takes it, one flag with its values a line."""
    lines: list[list[str]] = [[]]
    for word in command:
        if lines[-1] and (word.startswith("--") or lines[-1][-1] == "--"):
            lines.append([])
        lines[-1].append(word)
    return " \\\n   ".join(shlex.join(line) for line in lines)


if __name__ == "__main__":
    sys.exit(main())
