"""The quickstart's command line, and what of the caller's environment reaches the system."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from openclaw_rl.config import METHODS, settings

VARIABLES = ("METHOD", "UPDATES", "EVERY", "SEED")
"""Each of these environment variables is the default of the flag of its name."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"quickstart: {message}\n")


def _at_least(low: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} on")
        return int(text)

    return number


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """Parse the command line; a mistake is one line and exit status 2."""
    parser = _Parser(prog="make quickstart", description=__doc__)
    parser.add_argument("--method", choices=tuple(METHODS), default="combined")
    parser.add_argument(
        "--users",
        type=_at_least(1),
        default=1,
        help="one person, who comes back when what was said is learnt; or so many at the same "
        "time, who never wait",
    )
    parser.add_argument(
        "--updates",
        type=_at_least(1),
        help="weight updates of 16 turns each (default: 12, with several users 36)",
    )
    parser.add_argument(
        "--every",
        type=_at_least(1),
        help="ask the held-out questions every so many versions (default: 3, with several users 6)",
    )
    parser.add_argument(
        "--conversations",
        type=_at_least(1),
        default=40,
        help="one person ends after so many: who is content teaches nothing more",
    )
    parser.add_argument("--seed", type=_at_least(0), default=0)
    parser.add_argument(
        "--repeats", type=_at_least(1), default=2, help="times a held-out question is asked"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where the run is kept")
    parser.add_argument("--models", type=Path, default=Path("models"), help="where models are kept")
    parser.add_argument("--engine-url", help="a vLLM or SGLang that serves, in place of our engine")
    parser.add_argument("--engine", choices=("vllm", "sglang"), help="which, if it does not say")
    parser.add_argument(
        "--at-least", type=float, help="fail unless this share is satisfied at last"
    )
    parser.add_argument(
        "--shorter",
        action="store_true",
        help="fail unless replies to held-out questions became shorter",
    )
    given = [f"--{name.lower()}={environ[name]}" for name in VARIABLES if environ.get(name)]
    options = parser.parse_args([*given, *argv])
    updates, every = (12, 3) if options.users == 1 else (36, 6)
    options.updates = options.updates or updates
    options.every = options.every or every
    return options


def engine_flags(options: argparse.Namespace) -> tuple[str, ...]:
    """Flags for an engine outside."""
    if not options.engine_url:
        return ()
    kind = ("--engine", options.engine) if options.engine else ()
    return ("--engine-url", options.engine_url, *kind)


def without_settings(environ: Mapping[str, str], keep: Collection[str] = ()) -> dict[str, str]:
    """Return `environ` less every variable that is a setting of openclaw-rl and not in `keep`.

    The recipe alone says how the quickstart runs, whatever the caller has exported.
    """
    declared = {setting.env for setting in settings()}
    return {key: value for key, value in environ.items() if key in keep or key not in declared}


def shown(path: Path) -> str:
    """Return `path` as seen from where the caller is, or in full where it lies elsewhere."""
    full = path.expanduser().absolute()
    here = Path.cwd()
    return str(full.relative_to(here) if full.is_relative_to(here) else full)
