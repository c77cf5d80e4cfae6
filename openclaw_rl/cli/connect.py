"""Let OpenClaw talk to the gateway: its provider entry and our plugin."""

from __future__ import annotations

import argparse
import os

from openclaw_rl.cli.doctor import window
from openclaw_rl.config import Config
from openclaw_rl.errors import ConfigError
from openclaw_rl.openclaw.connect import OpenClaw, Served, plan_connect, plan_undo
from openclaw_rl.openclaw.gateway import GatewayClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that are no settings."""
    parser.add_argument("--yes", action="store_true", help="make the change, not only show it")
    parser.add_argument("--undo", action="store_true", help="undo the connection")
    parser.add_argument(
        "--keep-model", action="store_true", help="leave the agents' default model as it is"
    )
    parser.add_argument("--url", help="the gateway's address (default: --host and --port)")
    parser.add_argument("--openclaw-version", metavar="VERSION", help="default: found")


def run(config: Config, options: argparse.Namespace) -> int:
    """Show the change, and make it where --yes asks for it. Raises `ConfigError`."""
    openclaw = OpenClaw.find(os.environ, options.openclaw_version)
    notes: list[str] = []
    if options.undo:
        change = plan_undo(openclaw)
    else:
        served = served_at(options.url or config.gateway.url, config)
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


def served_at(url: str, config: Config) -> Served:
    """What the gateway at `url` serves; where none answers, what the settings say of it.

    Raises `ConfigError` where neither tells the model and its context.
    """
    url = url.rstrip("/").removesuffix("/v1")
    gateway, model = config.gateway, config.model
    if served := GatewayClient(url, gateway.api_key).served():
        return served
    if not gateway.context_length or not (model.served_name or model.path):
        raise ConfigError(
            f"no openclaw-rl gateway answers at {url} with this key: start it (openclaw-rl up), "
            "set OPENCLAW_RL_API_KEY to its key, or give --served-name and --context-length"
        )
    longest = min(gateway.max_tokens, gateway.context_length)
    return Served(f"{url}/v1", config.served_name, gateway.context_length, longest, gateway.api_key)
