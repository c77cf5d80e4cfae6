"""Loading hooks by path: `package.module.function`, `package.module`, or `./file.py[:function]`.

slime itself takes only dotted paths to a function; the two other forms are what people type.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from openclaw_rl.errors import HookError


def load_hook(path: str, *, default_name: str, flag: str) -> Callable[..., Any]:
    """Return the callable that `path` names.

    `default_name` is taken where `path` names a module or a file without a function (for
    `--custom-rm-path` it is `custom_rm`). `flag` only words the error. Raises `HookError`.
    """
    file_part, _, attr = path.partition(":")
    if file_part.endswith(".py"):
        return _member(_load_file(Path(file_part).expanduser(), flag), attr or default_name, flag)
    try:
        return _member(importlib.import_module(path), default_name, flag)
    except ModuleNotFoundError as error:
        # Only "path itself is no module" is our case; a missing import inside it is the user's.
        if error.name is None or not (path == error.name or path.startswith(error.name + ".")):
            raise HookError(f"{flag}: importing {path} failed: {error}") from error
    module_name, _, function = path.rpartition(".")
    if not module_name:
        raise HookError(f"{flag}: {path!r} is neither a module, module.function nor a .py file")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise HookError(f"{flag}: importing {module_name} failed: {error}") from error
    return _member(module, function, flag)


def _load_file(path: Path, flag: str) -> ModuleType:
    if not path.is_file():
        raise HookError(f"{flag}: there is no file {path}")
    resolved = path.resolve()
    digest = hashlib.sha256(str(resolved).encode()).hexdigest()[:12]
    name = f"openclaw_rl_hook_{resolved.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise HookError(f"{flag}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before running it: dataclasses and pickling look it up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        kind = type(error).__name__
        raise HookError(f"{flag}: running {path} failed: {kind}: {error}") from error
    return module


def _member(module: ModuleType, name: str, flag: str) -> Callable[..., Any]:
    member = getattr(module, name, None)
    if not callable(member):
        raise HookError(f"{flag}: {module.__name__} has no function {name!r}")
    return member  # type: ignore[no-any-return]
