"""What hooks see, and how they are loaded by path.

`Sample` has the field names of slime's (`slime.utils.types.Sample`), so that a reward or conversion
hook written against one works with the other. Under slime the adapter fills slime's own class; the
embedded host uses this one.

A path is `package.module.function`, `package.module`, or `./file.py[:function]`; slime itself takes
only the first form, the two others are what people type.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

from openclaw_rl.errors import HookError


@dataclass
class Sample:
    """One sample: `tokens` is prompt + response; the per-token lists cover the response only.

    To a reward hook it is one turn, whose reply is the response. To a conversion or loss hook it is
    one segment: several turns, each named in `metadata["turns"]`.

    Invariant (checked by `validate`): `loss_mask`, `rollout_log_probs` and, where present,
    `teacher_log_probs` all have `response_length` entries.
    """

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    index: int | None = None
    group_index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    loss_mask: list[int] | None = None
    reward: float | dict[str, Any] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    """The engine's; NaN on tokens that it did not sample (replayed conversations)."""
    teacher_log_probs: list[float] | None = None
    remove_sample: bool = False
    session_id: str | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None

    def validate(self) -> None:
        """Raise `ValueError` unless every per-token list has `response_length` entries."""
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
            values = getattr(self, name)
            if values is not None and len(values) != self.response_length:
                raise ValueError(
                    f"{name} has {len(values)} entries for a response of {self.response_length}"
                )
        if self.response_length > len(self.tokens):
            raise ValueError("the response is longer than the tokens")


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
        raise HookError(f"{flag}: no such file: {path}")
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
