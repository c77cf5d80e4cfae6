"""Where OpenClaw is on this machine: its state folder, its configuration, its version.

The environment is an argument. Reads files, changes none.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclaw_rl.errors import ConfigError
from openclaw_rl.openclaw.json5 import get, parse

TRIED = ("2026.3.23-2", "2026.9.6")
"""Versions that our tests ran with."""

_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class OpenClaw:
    """An installation. `text` is its configuration as it stands ("" where there is none yet),
    `version` what is installed or, failing that, what wrote the configuration."""

    state_dir: Path
    config_path: Path
    text: str
    config: Any
    version: str | None

    @classmethod
    def find(cls, environ: Mapping[str, str], version: str | None = None) -> OpenClaw:
        """The installation that `environ` points to. Raises `ConfigError`."""
        state_dir = _state_dir(environ)
        given = environ.get("OPENCLAW_CONFIG_PATH", "").strip()
        path = _expand(given, environ) if given else state_dir / "openclaw.json"
        text = ""
        if path.exists():
            try:
                text = path.read_bytes().decode("utf-8")  # line ends stay as they are
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"cannot read {path}: {type(error).__name__}") from error
        try:
            config = parse(text).value if text.strip() else {}
        except ConfigError as error:
            raise ConfigError(f"{path} is {error}") from None
        if not isinstance(config, dict):
            raise ConfigError(f"{path}: the whole must be an object")
        written = get(config, ("meta", "lastTouchedVersion"))
        found = version or _installed(environ) or (written if isinstance(written, str) else None)
        return cls(state_dir, path, text, config, found)

    @property
    def release(self) -> tuple[int, int, int]:
        """Year, month, day of the version. Raises `ConfigError` where it is not known."""
        match = _VERSION.match(self.version or "")
        if match is None:
            raise ConfigError(
                "cannot tell OpenClaw's version (no `openclaw` on the PATH, and its configuration "
                f"does not say): give --openclaw-version, such as {TRIED[-1]}"
            )
        year, month, day = map(int, match.groups())
        return year, month, day


def _home(environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME", "").strip() or str(Path.home())
    given = environ.get("OPENCLAW_HOME", "").strip()
    return Path(re.sub(r"^~(?=$|/)", lambda _: home, given) if given else home)


def _expand(path: str, environ: Mapping[str, str]) -> Path:
    home = str(_home(environ))
    return Path(re.sub(r"^~(?=$|/)", lambda _: home, path)).absolute()


def _state_dir(environ: Mapping[str, str]) -> Path:
    given = environ.get("OPENCLAW_STATE_DIR", "").strip()
    return _expand(given, environ) if given else _home(environ).absolute() / ".openclaw"


def _installed(environ: Mapping[str, str]) -> str | None:
    """The version of the `openclaw` on the PATH, from the package that it belongs to."""
    command = shutil.which("openclaw", path=environ.get("PATH", ""))
    if command is None:
        return None
    for folder in Path(command).resolve().parents[:3]:
        try:
            package = json.loads((folder / "package.json").read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(package, dict) and package.get("name") == "openclaw":
            version = package.get("version")
            return version if isinstance(version, str) else None
    return None
