"""Connecting and undoing, as a plan that is shown first and then done.

Guarantees: nothing is written before `Change.apply`; the configuration as it was before the first
connection is kept beside it (`openclaw.json.before-openclaw-rl`); the new one replaces the old in
one step and keeps its mode; what is shown contains no key, and no text of other entries at all.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import openclaw_rl
from openclaw_rl.errors import ConfigError
from openclaw_rl.openclaw import change
from openclaw_rl.openclaw.json5 import get, parse, strings
from openclaw_rl.openclaw.openclaw import OpenClaw

_SECRET = re.compile(r"key|token|secret|pass|auth|cookie|credential|headers", re.I)
"""Names of what is not shown even of our own entry: a person may have added to it."""
_COMMENT = re.compile(
    r"""(["']?\w*(?:key|token|secret|password|authorization)\w*["']?\s*:\s*)("[^"]*"|'[^']*')""",
    re.I,
)
_HIDDEN = '"•••"'


@dataclass(frozen=True, slots=True)
class Change:
    """What would be done. `plugin` are the files to install by name, None: the folder goes."""

    openclaw: OpenClaw
    text: str
    plugin: Mapping[str, bytes] | None
    keep_backup: bool

    @property
    def empty(self) -> bool:
        """Whether everything is as it should be already."""
        return self.text == self.openclaw.text and self.plugin == installed(self.openclaw)

    def shown(self) -> str:
        """The change for people: a diff without secrets, and what becomes of the plugin."""
        path = str(self.openclaw.config_path)
        lines = difflib.unified_diff(
            _masked(self.openclaw.text).splitlines(),
            _masked(self.text).splitlines(),
            path,
            path,
            lineterm="",
        )
        shown = list(lines)
        if self.openclaw.text != self.text and not shown:
            shown.append(f"{path}: another key")
        folder = plugin_dir(self.openclaw)
        if self.plugin is None and folder.exists():
            shown.append(f"plugin   {folder} is removed")
        elif self.plugin is not None and self.plugin != installed(self.openclaw):
            shown.append(f"plugin   {folder} is written ({', '.join(sorted(self.plugin))})")
        return "\n".join(shown)

    def apply(self) -> None:
        """Do it: backup, plugin, configuration, in this order. Raises `ConfigError`."""
        try:
            self.openclaw.config_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.keep_backup:
                _write(backup_path(self.openclaw), self.openclaw.text.encode(), 0o600)
            if self.plugin is not None:
                _install(plugin_dir(self.openclaw), self.plugin)
            path = self.openclaw.config_path.resolve()
            if self.text != self.openclaw.text:
                mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
                _write(path, self.text.encode(), mode)
            if self.plugin is None:
                shutil.rmtree(plugin_dir(self.openclaw), ignore_errors=True)
                with contextlib.suppress(OSError):
                    plugin_dir(self.openclaw).parent.rmdir()
        except OSError as error:
            raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error


def plan_connect(openclaw: OpenClaw, served: change.Served, *, default: bool = True) -> Change:
    """Connect, or bring an older connection up to date."""
    folder = str(plugin_dir(openclaw))
    text = change.connected(openclaw.text, served, openclaw.release, folder, default)
    return Change(openclaw, text, _plugin_files(), keep_backup=not is_connected(openclaw))


def plan_undo(openclaw: OpenClaw) -> Change:
    """Take back what was connected; changes that others made meanwhile stay."""
    backup = backup_path(openclaw)
    old = ""
    if backup.exists():
        try:
            old = backup.read_bytes().decode("utf-8")
            before = parse(old if old.strip() else "{}").value
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {backup}: {type(error).__name__}") from error
        except ConfigError as error:
            raise ConfigError(f"{backup} is {error}") from None
    else:
        before = {}
    text = openclaw.text
    if text.strip():
        text = change.disconnected(text, before, str(plugin_dir(openclaw)))
        if old.strip() and _same_but_spaces(text, old):
            text = old  # nobody changed anything since: byte for byte what it was
    return Change(openclaw, text, None, keep_backup=False)


def is_connected(openclaw: OpenClaw) -> bool:
    """Whether the configuration has our provider entry."""
    return get(openclaw.config, ("models", "providers", change.PROVIDER)) is not None


def plugin_dir(openclaw: OpenClaw) -> Path:
    """Where the plugin is installed: a copy, so that OpenClaw starts without our checkout."""
    return openclaw.state_dir / "openclaw-rl" / "plugin"


def backup_path(openclaw: OpenClaw) -> Path:
    """The configuration as it was before the first connection."""
    path = openclaw.config_path
    return path.with_name(f"{path.name}.before-openclaw-rl")


def installed(openclaw: OpenClaw) -> Mapping[str, bytes] | None:
    """The installed plugin's files by name, or None."""
    folder = plugin_dir(openclaw)
    return _files(folder) if folder.is_dir() else None


def _plugin_files() -> Mapping[str, bytes]:
    """The plugin that came with us: in a checkout, or as the package installed it."""
    beside = Path(openclaw_rl.__file__).resolve().parents[1] / "plugins" / "openclaw"
    shared = Path(sysconfig.get_path("data")) / "share" / "openclaw-rl" / "plugins" / "openclaw"
    for folder in (beside, shared):
        if (folder / "openclaw.plugin.json").is_file():
            return _files(folder)
    raise ConfigError("the OpenClaw plugin did not come with this installation: reinstall it")


def _files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.suffix in (".js", ".json") and path.is_file()
    }


def _install(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in _files(folder).keys() - files.keys():
        (folder / name).unlink()
    for name, content in files.items():
        _write(folder / name, content, 0o600)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace `path` in one step."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _same_but_spaces(text: str, other: str) -> bool:
    """Whether they differ in nothing but white space between words, and commas before a close."""
    bare = [re.sub(r",(?=[}\]])", "", re.sub(r"\s", "", one)) for one in (text, other)]
    return bare[0] == bare[1] and parse(text).value == parse(other).value


def _masked(text: str) -> str:
    """`text` for people: of its strings only those that connecting is about, and no key."""
    if not text.strip():
        return text
    for path, node in sorted(strings(parse(text)), key=lambda one: -one[1].start):
        ours = next((one for one in change.TOUCHED if path[: len(one)] == one), None)
        if ours is None or any(map(_SECRET.search, path[len(ours) :])):
            text = text[: node.start] + _HIDDEN + text[node.end :]
    return _COMMENT.sub(rf"\1{_HIDDEN}", text)
