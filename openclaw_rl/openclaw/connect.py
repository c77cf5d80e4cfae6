"""Joining an installed OpenClaw: its configuration entry, and a copy of our plugin.

Guarantees: nothing is written before `Change.apply`; touched are the provider entry `openclaw-rl`,
the plugin's entry and path, and the default model, nothing else; the configuration as it was before
the first connection is kept beside it, byte for byte; the new one replaces the old in one step and
keeps its mode; what is shown contains no key, and no text of other entries at all.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import json5

import openclaw_rl
from openclaw_rl.errors import ConfigError

PROVIDER = "openclaw-rl"
"""Id of provider and plugin."""

TRIED = ("2026.3.23-2", "2026.9.6")
"""Versions that our tests ran with."""

_NO_KEY = "none"
"""OpenClaw wants some key even where the gateway wants none."""

_SINCE_AFFINITY = (2026, 9, 0)
"""From here on OpenClaw itself can name the session in headers, and lets a plugin see runs only
with a grant. Older versions refuse a configuration with keys that they do not know."""

Keys = tuple[str, ...]

_ENTRY: Keys = ("models", "providers", PROVIDER)
_PLUGIN: Keys = ("plugins", "entries", PROVIDER)
_PATHS: Keys = ("plugins", "load", "paths")
_ALLOW: Keys = ("plugins", "allow")
_MODEL: Keys = ("agents", "defaults", "model")

_SECRET = re.compile(r"key|token|secret|pass|auth|cookie|credential|headers", re.I)
"""Names of what is not shown even of our own entry: a person may have added to it."""


@dataclass(frozen=True, slots=True)
class OpenClaw:
    """An installation. `raw` is its configuration as it stands (empty where there is none yet),
    `config` what it says, `version` what is installed or, failing that, what wrote it."""

    state_dir: Path
    config_path: Path
    raw: bytes
    config: dict[str, Any]
    version: str | None

    @classmethod
    def find(cls, environ: Mapping[str, str], version: str | None = None) -> OpenClaw:
        """The installation that `environ` points to. Raises `ConfigError`."""

        def given(name: str) -> str:
            return environ.get(name, "").strip()

        def expand(path: str) -> Path:
            return Path(re.sub(r"^~(?=$|/)", lambda _: home, path)).absolute()

        home = given("HOME") or str(Path.home())
        home = str(expand(given("OPENCLAW_HOME") or home))
        state_dir = expand(given("OPENCLAW_STATE_DIR") or f"{home}/.openclaw")
        config_path = expand(given("OPENCLAW_CONFIG_PATH") or f"{state_dir}/openclaw.json")
        raw = _read_bytes(config_path) if config_path.exists() else b""
        config = _parse(raw, config_path)
        written = get(config, ("meta", "lastTouchedVersion"))
        found = version or _installed(environ) or (written if isinstance(written, str) else None)
        return cls(state_dir, config_path, raw, config, found)

    @property
    def release(self) -> tuple[int, int, int]:
        """Year, month, day of the version. Raises `ConfigError` where it is not known."""
        match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", self.version or "")
        if match is None:
            raise ConfigError(
                "cannot tell OpenClaw's version (no `openclaw` on the PATH, and its configuration "
                f"does not say): give --openclaw-version, such as {TRIED[-1]}"
            )
        year, month, day = map(int, match.groups())
        return year, month, day

    @property
    def connected(self) -> bool:
        """Whether the configuration has our provider entry."""
        return get(self.config, _ENTRY) is not None

    @property
    def plugin_dir(self) -> Path:
        """Where the plugin is installed: a copy, so that OpenClaw starts without our checkout."""
        return self.state_dir / "openclaw-rl" / "plugin"

    @property
    def backup_path(self) -> Path:
        """The configuration as it was before the first connection."""
        return self.config_path.with_name(f"{self.config_path.name}.before-openclaw-rl")


@dataclass(frozen=True, slots=True)
class Served:
    """What the gateway serves, and where: tokens of context, the longest reply."""

    base_url: str
    model: str
    context_length: int
    max_tokens: int
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Change:
    """What would be done. `raw` is the new configuration, `config` what it says; `plugin` are the
    files to install by name, None: the folder goes."""

    openclaw: OpenClaw
    raw: bytes
    config: dict[str, Any]
    plugin: Mapping[str, bytes] | None

    @property
    def empty(self) -> bool:
        """Whether everything is as it should be already."""
        return self.raw == self.openclaw.raw and self.plugin == _files(self.openclaw.plugin_dir)

    def shown(self) -> str:
        """The change for people: what becomes another value, without secrets."""
        lines = []
        old, new = _leaves(self.openclaw.config), _leaves(self.config)
        for path in dict.fromkeys((*old, *new)):
            for sign, side, other in (("-", old, new), ("+", new, old)):
                if path in side and side[path] != other.get(path):
                    value = side[path]
                    hidden = isinstance(value, str) and _SECRET.search(path)
                    lines.append(f"{sign} {path}: {'•••' if hidden else json.dumps(value)}")
        if self.openclaw.raw != self.raw:
            lines.insert(0, str(self.openclaw.config_path))
            if not _is_json(self.openclaw.raw or b"{}"):
                lines.append(
                    "Comments in it go, as they do when OpenClaw itself writes the file. As it was "
                    f"before the first connection it stays in {self.openclaw.backup_path}"
                )
        folder = self.openclaw.plugin_dir
        if self.plugin is None and folder.exists():
            lines.append(f"plugin   {folder} is removed")
        elif self.plugin is not None and self.plugin != _files(folder):
            lines.append(f"plugin   {folder} is written ({', '.join(sorted(self.plugin))})")
        return "\n".join(lines)

    def apply(self) -> None:
        """Do it: backup, plugin, configuration, in this order. Raises `ConfigError`."""
        openclaw, folder = self.openclaw, self.openclaw.plugin_dir
        path = openclaw.config_path.resolve()
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.plugin is not None:
                if not openclaw.connected:
                    _write(openclaw.backup_path, openclaw.raw, 0o600)
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                for name in (_files(folder) or {}).keys() - self.plugin.keys():
                    (folder / name).unlink()
                for name, content in self.plugin.items():
                    _write(folder / name, content, 0o600)
            if self.raw != openclaw.raw:
                _write(path, self.raw, path.stat().st_mode & 0o777 if path.exists() else 0o600)
            if self.plugin is None:
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):
                    folder.parent.rmdir()
        except OSError as error:
            raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error


def plan_connect(openclaw: OpenClaw, served: Served, *, default: bool = True) -> Change:
    """Connect, or bring an older connection up to date. `default`: our model becomes the agents'
    default. Raises `ConfigError` where the configuration rules our plugin out."""
    config, folder = copy.deepcopy(openclaw.config), str(openclaw.plugin_dir)
    if get(config, ("plugins", "enabled")) is False:
        raise ConfigError("plugins.enabled is false: switch plugins on first")
    if PROVIDER in _list(config, ("plugins", "deny")):
        raise ConfigError(f"plugins.deny names {PROVIDER}: take it out first")
    _set(config, _ENTRY, _provider_entry(served, openclaw.release))
    grant = {"hooks": {"allowConversationAccess": True}}
    modern = openclaw.release >= _SINCE_AFFINITY
    _set(config, _PLUGIN, {"enabled": True, **(grant if modern else {})})
    if default:
        plain = isinstance(get(config, _MODEL), str)
        path = _MODEL if plain else (*_MODEL, "primary")
        _set(config, path, f"{PROVIDER}/{served.model}")
    paths, allowed = _list(config, _PATHS), _list(config, _ALLOW)
    if folder not in paths:
        _set(config, _PATHS, [*paths, folder])
    if allowed and PROVIDER not in allowed:  # a list is exclusive; none is made where there is none
        _set(config, _ALLOW, [*allowed, PROVIDER])
    return _change(openclaw, config, _plugin_files())


def plan_undo(openclaw: OpenClaw) -> Change:
    """Take out what is ours, and give the default model its old value. Changes that others made
    meanwhile stay; where there are none, the file is byte for byte what it was."""
    backup = openclaw.backup_path
    old = _read_bytes(backup) if backup.exists() else b""
    config, before = copy.deepcopy(openclaw.config), _parse(old, backup)
    if not openclaw.raw.strip():
        return _change(openclaw, config, None)
    for path in (_ENTRY, _PLUGIN):
        _remove(config, path, before)
    for path, ours in ((_PATHS, str(openclaw.plugin_dir)), (_ALLOW, PROVIDER)):
        if ours in _list(config, path) and ours not in _list(before, path):
            _set(config, path, [one for one in _list(config, path) if one != ours])
            if get(config, path) == [] and get(before, path) is None:
                _remove(config, path, before)
    path = _MODEL if isinstance(get(config, _MODEL), str) else (*_MODEL, "primary")
    if str(get(config, path)).startswith(f"{PROVIDER}/"):
        model = get(before, path)
        # A backup that names our model already (its provider was gone, the default stayed): no
        # entry would be left for it.
        if model is not None and not str(model).startswith(f"{PROVIDER}/"):
            _set(config, path, model)
        else:
            _remove(config, path, before)
    change = _change(openclaw, config, None)
    if old.strip() and config == before and config != openclaw.config:
        return Change(openclaw, old, config, None)
    return change


def get(value: Any, path: Keys) -> Any:
    """The value at `path` in plain values; None where there is none."""
    for name in path:
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    return value


def _provider_entry(served: Served, release: tuple[int, int, int]) -> dict[str, Any]:
    # Without usage OpenClaw never compacts, and 2026.3.23 asks unknown servers for none.
    compat: dict[str, Any] = {"supportsUsageInStreaming": True}
    if release >= _SINCE_AFFINITY:
        compat["sendSessionAffinityHeaders"] = True
    model = {
        "id": served.model,
        "name": f"{served.model} (openclaw-rl)",
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": served.context_length,
        "maxTokens": served.max_tokens,
        "compat": compat,
    }
    return {
        "baseUrl": served.base_url,
        "apiKey": served.api_key or _NO_KEY,
        "api": "openai-completions",
        "models": [model],
    }


def _change(
    openclaw: OpenClaw, config: dict[str, Any], plugin: Mapping[str, bytes] | None
) -> Change:
    raw = openclaw.raw
    if config != openclaw.config:
        raw = json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
    return Change(openclaw, raw, config, plugin)


# -- values --------------------------------------------------------------------------------------


def _list(config: Any, path: Keys) -> list[Any]:
    value = get(config, path)
    return value if isinstance(value, list) else []


def _set(config: dict[str, Any], path: Keys, value: Any) -> None:
    for depth, name in enumerate(path[:-1], 1):
        config = config.setdefault(name, {})
        if not isinstance(config, dict):
            raise ConfigError(f"{'.'.join(path[:depth])} is not an object")
    config[path[-1]] = value


def _remove(config: Any, path: Keys, before: Any) -> None:
    """Remove what is at `path`, and the objects around it that are empty then and were not there
    `before`."""
    while path:
        around = get(config, path[:-1])
        if isinstance(around, dict):
            around.pop(path[-1], None)
        path = path[:-1]
        if get(config, path) != {} or get(before, path) is not None:
            return


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """All that is no object and no list, by its path."""
    if isinstance(value, dict):
        parts = [(f"{path}.{key}".lstrip("."), one) for key, one in value.items()]
    elif isinstance(value, list):
        parts = [(f"{path}[{index}]", one) for index, one in enumerate(value)]
    else:
        return {path: value}
    return {name: leaf for at, one in parts for name, leaf in _leaves(one, at).items()}


# -- files ---------------------------------------------------------------------------------------


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {type(error).__name__}") from error


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return True


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    """The object that a JSON5 file holds; an empty file holds none. Errors never quote it."""
    if not raw.strip():
        return {}
    try:
        config = json.loads(raw) if _is_json(raw) else json5.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: it is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        place = re.match(r"<string>:(\d+) ", str(error))
        line = f": line {place[1]}" if place else ""
        raise ConfigError(f"{path} is not JSON5{line}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: the whole must be an object")
    return config


def _installed(environ: Mapping[str, str]) -> str | None:
    """The version of the `openclaw` on the PATH, from the package that it belongs to."""
    command = shutil.which("openclaw", path=environ.get("PATH", ""))
    for folder in Path(command).resolve().parents[:3] if command else ():
        with contextlib.suppress(OSError, ValueError):
            package = json.loads((folder / "package.json").read_text("utf-8"))
            if get(package, ("name",)) == "openclaw":
                version = get(package, ("version",))
                return version if isinstance(version, str) else None
    return None


def _plugin_files() -> Mapping[str, bytes]:
    """The plugin that came with us: in a checkout, or as the package installed it."""
    beside = Path(openclaw_rl.__file__).resolve().parents[1] / "plugins" / "openclaw"
    shared = Path(sysconfig.get_path("data")) / "share" / "openclaw-rl" / "plugins" / "openclaw"
    for folder in (beside, shared):
        files = _files(folder)
        if files and "openclaw.plugin.json" in files:
            return files
    raise ConfigError("the OpenClaw plugin did not come with this installation: reinstall it")


def _files(folder: Path) -> dict[str, bytes] | None:
    """The files of a plugin by name; None where there is no such folder."""
    if not folder.is_dir():
        return None
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.suffix in (".js", ".json") and path.is_file()
    }


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace `path` in one step."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)
    os.replace(new, path)
