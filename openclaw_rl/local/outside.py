"""Serving by an engine outside: each version of the weights is an adapter under a name of its own.

Guarantees: what the engine is and can do is asked before it serves, and again when it was started
anew, and announced with its address (`engine/survey.py`). A new version is loaded, then announced
(new requests use it), and the old one is unloaded when the gateway has gone over and its last
request with it has ended, or when no gateway runs: nothing pauses, and nothing is aborted. A
version that fails to load is logged, counted (`adapter_refused`), told by `openclaw-rl status`, and
not used. What we could not do ourselves (a full disk) is tried again. An engine that was away or
was started anew gets the present version as soon as it answers; training goes on meanwhile.

A name holds the run (`checkpoint.run_of`), the version and a digest of the weights, so equal names
are equal weights, whoever loaded them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import shutil
import threading
from argparse import Namespace
from collections.abc import Callable
from concurrent import futures
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import torch

from openclaw_rl.engine.kinds import connections, open_engine
from openclaw_rl.engine.survey import Survey, survey
from openclaw_rl.engine.types import Adapter, Engine
from openclaw_rl.errors import ConfigError, EngineError, EngineRefused, EngineUnavailable
from openclaw_rl.journal import Journal
from openclaw_rl.local import checkpoint
from openclaw_rl.local.train_args import needs_of

log = logging.getLogger("openclaw_rl.host")

_FILES = (checkpoint.ADAPTER_CONFIG, checkpoint.ADAPTER)
_PAUSE = 1.0
"""Seconds between tries of an engine that does not answer."""
_LOOK_SECONDS = 2.0
"""How often the engine is asked what it holds."""
_LISTEN_SECONDS = 2.0
_PUBLISH_SECONDS = 330
"""A little longer than the engine client waits for an adapter to be loaded."""

Announce = Callable[[str, str, dict[str, Any]], None]


class Outside:
    """See `host.Serving`."""

    def __init__(
        self, args: Namespace, journal: Journal, announce: Announce, context_length: int = 0
    ) -> None:
        self._args, self._journal, self._announce_role = args, journal, announce
        self._context_length = context_length
        self._engine_url, self._kind = str(args.engine_url), str(args.engine_kind)
        self._root = Path(args.save).expanduser()
        copies = getattr(args, "adapter_dir", None)
        self._copies = Path(copies).expanduser() if copies else None
        self._at_engine = getattr(args, "adapter_dir_at_engine", None)
        self._stop: threading.Event = getattr(args, "stop_event", None) or threading.Event()
        self._run = ""
        """Only names of this run are ever unloaded: others may use the engine too."""
        self._http: aiohttp.ClientSession | None = None
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._found: Survey | None = None
        self._version = -1
        self._refused: set[str] = set()
        """Names that the engine would not load: not tried again."""
        self._problems: dict[str, str] = {}
        """Names that are not at the engine, and why: told once."""
        self._away, self._lost, self._met, self._looked = False, False, True, 0.0
        self._newest: Adapter | None = None
        """The newest version, whose name took a reading of all its weights."""
        self._said = ""
        """What was wrong with an engine that answers, told once."""
        self.current: Adapter | None = None
        self.url: str | None = None

    async def start(self, version: int) -> None:
        """Waits for the engine. Raises ConfigError where it is another one than the settings say,
        cannot do what they ask for, or does not take the first adapter."""
        self._loop = asyncio.get_running_loop()
        self._run = await asyncio.to_thread(checkpoint.run_of, self._root)
        self._http = connections(getattr(self._args, "engine_api_key", None))
        while True:
            try:
                found = await self._survey()
                break
            except EngineUnavailable as error:
                self._report_away(error)
            await asyncio.sleep(_PAUSE)
        found.check(needs_of(self._args))
        self._engine = open_engine(found.kind, self._engine_url, self._http)
        takes = found.info.get("context_length")
        if takes and takes < self._context_length:
            raise ConfigError(
                f"the engine's context is {takes} tokens, ours {self._context_length}: "
                f"set --context-length {takes}, or start the engine with more"
            )
        self._version = version
        while not await self._bring(first=True):  # noqa: ASYNC110  (nobody tells us)
            await asyncio.sleep(_PAUSE)
        self.url = self._engine_url

    def publish(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        del weights  # the engine reads the checkpoint
        self._version = version
        if self._loop is not None and self.url is not None:
            bringing = asyncio.run_coroutine_threadsafe(self._bring(), self._loop)
            for _ in range(_PUBLISH_SECONDS):  # after that `watch` brings it
                done, _ = futures.wait([bringing], 1.0)
                if done or self._stop.is_set():
                    break
            if bringing.done():
                bringing.result()

    async def watch(self) -> None:
        """Load what should be there and is not, unload what nobody uses any more."""
        if self._looked + _LOOK_SECONDS <= asyncio.get_running_loop().time():
            await self._bring()
            await self._tidy()
            self._looked = asyncio.get_running_loop().time()

    def busy(self) -> bool:
        return False  # the engine has a device of its own, or shares it as its user decided

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    # -- event loop --------------------------------------------------------------------------------

    async def _survey(self) -> Survey:
        assert self._http is not None
        candidates = needs_of(self._args).candidates
        found = await survey(self._kind, self._engine_url, self._http, candidates)
        self._kind, self._found = found.kind, found
        return found

    async def _meet_again(self) -> None:
        """An engine that was started anew may have been started otherwise."""
        found = await self._survey()
        await asyncio.to_thread(self._announce)
        try:
            found.check(needs_of(self._args))
        except ConfigError as error:  # it can serve, so it does; what it makes is not trained
            log.error("[host] %s", error)

    async def _bring(self, first: bool = False) -> bool:
        """Whether the engine now holds the newest version, or at least one of ours."""
        assert self._engine is not None
        async with self._lock:
            try:
                held = await self._engine.adapters()
                newest = await asyncio.to_thread(self._adapter, self._version)
                if self.current is not None and self.current.name not in held:
                    if not self._lost:  # else it is known, and tried again all the same
                        log.warning("[host] the engine lost version %s", self.current.version)
                        self._lost, self._met = True, False
                    if not self._met:
                        await self._meet_again()
                        self._met = True
                    self._refused.clear()
                    if self.current != newest:
                        self._lost = not await self._load(self.current, held)
                if newest is not None and await self._load(newest, held):
                    self._lost = False
                    if newest != self.current or self._problems:
                        self.current = newest
                        self._problems.clear()
                        await asyncio.to_thread(self._announce)
            except (EngineUnavailable, ConfigError) as error:
                self._report_away(error)
                return False
            except EngineRefused as error:
                if first:
                    raise ConfigError(f"--engine-url: {error}") from error
                log.error("[host] %s", error)
                return False
            if self._away:
                self._away, self._said = False, ""
                log.info("[host] the engine answers")
            if first and self.current is None:
                why = "; ".join(self._problems.values()) or "no checkpoint can be read"
                raise ConfigError(f"--engine-url: the engine takes no adapter of ours: {why}")
            return self.current is not None

    async def _load(self, adapter: Adapter, held: frozenset[str]) -> bool:
        """Whether the engine holds it. A refusal is told once, and not tried again."""
        assert self._engine is not None
        if adapter.name in held:
            return True
        if adapter.name in self._refused:
            return False
        try:
            path = await asyncio.to_thread(self._place, adapter)
        except OSError as error:
            await self._not_loaded(adapter, f"cannot copy it: {error.strerror}")
            return False
        try:
            await self._engine.load_adapter(adapter.name, path)
        except EngineRefused as error:
            # Perhaps because it took an earlier request whose answer was lost.
            if adapter.name not in await self._engine.adapters():
                self._refused.add(adapter.name)
                await self._not_loaded(adapter, str(error))
                return False
        log.info("[host] version %s is at the engine as %s", adapter.version, adapter.name)
        return True

    async def _not_loaded(self, adapter: Adapter, reason: str) -> None:
        if self._problems.get(adapter.name) == reason:
            return
        self._problems[adapter.name] = reason
        await asyncio.to_thread(self._journal.count, "adapter_refused")
        if self.current is not None:
            log.error("[host] version %s is not served: %s", adapter.version, reason)
            await asyncio.to_thread(self._announce, f"version {adapter.version}: {reason}")

    async def _tidy(self) -> None:
        """Unload versions that no request needs: the gateway says which ones it uses, and one that
        does not listen uses none."""
        assert self._engine is not None
        if self.current is None:
            return
        try:
            held = await self._engine.adapters()
        except EngineError as error:
            log.debug("[host] old versions stay for now: %s", error)
            return
        newest = await asyncio.to_thread(self._adapter, self._version)
        copied = await asyncio.to_thread(self._copied)
        ours = {name for name in held | copied if name.startswith(f"{self._run}-")}
        old = ours - {self.current.name, newest.name if newest else ""}
        if not old:
            return
        gateway = await asyncio.to_thread(self._journal.endpoint, "gateway")
        if gateway is not None and await _listens(gateway.url):
            if gateway.info.get("adapter") != self.current.name:
                return  # it has not gone over yet
            old -= set(gateway.info.get("in_use", ()))
        for name in sorted(old):
            with contextlib.suppress(EngineError):  # it stays for now, the others go
                if name in held:
                    await self._engine.unload_adapter(name)
                    log.info("[host] unloaded %s: its last request has ended", name)
                if name in copied and self._copies is not None:
                    await asyncio.to_thread(shutil.rmtree, self._copies / name, True)

    # -- files and words ---------------------------------------------------------------------------

    def _adapter(self, version: int) -> Adapter | None:
        """The adapter of a checkpoint; None where it is gone (an older one than those kept)."""
        for known in (self.current, self._newest):
            if known is not None and known.version == str(version):
                return known
        try:
            with (self._folder(version) / checkpoint.ADAPTER).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()[:8]
        except OSError:
            return None
        self._newest = Adapter(f"{self._run}-v{version}-{digest}", str(version))
        return self._newest

    def _folder(self, version: int) -> Path:
        return self._root / checkpoint.name_of(version)

    def _copied(self) -> frozenset[str]:
        """Names of the adapters in the folder into which they are copied."""
        if self._copies is None or not self._copies.is_dir():
            return frozenset()
        return frozenset(path.name for path in self._copies.iterdir())

    def _place(self, adapter: Adapter) -> str:
        """Where the engine finds it, copied there if that was asked for."""
        folder = self._folder(int(adapter.version))
        shared = self._root
        if self._copies is not None:
            shared, target = self._copies, self._copies / adapter.name
            if not target.is_dir():
                partial = target.with_name(f".writing-{adapter.name}")
                self._copies.mkdir(parents=True, exist_ok=True, mode=0o700)
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(mode=0o700)  # learnt from private conversations
                try:
                    for name in _FILES:
                        (partial / name).touch(0o600)
                        shutil.copyfile(folder / name, partial / name)
                    partial.rename(target)
                except OSError:
                    shutil.rmtree(partial, ignore_errors=True)
                    raise
            folder = target
        if self._at_engine is None:
            return str(folder.resolve())
        return f"{self._at_engine.rstrip('/')}/{folder.relative_to(shared)}"

    def _announce(self, refused: str | None = None) -> None:
        assert self.current is not None
        assert self._found is not None
        info: dict[str, Any] = {name: self._found.info.get(name) for name in _TOLD}
        info |= {"engine": self._kind, "abilities": asdict(self._found.abilities)}
        policy = {**info, "weight_version": self.current.version, "adapter": self.current.name}
        if refused:
            policy["refused"] = refused
        self._announce_role("policy", self._engine_url, policy)
        for role in ("judge", "teacher"):
            self._announce_role(role, self._engine_url, {**info, "weight_version": "base"})

    def _report_away(self, error: Exception) -> None:
        misfit = str(error) if isinstance(error, ConfigError) else ""
        if not self._away or misfit not in ("", self._said):
            self._away, self._said = True, misfit
            log.warning("[host] waiting for the engine at %s: %s", self._engine_url, error)


_TOLD = ("model_path", "context_length")


async def _listens(url: str) -> bool:
    """Whether somebody takes connections at the address; one without a port is believed."""
    parts = urlsplit(url)
    if not parts.port:
        return True
    try:
        async with asyncio.timeout(_LISTEN_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
