"""Serving by an external engine: each version of the weights is an adapter under a name of its own.

Guarantees: what the engine can do is asked before it serves, and again when it was started anew,
and announced with its address. A new version is loaded, then announced (new requests use it), and
the old one is unloaded when its last request has ended, or when no gateway runs: nothing pauses,
and nothing is aborted. A version that the engine refuses is logged, counted (`adapter_refused`) and
not used. An engine that was away gets the present version as soon as it answers; training goes on.

A name holds the run (`run_of`), the version and a digest of the weights, so equal names
are equal weights, whoever loaded them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openclaw_rl.engine.client import EngineClient
from openclaw_rl.engine.survey import Needs, survey
from openclaw_rl.engine.transport import connections, listens
from openclaw_rl.engine.types import Adapter
from openclaw_rl.errors import ConfigError, EngineError, EngineRefused, EngineUnavailable
from openclaw_rl.journal import Journal
from openclaw_rl.judge.teacher import teacher_list
from openclaw_rl.local import checkpoint

if TYPE_CHECKING:
    import torch

log = logging.getLogger("openclaw_rl.host")

_PAUSE = 1.0
"""Seconds between tries of an engine that does not answer."""
_SYNC_SECONDS = 2.0
"""How often the engine is asked what it holds."""
_LISTEN_SECONDS = 2.0


def run_of(root: Path) -> str:
    """A name for the run whose checkpoints are in `root`, made up once and kept there: the same
    path may be another run's on another machine."""
    file = root / "run"
    if not file.exists():
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.write_text(secrets.token_hex(4), encoding="ascii")
    return file.read_text(encoding="ascii")


def needs_of(args: Namespace) -> Needs:
    """What these settings ask of the engine that samples."""
    top_k = args.opd_top_k if args.w_opd else 0
    return Needs(args.rollout_temperature, teacher_list(top_k))


