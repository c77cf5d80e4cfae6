"""Joining an installed OpenClaw: its configuration entry, and a copy of our plugin.

Guarantees: nothing is written before `Change.apply`; touched are the provider entry `openclaw-rl`,
the plugin's entry and path, and the default model, nothing else; the configuration as it was before
the first connection is kept beside it, byte for byte; the new one replaces the old in one step and
keeps its mode; what is shown contains no key, and no text of other entries at all.
"""

from __future__ import annotations

import contextlib
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
        raw, config = _read(config_path)
        written = get(config, "meta", "lastTouchedVersion")
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
        return get(self.config, "models", "providers", PROVIDER) is not None

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
    files to install by name, none: the folder goes."""

    openclaw: OpenClaw
    raw: bytes
    config: dict[str, Any]
    plugin: Mapping[str, bytes]

    @property
    def empty(self) -> bool:
        """Whether everything is as it should be already."""
        return self.raw == self.openclaw.raw and self.plugin == _files(self.openclaw.plugin_dir)

    def shown(self) -> str:
        """The change for people: what becomes another value, without secrets."""
        openclaw, lines = self.openclaw, []
        if openclaw.raw != self.raw:
            lines.append(str(openclaw.config_path))
        old, new = _leaves(openclaw.config), _leaves(self.config)
        for path in dict.fromkeys((*old, *new)):
            for sign, side, other in (("-", old, new), ("+", new, old)):
                if path in side and side[path] != other.get(path):
                    value = side[path]
                    hidden = isinstance(value, str) and _SECRET.search(path)
                    lines.append(f"{sign} {path}: {'•••' if hidden else json.dumps(value)}")
        if openclaw.raw and self.plugin and not openclaw.connected:
            lines.append("Comments in it go, as they do when OpenClaw itself writes the file; as "
                         f"it is now it stays in {openclaw.backup_path}")  # fmt: skip
        if self.plugin != _files(openclaw.plugin_dir):
            done = f"is written ({', '.join(self.plugin)})" if self.plugin else "is removed"
            lines.append(f"plugin   {openclaw.plugin_dir} {done}")
        return "\n".join(lines)

    def apply(self) -> None:
        """Do it: backup, plugin, configuration, in this order. Raises `ConfigError`."""
        openclaw, folder = self.openclaw, self.openclaw.plugin_dir
        path = openclaw.config_path.resolve()
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.plugin:
                if not openclaw.connected:
                    _write(openclaw.backup_path, openclaw.raw, 0o600)
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True, mode=0o700)
                for name, content in self.plugin.items():
                    (folder / name).write_bytes(content)
            if self.raw != openclaw.raw:
                _write(path, self.raw, path.stat().st_mode & 0o777 if path.exists() else 0o600)
            if not self.plugin:
                shutil.rmtree(folder.parent, ignore_errors=True)
        except OSError as error:
            raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error


def plan_connect(openclaw: OpenClaw, served: Served, *, default: bool = True) -> Change:
    """Connect, or bring an older connection up to date. `default`: our model becomes the agents'
    default. Raises `ConfigError` where the configuration rules our plugin out."""
    plugins = get(openclaw.config, "plugins")
    if get(plugins, "enabled") is False:
        raise ConfigError("plugins.enabled is false: switch plugins on first")
    if PROVIDER in _list(plugins, "deny"):
        raise ConfigError(f"plugins.deny names {PROVIDER}: take it out first")
    # Without usage OpenClaw never compacts, and 2026.3.23 asks unknown servers for none.
    compat = {"supportsUsageInStreaming": True}
    plugin: dict[str, Any] = {"enabled": True, "hooks": None}
    if openclaw.release >= _SINCE_AFFINITY:
        compat |= {"sendSessionAffinityHeaders": True}
        plugin["hooks"] = {"allowConversationAccess": True}
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
    provider = {
        "baseUrl": served.base_url,
        "apiKey": served.api_key or _NO_KEY,
        "api": "openai-completions",
        "models": [model],
    }
    patch = _entries(openclaw, provider, plugin)
    if default:
        patch |= _default_model(openclaw.config, f"{PROVIDER}/{served.model}")
    return _change(openclaw, merge(openclaw.config, patch), _plugin_files())


def plan_undo(openclaw: OpenClaw) -> Change:
    """Take out what is ours, and give the default model its old value. Changes that others made
    meanwhile stay; where there are none, the file is byte for byte what it was."""
    if PROVIDER.encode() not in openclaw.raw:
        return Change(openclaw, openclaw.raw, openclaw.config, {})
    old, before = _read(openclaw.backup_path)
    patch = _entries(openclaw, None, None)
    # A backup may name our model already: its provider was gone, the default stayed.
    was = None if _is_ours(default_model(before)) else default_model(before)
    if _is_ours(default_model(openclaw.config)):
        patch |= _default_model(openclaw.config, was)
    config = merge(openclaw.config, patch)
    if old.strip() and was == default_model(before) and config == merge(before, patch):
        return Change(openclaw, old, before, {})
    return _change(openclaw, config, {})


def _entries(openclaw: OpenClaw, provider: Any, plugin: Any) -> dict[str, Any]:
    """The merge patch that sets our entries, or takes them out where they are None."""
    plugins = get(openclaw.config, "plugins")

    def changed(own: str, *path: str) -> list[Any] | None:
        others = _list(plugins, *path)
        if plugin:
            return list(dict.fromkeys([*others, own]))
        return [one for one in others if one != own] or None

    paths = changed(str(openclaw.plugin_dir), "load", "paths")
    patch: dict[str, Any] = {"entries": {PROVIDER: plugin}, "load": {"paths": paths}}
    if _list(plugins, "allow"):  # such a list is exclusive; none is made where there is none
        patch["allow"] = changed(PROVIDER, "allow")
    return {"models": {"providers": {PROVIDER: provider}}, "plugins": patch}


def default_model(config: Any) -> Any:
    """The model that agents have by default, which stands there in one of two ways."""
    model = get(config, "agents", "defaults", "model")
    return model if isinstance(model, str) else get(model, "primary")


def get(value: Any, *path: str) -> Any:
    """The value at `path` in plain values; None where there is none."""
    for name in path:
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    return value


def merge(value: Any, patch: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """`value` with a JSON merge patch (RFC 7396): objects are merged, null removes, all else
    replaces. An object that is empty then goes as well. Raises `ConfigError` where what has to be
    an object is none."""
    if not isinstance(value, dict | None):
        raise ConfigError(f"{where} is not an object")
    merged = dict(value or {})
    for key, new in patch.items():
        if isinstance(new, dict):
            new = merge(merged.get(key), new, f"{where}.{key}".lstrip(".")) or None
        if new is None:
            merged.pop(key, None)
        else:
            merged[key] = new
    return merged


def _default_model(config: Any, model: str | None) -> dict[str, Any]:
    """The patch that makes `model` the default, in the way in which it stands there."""
    plain = isinstance(get(config, "agents", "defaults", "model"), str)
    return {"agents": {"defaults": {"model": model if plain else {"primary": model}}}}


def _is_ours(model: Any) -> bool:
    return str(model).startswith(f"{PROVIDER}/")


def _change(openclaw: OpenClaw, config: dict[str, Any], plugin: Mapping[str, bytes]) -> Change:
    raw = openclaw.raw
    if config != openclaw.config:
        raw = json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
    return Change(openclaw, raw, config, plugin)


def _list(value: Any, *path: str) -> list[Any]:
    found = get(value, *path)
    return found if isinstance(found, list) else []


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


def _read(path: Path) -> tuple[bytes, dict[str, Any]]:
    """A JSON5 file and the object that it holds; one that is empty or not there holds none.
    Errors never quote it."""
    try:
        raw = path.read_bytes() if path.exists() else b""
        config = json5.loads(raw.decode("utf-8-sig")) if raw.strip() else {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {type(error).__name__}") from error
    except (ValueError, RecursionError) as error:
        place = re.match(r"<string>:(\d+) ", str(error))
        line = f": line {place[1]}" if place else ""
        raise ConfigError(f"{path} is not JSON5{line}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: the whole must be an object")
    return raw, config


def _installed(environ: Mapping[str, str]) -> str | None:
    """The version of the `openclaw` on the PATH, from the package that it belongs to."""
    command = shutil.which("openclaw", path=environ.get("PATH", ""))
    for folder in Path(command).resolve().parents[:3] if command else ():
        with contextlib.suppress(OSError, ValueError):
            package = json.loads((folder / "package.json").read_text("utf-8"))
            if get(package, "name") == "openclaw":
                return str(get(package, "version"))
    return None


def _plugin_files() -> Mapping[str, bytes]:
    """The plugin that came with us: in a checkout, or as the package installed it."""
    beside = Path(openclaw_rl.__file__).resolve().parents[1] / "plugins" / "openclaw"
    shared = Path(sysconfig.get_path("data")) / "share" / "openclaw-rl" / "plugins" / "openclaw"
    for folder in (beside, shared):
        files = _files(folder)
        if "openclaw.plugin.json" in files:
            return files
    raise ConfigError("the OpenClaw plugin did not come with this installation: reinstall it")


def _files(folder: Path) -> dict[str, bytes]:
    """The files of a plugin by name; none where there is no such folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.js*"))}


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace `path` in one step."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)
    os.replace(new, path)
