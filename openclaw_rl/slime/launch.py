"""`python -m openclaw_rl.slime.launch [settings] -- [flags of slime's train script]`

Checks everything that can be checked without a GPU, divides the GPUs, computes the model's
arguments from its config.json, writes slime's --sglang-config and --custom-config-path, and becomes
slime's train_async.py. The run_*.sh scripts call it; all after `--` goes to slime as it is and wins
over what is computed. --dry-run on shows all of it and starts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from openclaw_rl.config import Config, SlimeConfig, add_flags, environment, load_config
from openclaw_rl.errors import MISCONFIGURED, ConfigError, OpenClawRLError
from openclaw_rl.slime.plan import Plan, is_used, make_plan


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
    """Check, write and become the train script; return `MISCONFIGURED` where something is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    options = build_parser().parse_args(words[:cut])
    environ = environment()
    try:
        config = load_config(vars(options), environ)
        plan = make_plan(config, words[cut + 1 :], environ, python=sys.executable)
        private = Path(config.data.path) / "slime" / "runtime_env.json"
        command, added = on_ray(config.slime, plan, private)
        if config.slime.dry_run:
            print(render(plan, command, private))
            return 0
        check_machine(config, command)
        write({**plan.files, private: json.dumps(plan.runtime_env, indent=1)})
        for line in plan.layout.picture():
            print(f"[openclaw-rl] {line}", flush=True)
        os.execvpe(command[0], command, {**environ, **plan.variables, **added})
    except OpenClawRLError as error:
        print(f"openclaw-rl: {error}", file=sys.stderr)
        return MISCONFIGURED


def on_ray(slime: SlimeConfig, plan: Plan, private: Path) -> tuple[list[str], dict[str, str]]:
    """The command that runs the training on the Ray that `slime.ray_address` names, and what it
    needs in its environment. `private` is the file with the environment of the job.

    Without an address the train script starts a Ray of its own, which ends with it.
    """
    address = slime.ray_address
    if address.startswith(("http://", "https://")):
        submit = ["ray", "job", "submit", "--address", address, "--runtime-env", str(private), "--"]
        return [*submit, *plan.train], {}
    if not address:
        if slime.num_nodes > 1:
            raise ConfigError(
                f"NUM_NODES={slime.num_nodes} needs a Ray over all machines: `ray start --head` on "
                "this one, `ray start --address THIS_MACHINE:6379` on the others, then "
                "RAY_ADDRESS=auto"
            )
        return plan.train, {"RAY_ADDRESS": "local"}
    # What Ray's own job server does for a driver that it starts.
    job = json.dumps({"runtime_env": plan.runtime_env})
    return plan.train, {"RAY_ADDRESS": address, "RAY_JOB_CONFIG_JSON_ENV_VAR": job}


def check_machine(config: Config, command: Sequence[str]) -> None:
    """The command must be there; so must this machine's GPUs, where no Ray counts them."""
    if shutil.which(command[0]) is None:
        raise ConfigError(f"no {command[0]} command: pip install 'ray[default]'")
    slime = config.slime
    if slime.ray_address or slime.train_script or shutil.which("nvidia-smi") is None:
        return
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    if listed.returncode == 0 and count < slime.num_gpus:
        raise ConfigError(
            f"NUM_GPUS={slime.num_gpus}, but nvidia-smi lists {count} on this machine"
        )


def write(files: Mapping[Path, str]) -> None:
    """Write the files of a launch, readable by their owner only. Raises `ConfigError`."""
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.fchmod(descriptor, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(content)
    except OSError as error:
        raise ConfigError(f"DATA_PATH: cannot write {error.filename}: {error.strerror}") from error


def render(plan: Plan, command: Sequence[str], private: Path) -> str:
    """All of a launch as text, without secrets."""
    lines = [f"# {line}" for line in plan.layout.picture()]
    for path, content in plan.files.items():
        lines += ["", f"# file {path}", content.rstrip()]
    lines += ["", f"# environment of the job (file {private})"]
    lines += [f"# {name}={shlex.quote(value)}" for name, value in plan.variables.items()]
    lines += [f"# {name} is given, and not shown" for name in plan.secrets]
    flags: list[list[str]] = [[]]
    for word in command:  # one flag with its values a line
        if flags[-1] and (word.startswith("--") or flags[-1][-1] == "--"):
            flags.append([])
        flags[-1].append(word)
    return "\n".join([*lines, "", " \\\n   ".join(shlex.join(line) for line in flags)])


if __name__ == "__main__":
    sys.exit(main())
