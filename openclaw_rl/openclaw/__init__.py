"""Connects an installed OpenClaw to the gateway: its configuration entry and our plugin."""

from openclaw_rl.openclaw.change import PROVIDER, Served
from openclaw_rl.openclaw.install import Change, plan_connect, plan_undo
from openclaw_rl.openclaw.openclaw import OpenClaw

__all__ = ["PROVIDER", "Change", "OpenClaw", "Served", "plan_connect", "plan_undo"]
