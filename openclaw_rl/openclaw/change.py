"""What OpenClaw's configuration must say, and what it said before. Pure.

Touched are the provider entry `openclaw-rl`, the plugin's entry and path, and the default model;
nothing else, in particular no other provider and not the sandbox.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from openclaw_rl.errors import ConfigError
from openclaw_rl.openclaw.json5 import append, get, parse, remove, remove_item, set_value

PROVIDER = "openclaw-rl"
"""Id of provider and plugin."""

NO_KEY = "none"
"""OpenClaw wants some key even where the gateway wants none."""

_SINCE_AFFINITY = (2026, 9, 0)
"""From here on OpenClaw itself can name the session in headers, and lets a plugin see runs only
with a grant. Older versions refuse a configuration with keys that they do not know."""

Path = tuple[str, ...]

_ENTRY: Path = ("models", "providers", PROVIDER)
_PLUGIN: Path = ("plugins", "entries", PROVIDER)
_PATHS: Path = ("plugins", "load", "paths")
_ALLOW: Path = ("plugins", "allow")
_MODEL: Path = ("agents", "defaults", "model")

TOUCHED = (_ENTRY, _PLUGIN, _PATHS, _ALLOW, _MODEL)
"""Everything that connecting changes lies below these."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the gateway serves, and where: tokens of context, the longest reply."""

    base_url: str
    model: str
    context_length: int
    max_tokens: int
    api_key: str = field(default="", repr=False)


def provider_entry(served: Served, release: tuple[int, int, int]) -> dict[str, Any]:
    """The entry under `models.providers`."""
    # Without usage OpenClaw never compacts, and 2026.3.23 asks unknown servers for none.
    compat: dict[str, Any] = {"supportsUsageInStreaming": True}
    if release >= _SINCE_AFFINITY:
        compat["sendSessionAffinityHeaders"] = True
    return {
        "baseUrl": served.base_url,
        "apiKey": served.api_key or NO_KEY,
        "api": "openai-completions",
        "models": [
            {
                "id": served.model,
                "name": f"{served.model} (openclaw-rl)",
                "reasoning": False,
                "input": ["text"],
                "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
                "contextWindow": served.context_length,
                "maxTokens": served.max_tokens,
                "compat": compat,
            }
        ],
    }


def plugin_entry(release: tuple[int, int, int]) -> dict[str, Any]:
    """The entry under `plugins.entries`."""
    entry: dict[str, Any] = {"enabled": True}
    if release >= _SINCE_AFFINITY:
        entry["hooks"] = {"allowConversationAccess": True}
    return entry


def connected(
    text: str, served: Served, release: tuple[int, int, int], plugin_dir: str, default: bool
) -> str:
    """The configuration `text`, connected. `default`: our model becomes the agents' default.

    Raises `ConfigError` where the configuration rules our plugin out.
    """
    text = text if text.strip() else "{}\n"
    config = parse(text).value
    if get(config, ("plugins", "enabled")) is False:
        raise ConfigError("plugins.enabled is false: switch plugins on first")
    if PROVIDER in _texts(config, ("plugins", "deny")):
        raise ConfigError(f"plugins.deny names {PROVIDER}: take it out first")
    changes: list[tuple[Path, Any]] = [
        (_ENTRY, provider_entry(served, release)),
        (_PLUGIN, plugin_entry(release)),
    ]
    if default:
        plain = isinstance(get(config, _MODEL), str)
        changes.append((_MODEL if plain else (*_MODEL, "primary"), f"{PROVIDER}/{served.model}"))
    for path, value in changes:
        text = set_value(text, path, value)
    if plugin_dir not in _texts(config, _PATHS):
        text = append(text, _PATHS, plugin_dir)
    allowed = _texts(config, _ALLOW)
    if allowed and PROVIDER not in allowed:  # a list is exclusive; none is made where there is none
        text = append(text, _ALLOW, PROVIDER)
    return text


def disconnected(text: str, before: Any, plugin_dir: str) -> str:
    """The configuration `text` without what `connected` put there. `before` is the configuration
    as it was then: a default model that is still ours becomes what it was."""
    config = parse(text).value
    for path in (_ENTRY, _PLUGIN):
        text = _pruned(remove(text, path), path[:-1], before)
    for path, ours in ((_PATHS, plugin_dir), (_ALLOW, PROVIDER)):
        if ours in _texts(config, path) and ours not in _texts(before, path):
            text = _pruned(remove_item(text, path, ours), path, before)
    model = get(config, _MODEL)
    path = _MODEL if isinstance(model, str) else (*_MODEL, "primary")
    if str(get(config, path)).startswith(f"{PROVIDER}/"):
        old = get(before, path)
        # A backup that names our model already (its provider was gone, the default stayed): no
        # entry would be left for it.
        if old is not None and not str(old).startswith(f"{PROVIDER}/"):
            text = set_value(text, path, old)
        else:
            text = _pruned(remove(text, path), path[:-1], before)
    return text


def _texts(config: Any, path: Sequence[str]) -> list[str]:
    value = get(config, path)
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _pruned(text: str, path: Path, before: Any) -> str:
    """`text` without the objects and lists down to `path` that are empty now and were not there
    before."""
    while path and get(parse(text).value, path) in ({}, []) and get(before, path) is None:
        text, path = remove(text, path), path[:-1]
    return text
