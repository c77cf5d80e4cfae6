"""One configuration: a TOML file, overridden by the environment, overridden by flags.

`load_config` returns the tree of `settings.py`. Nothing below the command line reads the
environment. Every mistake is a `ConfigError` of one line.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import ipaddress
import math
import os
import tomllib
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload
from urllib.parse import urlsplit

from openclaw_rl.errors import ConfigError
from openclaw_rl.settings import Config

Tree = TypeVar("Tree", bound=Config)


def _sections(tree: type[Config]) -> dict[str, type]:
    hints = typing.get_type_hints(tree)
    return {item.name: hints[item.name] for item in dataclasses.fields(tree)}


def add_flags(
    parser: argparse.ArgumentParser,
    tree: type[Config] = Config,
    wanted: Callable[[str], bool] = lambda key: True,
    listed: Collection[str] | None = None,
) -> None:
    """Add every setting of `tree` that has a flag, and whose key (`section.name`) is wanted, to
    `parser`, grouped by section. `--help` names the keys that are no flags too; where `listed`
    names sections, it is silent about the others."""
    for section, kind in _sections(tree).items():
        items = [
            item
            for item in dataclasses.fields(kind)
            if item.metadata["flag"] and wanted(f"{section}.{item.name}")
        ]
        if not items:
            continue
        shown = listed is None or section in listed
        about = (kind.__doc__ or "").splitlines()[0]
        keys = [
            item.metadata["env"]
            for item in dataclasses.fields(kind)
            if not item.metadata["flag"] and wanted(f"{section}.{item.name}")
        ]
        if keys:
            about += f" Keys are no flags, but environment: {', '.join(keys)}."
        group = parser.add_argument_group(f"[{section}]", about) if shown else parser
        for item in items:
            flag = item.metadata["flag"]
            notes = []
            switch = isinstance(item.default, bool)
            if item.default != "" and "default" not in item.metadata["help"]:
                default = ("on" if item.default else "off") if switch else item.default
                notes.append(f"default {default}")
            if item.metadata["env"]:
                notes.append(f"environment {item.metadata['env']}")
            words = item.metadata["help"] + (f" ({', '.join(notes)})" if notes else "")
            group.add_argument(
                flag,
                dest=f"{section}.{item.name}",
                metavar="|".join(item.metadata["choices"] or (("on", "off") if switch else ()))
                or item.name.upper(),
                default=None,
                help=words.replace("%", "%%") if shown else argparse.SUPPRESS,
            )


def environment() -> dict[str, str]:
    """This process's environment, for a command line to hand on."""
    return dict(os.environ)


@overload
def load_config(
    flags: Mapping[str, str | None], environ: Mapping[str, str], file: str | None = None
) -> Config: ...
@overload
def load_config(
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    file: str | None = None,
    *,
    tree: type[Tree],
) -> Tree: ...
def load_config(
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    file: str | None = None,
    *,
    tree: type[Any] = Config,
) -> Any:
    """Return the configuration from `file`, `environ` and `flags` (later ones win).

    `flags` has keys such as `gateway.port`, as `add_flags` parses them. Raises `ConfigError`.
    """
    sections = _sections(tree)
    values: dict[str, dict[str, Any]] = {section: {} for section in sections}
    if file:
        _read_file(Path(file).expanduser(), values, sections)
    for section, kind in sections.items():
        types = typing.get_type_hints(kind)
        for item in dataclasses.fields(kind):
            env, key = item.metadata["env"], f"{section}.{item.name}"
            if env and environ.get(env):
                values[section][item.name] = (environ[env], env)
            if flags.get(key) is not None:
                values[section][item.name] = (flags[key], item.metadata["flag"])
            if item.name in values[section]:
                raw, origin = values[section][item.name]
                values[section][item.name] = _convert(raw, types[item.name], item, origin)
    config = tree(**{name: kind(**values[name]) for name, kind in sections.items()})
    _check(config)
    return config


def _read_file(path: Path, values: dict[str, dict[str, Any]], sections: Mapping[str, type]) -> None:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path} is not valid TOML: {error}") from error
    for section, content in tree.items():
        if section not in values:
            raise ConfigError(f"{path}: no section [{section}]{_similar(section, values)}")
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: [{section}] must be a section")
        names = [item.name for item in dataclasses.fields(sections[section])]
        for name, value in content.items():
            if name not in names:
                raise ConfigError(f"{path}: [{section}] has no {name!r}{_similar(name, names)}")
            values[section][name] = (value, f"{path}: [{section}] {name}")


def _similar(word: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"


def _convert(raw: Any, kind: type, item: dataclasses.Field[Any], origin: str) -> Any:
    if kind is bool:
        if isinstance(raw, str):
            raw = {"on": True, "true": True, "off": False, "false": False}.get(raw.lower())
        if not isinstance(raw, bool):
            raise ConfigError(f"{origin}: it is on or off")
        return raw
    try:
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise ValueError
        if kind is str and not isinstance(raw, str):
            raise ValueError
        if kind is int and isinstance(raw, float):
            raise ValueError
        value = kind(raw)
    except (ValueError, OverflowError):
        words = {int: "a whole number", float: "a number", str: "a text"}
        raise ConfigError(f"{origin}: {raw!r} is not {words[kind]}") from None
    meta = item.metadata
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(f"{origin}: {value!r} is none of {', '.join(meta['choices'])}")
    if meta["secret"] and any(ord(char) <= 32 or ord(char) > 126 for char in value):
        raise ConfigError(f"{origin} must be printable ASCII without spaces")  # it is a header
    if meta["address"] and value and not _is_address(value):
        raise ConfigError(f"{origin}: give the server's address, like http://127.0.0.1:8000")
    if kind is not str:
        if not math.isfinite(value):
            raise ConfigError(f"{origin}: {raw!r} is not a finite number")
        if meta["low"] is not None and value < meta["low"]:
            raise ConfigError(f"{origin}: {value} is below {meta['low']}")
        if meta["high"] is not None and value > meta["high"]:
            raise ConfigError(f"{origin}: {value} is above {meta['high']}")
    return value


def _check(config: Config) -> None:
    gateway = config.gateway
    if not is_loopback(gateway.host) and not gateway.api_key:
        raise ConfigError(
            f"--host {gateway.host} can be reached from other machines: set OPENCLAW_RL_API_KEY "
            "first, or keep 127.0.0.1"
        )
    if ":" in gateway.api_key:
        raise ConfigError("OPENCLAW_RL_API_KEY must not contain ':' (KEY:SESSION names a session)")
    train = config.train
    if train.opd_top_k and train.method == "rl":
        raise ConfigError("--opd-top-k distils from hints, which --method rl does not ask for")
    if train.opd_hints > 1 and not train.opd_top_k:
        raise ConfigError("--opd-hints above 1 needs --opd-top-k: hints are chosen by candidates")
    if -1 < train.tis_clip < 0:
        raise ConfigError(f"--tis-clip {train.tis_clip:g}: it is -1, or at least 0")
    engines = {"--engine-url": config.engine.url, "--teacher-url": config.judge.teacher_url}
    for flag, url in engines.items():
        if "/v1/" in f"{urlsplit(url).path}/":
            raise ConfigError(f"{flag}: give the server itself, like http://127.0.0.1:8000")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
