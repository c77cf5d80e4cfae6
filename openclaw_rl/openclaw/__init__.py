"""Joining an installed OpenClaw to the gateway, and reading its sessions. See README.md."""
