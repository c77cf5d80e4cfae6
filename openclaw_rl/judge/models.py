"""The models that rewards ask (PRM, judge, teacher): where each one is, and how it is asked.

Guarantees: one `Models` hangs on `args.judge_models`, nothing is global; addresses are looked up
again for every request (an engine may come back elsewhere), first in `args` (`prm_url`,
`judge_url`, `teacher_url`), then among the journal's endpoints, off the event loop. A model that is
not there yet is `EngineUnavailable`, never a score. The engine's key goes to no other server.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.engine.client import EngineClient
from openclaw_rl.engine.kinds import EngineAPI, engine_api
from openclaw_rl.engine.transport import connections
from openclaw_rl.engine.types import Adapter
from openclaw_rl.errors import ConfigError, EngineUnavailable
from openclaw_rl.hooks import Sample
from openclaw_rl.journal.store import Endpoint, Journal
from openclaw_rl.judge.client import EngineJudge, JudgeClient, OpenAIJudge
from openclaw_rl.judge.prompts import HINT, RULE, VERDICT, Question, text_of
from openclaw_rl.judge.teacher import TeacherValues, teach
from openclaw_rl.judge.votes import Vote, accepted_hints, ask
from openclaw_rl.types import Message, Turn

Role = Literal["prm", "judge", "teacher", "policy"]

_PUBLISHED_AS: Mapping[Role, tuple[str, ...]] = {
    "prm": ("prm", "judge"),
    "judge": ("judge", "prm"),
    "teacher": ("teacher",),
    "policy": ("policy",),
}
"""Published roles that may serve a role, best first: PRM and judge are often one engine."""

VOTES_SHARE, TEACHER_SHARE = 0.6, 0.3
"""Parts of `args.judge_timeout` that the votes and the teacher may take; the whole is the worker's
limit for the reward function."""
_ENGINE_WAIT_SECONDS = 5.0
"""How long a request waits for an engine that broke off: after that the turn waits in the
journal."""


class Models:
    """See the module. Belongs to the event loop that first uses it. `counters` holds what happened
    since the worker last carried it into the journal."""

    def __init__(self, args: Any, journal: Journal | None = None) -> None:
        self._args, self._journal = args, journal
        self._loading = asyncio.Lock()
        self._tokenizers: dict[str, ChatTokenizer] = {}
        self._places: dict[Role, Endpoint] = {}
        """Where each role was found last."""
        self._engines: dict[Role, EngineClient] = {}
        self._clients: dict[Role, JudgeClient] = {}
        self._open: list[Any] = []
        self.counters: Counter[str] = Counter()

    def count(self, name: str) -> None:
        self.counters[name] += 1

    async def verdicts(self, sample: Sample) -> list[Vote]:
        """`args.prm_m` votes of the PRM on the reply. Raises `EngineError`."""
        return await self._votes("prm", sample, VERDICT, self._args.prm_m)

    async def hints(self, sample: Sample) -> list[Vote]:
        """Votes of the judge, with hints: as many as may be tried. Raises `EngineError`."""
        return await self._votes("judge", sample, HINT, self.max_hints)

    @property
    def max_hints(self) -> int:
        """Hints on one turn that may be tried; a choice among them needs candidates."""
        return int(self._args.opd_hints) if self._args.opd_top_k else 1

    async def teach(self, sample: Sample, hints: Sequence[str]) -> TeacherValues | None:
        """What the teacher says of the response with one of `hints` in view (`judge.teacher`); None
        where it says nothing that could be learnt from. Raises `EngineUnavailable`."""
        args = self._args
        await self._find("teacher")
        engine, chat = self._engine("teacher"), await self._tokenizer(args.hf_checkpoint)
        try:
            async with asyncio.timeout(args.judge_timeout * TEACHER_SHARE):
                return await teach(
                    engine,
                    chat,
                    sample,
                    hints,
                    k=args.opd_top_k,
                    subset=args.opd_subset,
                    count=self.count,
                )
        except TimeoutError:
            raise EngineUnavailable("the teacher took too long") from None

    async def policy(self) -> EngineClient:
        """The engine that serves the policy, as the host says by now. Raises
        `EngineUnavailable`."""
        await self._find("policy")
        return self._engine("policy")

    async def standing_rule(self, corrections: Sequence[str]) -> str | None:
        """The judge's: what to do in every reply, out of what a person asked for, newest first;
        None where nothing holds for every reply. Raises `EngineError`."""
        said = [{"role": "user", "content": text} for text in reversed(corrections)]
        reply = {"role": "assistant", "content": "(replies to several questions)"}
        as_turn = Sample(metadata={"messages": [], "reply": reply, "next_state": said})
        rules = accepted_hints(await self._votes("judge", as_turn, RULE, 1), 0)
        return rules[0] if rules else None

    async def prompt(
        self, messages: Sequence[Message], tools: Sequence[Any], template_kwargs: Mapping[str, Any]
    ) -> list[int]:
        """What the policy is asked for `messages`: the ids of its own template's text."""
        chat = await self._tokenizer(self._args.hf_checkpoint)
        return chat.encode(chat.render(messages, tools, template_kwargs))

    async def response_text(self, turn: Turn) -> str:
        """The reply as the model wrote it; its message's text where no model is configured."""
        if not self._args.hf_checkpoint:
            return text_of(turn.reply)
        return (await self._tokenizer(self._args.hf_checkpoint)).decode(turn.output_ids)

    async def close(self) -> None:
        """Close all connections."""
        for one in self._open:
            await one.close()

    # --- inside ------------------------------------------------------------------------------

    async def _votes(self, role: Role, sample: Sample, question: Question, m: int) -> list[Vote]:
        return await ask(
            await self._client(role),
            sample,
            question,
            m=m,
            temperature=self._args.judge_temperature,
            seconds=self._args.judge_timeout * VOTES_SHARE,
            count=self.count,
        )

    def _of(self, role: Role, name: str) -> Any:
        """A setting of a role; the policy has none, it is where its host says."""
        return None if role == "policy" else getattr(self._args, f"{role}_{name}")

    async def _find(self, role: Role) -> Endpoint:
        """Where the model of a role is now, for the requests that follow."""
        url: str | None = self._of(role, "url")
        found = None
        for name in ("policy",) if url else _PUBLISHED_AS[role]:
            if found is None and self._journal is not None:
                found = await asyncio.to_thread(self._journal.endpoint, name)
        if url:
            # A published engine says its kind; one at a configured address is of the policy's.
            published = found.info if found is not None else {}
            kind = self._args.engine_kind
            info = {"engine": published.get("engine") if kind == "auto" else kind}
            if found is not None and found.url.rstrip("/") == url.rstrip("/"):
                info["key"] = published.get("key")
            found = Endpoint(role=role, url=url, info=info, published=0.0)
        if found is None:
            raise EngineUnavailable(f"no engine serves as {role} yet")
        self._places[role] = found
        return found

    async def _client(self, role: Role) -> JudgeClient:
        url, model = (await self._find(role)).url, self._of(role, "model")
        if role not in self._clients:
            if self._of(role, "url") and is_openai(url, model):
                self._clients[role] = OpenAIJudge(url, model, self._of(role, "api_key"))
                self._open.append(self._clients[role])
            else:
                path = self._of(role, "model_path") or self._args.hf_checkpoint
                chat = await self._tokenizer(path)
                self._clients.setdefault(role, EngineJudge(self._engine(role), chat))
        return self._clients[role]

    def _engine(self, role: Role) -> EngineClient:
        if role not in self._engines:
            pool = connections(self._key(role))
            engine = self._engines[role] = EngineClient(
                lambda: api_of(self._places[role].info),
                lambda: self._places[role].url,
                pool,
                adapter=lambda: adapter_of(self._places[role].info),
                key=lambda: self._places[role].info.get("key"),
                wait_seconds=_ENGINE_WAIT_SECONDS,
            )
            self._open += [engine, pool]
        return self._engines[role]

    def _key(self, role: Role) -> str | None:
        """The engine's key is for the engine; a server elsewhere has one of its own."""
        url, engine = self._of(role, "url"), self._args.engine_url
        own = not url or (engine and urlsplit(url)[:2] == urlsplit(engine)[:2])
        key: str | None = self._args.engine_api_key if own else self._of(role, "api_key")
        return key

    async def _tokenizer(self, path: str | None) -> ChatTokenizer:
        """Loaded once, off the event loop; a failed load is tried again by the next turn."""
        if not path:
            raise ConfigError("the judge needs the model's folder (--model) for its tokenizer")
        async with self._loading:
            if path not in self._tokenizers:
                self._tokenizers[path] = await asyncio.to_thread(ChatTokenizer.load, path)
        return self._tokenizers[path]


def models_of(args: Any) -> Models:
    """`args.judge_models`, made at the first call (also where no worker runs)."""
    if getattr(args, "judge_models", None) is None:
        args.judge_models = Models(args)
    models: Models = args.judge_models
    return models


def api_of(info: Mapping[str, Any]) -> EngineAPI:
    """How a published engine is spoken to."""
    return engine_api(info.get("engine"), info.get("abilities", {}))


def adapter_of(info: Mapping[str, Any]) -> Adapter | None:
    """The weights to ask for, where a published engine serves them as adapters."""
    name = info.get("adapter")
    return None if name is None else Adapter(str(name), str(info.get("weight_version") or ""))


def is_openai(url: str, model: str | None) -> bool:
    """Whether an address is an OpenAI-compatible one rather than an engine's own: it has a path
    such as `/v1`, or comes with a model name."""
    path = urlsplit(url).path
    return bool(model) or path.startswith("/v") or "/v1" in path or "/chat/" in path