class ExternalEngine:
    """See `host.Serving`. `_newest` should be served, `current` is; `_refused`: names that the
    engine did not take, and why."""

    def __init__(self, args: Namespace, journal: Journal, context_length: int) -> None:
        self._args, self._journal, self._context_length = args, journal, context_length
        self._engine_url: str = args.engine_url
        self._kind: str = args.engine_kind
        self._needs = needs_of(args)
        self._root = Path(args.save).expanduser()
        self._run = run_of(self._root)
        self._open = contextlib.AsyncExitStack()
        self._refused: dict[str, str] = {}
        self._announced: dict[str, Any] = {}
        self._logged = ""
        self._asked: Adapter | None = None
        self._due = 0.0
        self.current: Adapter | None = None
        self.url: str | None = None

    async def start(self, version: int) -> None:
        """Waits for the engine. Raises ConfigError where it is another one than the settings say,
        cannot do what they ask for, or does not take the first adapter."""
        self._http = await self._open.enter_async_context(connections(self._args.engine_api_key))
        self._newest = await asyncio.to_thread(self._adapter, version)
        while self.current is None:
            try:
                await self._survey()
                self._check()
                self._engine = EngineClient(self._kind, self._engine_url, self._http)
                wrong = await self._load_newest()
            except EngineUnavailable as error:
                self._log(f"waiting for the engine at {self._engine_url}: {error}")
                await asyncio.sleep(_PAUSE)
                continue
            except EngineRefused as error:
                raise ConfigError(f"--engine-url: {error}") from error
            if wrong:
                await asyncio.to_thread(self._journal.count, "adapter_refused")
                raise ConfigError(f"--engine-url: the engine refuses our adapter: {wrong}")
        self.url = self._engine_url

    def publish(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        """The next `watch` loads it from its checkpoint: training does not wait for the engine."""
        del weights
        self._newest = self._adapter(version)

    async def watch(self) -> None:
        """Load what should be there and is not, unload what nobody uses any more. What stands in
        the way is logged once."""
        now = asyncio.get_running_loop().time()
        if self._newest == self._asked and now < self._due:
            return
        self._asked, self._due = self._newest, now + _SYNC_SECONDS
        try:
            wrong = await self._load_newest()
            if not wrong:
                self._check()  # else it serves, and what it samples is not trained
        except EngineUnavailable as error:
            wrong = f"waiting for the engine at {self._engine_url}: {error}"
        except (EngineError, ConfigError) as error:
            wrong = str(error)
        self._log(wrong)
        with contextlib.suppress(EngineError):  # old versions stay for now
            await self._unload_old()

    def give_way(self) -> None:
        """The engine has a device of its own, or shares it as its user decided."""

    async def close(self) -> None:
        await self._open.aclose()

    async def _survey(self) -> None:
        self._found = await survey(self._kind, self._engine_url, self._http, self._needs.candidates)
        self._kind = self._found.kind

    def _check(self) -> None:
        """Raise ConfigError where the engine cannot do what the settings ask for."""
        self._found.check(self._needs)
        takes = self._found.info.get("context_length")
        if takes and takes < self._context_length:
            raise ConfigError(
                f"the engine's context is {takes} tokens, ours {self._context_length}: "
                f"set --context-length {takes}, or start the engine with more"
            )

    async def _load_newest(self) -> str:
        """Load the newest version, announce what is served; returns why the newest is not."""
        newest, held = self._newest, await self._engine.adapters()
        if lost := self.current is not None and self.current.name not in held:
            # It was started anew, and perhaps otherwise.
            await self._survey()
            self._refused.clear()
        wrong = await self._load(newest, held)
        if not wrong:
            self.current = newest
        elif lost and self.current is not None and self.current != newest:
            await self._load(self.current, held)
        if self.current is not None:
            await asyncio.to_thread(self._announce, self.current, wrong)
        return wrong

    async def _load(self, adapter: Adapter, held: frozenset[str]) -> str:
        """Why the engine does not hold it ("": it does). What it refuses is not tried again."""
        if adapter.name in held:
            return ""
        if adapter.name in self._refused:
            return self._refused[adapter.name]
        try:
            await self._engine.load_adapter(adapter.name, self._path(adapter))
        except EngineRefused as error:
            # Perhaps because it took an earlier request whose answer was lost.
            if adapter.name not in await self._engine.adapters():
                self._refused[adapter.name] = f"version {adapter.version}: {error}"
                return self._refused[adapter.name]
        log.info("[host] version %s is at the engine as %s", adapter.version, adapter.name)
        return ""

    async def _unload_old(self) -> None:
        """Unload versions that no request needs: the gateway says which ones it uses, and one that
        does not listen uses none."""
        assert self.current is not None
        # Only names of this run: others may use the engine too.
        held = {name for name in await self._engine.adapters() if name.startswith(f"{self._run}-")}
        old = held - {self.current.name, self._newest.name}
        if not old:
            return
        gateway = await asyncio.to_thread(self._journal.endpoint, "gateway")
        if gateway is not None and await asyncio.to_thread(listens, gateway.url, _LISTEN_SECONDS):
            if gateway.info.get("adapter") != self.current.name:
                return  # it has not gone over yet
            old -= set(gateway.info.get("in_use", ()))
        for name in sorted(old):
            with contextlib.suppress(EngineError):  # it stays for now, the others go
                await self._engine.unload_adapter(name)
                log.info("[host] unloaded %s: its last request has ended", name)

    def _log(self, wrong: str) -> None:
        if wrong != self._logged:
            if wrong:
                log.error("[host] %s", wrong)
            else:
                log.info("[host] the engine serves the newest version")
            self._logged = wrong

    def _adapter(self, version: int) -> Adapter:
        """The adapter of a checkpoint, whose name takes a reading of all its weights."""
        with (self._root / checkpoint.name_of(version) / checkpoint.ADAPTER).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:8]
        return Adapter(f"{self._run}-v{version}-{digest}", str(version))

    def _path(self, adapter: Adapter) -> str:
        """Where the engine finds it."""
        root = self._args.adapter_dir_at_engine or str(self._root.resolve())
        return f"{root.rstrip('/')}/{checkpoint.name_of(int(adapter.version))}"

    def _announce(self, adapter: Adapter, refused: str) -> None:
        """Say in the journal what is served where, if that has changed."""
        info = {name: self._found.info.get(name) for name in ("model_path", "context_length")}
        info |= {"engine": self._kind, "abilities": asdict(self._found.abilities)}
        policy = {**info, "weight_version": adapter.version, "adapter": adapter.name}
        if refused:
            policy["refused"] = refused
        if policy == self._announced:
            return
        if refused:
            self._journal.count("adapter_refused")
        base, now = {**info, "weight_version": "base"}, time.time()
        for role, about in (("policy", policy), ("judge", base), ("teacher", base)):
            self._journal.publish(role, self._engine_url, about, now)
        self._announced = policy
