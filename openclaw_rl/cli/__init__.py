"""The command line: `openclaw-rl COMMAND`, one module a command.

This module imports nothing, so that the guard of a child process (`cli.guard_child`) stays small.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status (2: misconfigured)."""
    from openclaw_rl.cli.commands import run

    return run(argv)
