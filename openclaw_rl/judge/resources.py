"""What reward functions share: endpoints, tokenizers, one HTTP pool, counters.

Guarantees: built once from `args` and hung on `args.judge_resources`, so there is nothing global;
addresses are looked up again for every request (an engine may come back elsewhere), first in
`args` (`prm_url`, `judge_url`, `teacher_url`: a text or a function), then in the journal's
endpoints. An address that is not there yet is `EngineUnavailable`, never a score.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.engine.client import EngineClient
from openclaw_rl.engine.kinds import connections, dialect_of
from openclaw_rl.errors import ConfigError
from openclaw_rl.hooks import Sample
from openclaw_rl.journal.records import Endpoint
from openclaw_rl.journal.store import Journal
from openclaw_rl.judge import prompts, votes
from openclaw_rl.judge.choice import Lesson, lesson_of, teacher_list
from openclaw_rl.judge.llm import ChatLLM, EngineLLM, JudgeLLM, Tokenizer
from openclaw_rl.judge.panel import Panel
from openclaw_rl.judge.samples import reply_text
from openclaw_rl.judge.teacher import HEADING, Teacher
from openclaw_rl.types import TopK

Role = Literal["prm", "judge", "teacher"]

_STAND_INS: Mapping[Role, tuple[str, ...]] = {
    "prm": ("prm", "judge"),
    "judge": ("judge", "prm"),
    "teacher": ("teacher",),
}
"""Published roles that may serve a role, best first."""

VOTES_SHARE, TEACHER_SHARE = 0.6, 0.3
"""Parts of `args.judge_timeout` that the votes and the teacher may take; the whole is the worker's
limit for the reward function."""

_ENGINE_WAIT_SECONDS = 5.0
"""How long a request waits for an absent engine: after that the turn waits in the journal."""


class Resources:
    """See the module. Belongs to the event loop that first uses it."""

    def __init__(
        self,
        args: Any,
        journal: Journal | None = None,
        *,
        load_chat: Callable[[str], Tokenizer] = ChatTokenizer.load,
    ) -> None:
        self._args, self._journal, self._load_chat = args, journal, load_chat
        self._chats: dict[str, asyncio.Task[Tokenizer]] = {}
        self._llms: dict[tuple[str, str], JudgeLLM] = {}
        self._engines: dict[Role, EngineClient] = {}
        self._http: aiohttp.ClientSession | None = None
        self._engine_http: dict[str | None, aiohttp.ClientSession] = {}
        """Pools by key: a server sees its own only."""
        self.counters: Counter[str] = Counter()
        """What happened since the worker last carried it into the journal."""

    def count(self, name: str, n: int = 1) -> None:
        self.counters[name] += n

    @property
    def top_k(self) -> int:
        """Candidates of each token that distillation goes over; 0: the sampled ones."""
        return int(_get(self._args, "opd_top_k", 0))

    @property
    def max_hints(self) -> int:
        """Hints on one turn that may be tried."""
        return int(_get(self._args, "opd_hints", 1)) if self.top_k else 1

    @property
    def timeout(self) -> float:
        """Seconds that one reward may take."""
        return float(_get(self._args, "judge_timeout", 120.0))

    def url(self, role: Role) -> str | None:
        """Where the model of a role is now, if anywhere; a published PRM and judge stand in for
        each other (often they are one engine)."""
        value = getattr(self._args, f"{role}_url", None)
        if callable(value):
            value = value()
        if value:
            return str(value)
        endpoint = self._published(role)
        return endpoint.url if endpoint is not None else None

    async def verdicts(self) -> Panel:
        """The PRM's panel: `prm_m` votes."""
        llm = await self._llm("prm")
        m = int(_get(self._args, "prm_m", 1))
        return self._panel(llm, prompts.verdict_prompt, votes.VERDICT_SCHEMA, m, "prm")

    async def hints(self) -> Panel:
        """The judge's panel: `judge_m` votes (1), and as many as hints are to be tried."""
        llm = await self._llm("judge")
        m = max(int(_get(self._args, "judge_m", 1)), self.max_hints)
        return self._panel(llm, prompts.hint_prompt, votes.HINT_SCHEMA, m, "judge")

    async def teacher(self) -> Teacher:
        chat = await self._chat(_path(self._args, "hf_checkpoint"))
        return Teacher(
            self._engine("teacher"),
            chat,
            count=self.count,
            seconds=self.timeout * TEACHER_SHARE,
            context_tokens=self._context("teacher", "teacher_context"),
            heading=_get(self._args, "hint_heading", HEADING),
        )

    async def response_text(self, output_ids: Sequence[int], reply: Mapping[str, Any]) -> str:
        """The reply as the model wrote it; from its message where no model is configured."""
        path = getattr(self._args, "hf_checkpoint", None)
        if not path:
            return reply_text(reply)
        return (await self._chat(str(path))).decode(output_ids)

    async def teach(self, sample: Sample, hints: Sequence[str]) -> Lesson | None:
        """What the teacher says of the response with one of `hints` in view; None where it says
        nothing that could be learnt from, counted.

        With `top_k` the hint is chosen by the candidates of policy and teacher. Raises
        `EngineUnavailable`.
        """
        metadata, k = sample.metadata, self.top_k
        response = sample.tokens[len(sample.tokens) - sample.response_length :]
        teacher = await self.teacher()
        asked = [
            teacher.opinion(
                metadata.get("messages") or (),
                metadata.get("tools") or (),
                metadata.get("template_kwargs") or {},
                response,
                hint,
                teacher_list(k),
            )
            for hint in hints
        ]
        opinions = []
        for found in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(found, BaseException):
                raise found
            if found is not None:
                opinions.append(found)
        if not opinions:
            return None
        if k == 0:
            return Lesson(opinions[0].hint, opinions[0].log_probs)
        student = metadata.get("student_topk")
        lesson = lesson_of(
            opinions,
            None if student is None else TopK.of_mapping(student, len(response)),
            response,
            k=k,
            subset=_get(self._args, "opd_subset", "student"),
            choice=_get(self._args, "opd_hint_choice", "sequence"),
        )
        if lesson is None:
            self.count("teacher_topk_none" if student is not None else "teacher_topk_no_policy")
        else:
            self.count("teacher_topk_candidates", k * len(response))
            if lesson.unknown:
                self.count("teacher_topk_unknown", lesson.unknown)
        return lesson

    async def close(self) -> None:
        for engine in self._engines.values():
            await engine.close()
        for http in (self._http, *self._engine_http.values()):
            if http is not None:
                await http.close()

    # --- inside ------------------------------------------------------------------------------

    def _published(self, role: Role | Literal["policy"]) -> Endpoint | None:
        if self._journal is None:
            return None
        names = ("policy",) if role == "policy" else _STAND_INS[role]
        found = (self._journal.endpoint(name) for name in names)
        return next((endpoint for endpoint in found if endpoint is not None), None)

    def _context(self, role: Role, setting: str) -> int | None:
        """The smaller one of what is configured and what a published engine says, if anything."""
        limits = [_get(self._args, setting, None)]
        if not getattr(self._args, f"{role}_url", None) and (endpoint := self._published(role)):
            limits.append(endpoint.info.get("context_length"))
        return min((limit for limit in limits if isinstance(limit, int) and limit), default=None)

    def _panel(
        self, llm: JudgeLLM, build: Any, schema: Any, m: int, role: Literal["prm", "judge"]
    ) -> Panel:
        return Panel(
            llm=llm,
            build=build,
            schema=schema,
            m=m,
            temperature=float(_get(self._args, f"{role}_temperature", 0.6)),
            max_tokens=int(_get(self._args, "judge_max_tokens", 2048)),
            seconds=self.timeout * VOTES_SHARE,
            count=self.count,
        )

    async def _llm(self, role: Literal["prm", "judge"]) -> JudgeLLM:
        url = self.url(role)
        model = _get(self._args, f"{role}_model", None)
        kind = url if url and speaks_openai(url, model) else "engine"
        if (role, kind) not in self._llms:
            self._llms[role, kind] = await self._new_llm(role, kind, model)
        return self._llms[role, kind]

    async def _new_llm(self, role: Literal["prm", "judge"], kind: str, model: Any) -> JudgeLLM:
        context = self._context(role, "judge_context")
        if kind != "engine":
            key = _get(self._args, f"{role}_api_key", None)
            return ChatLLM(kind, self._pool(), model=model, api_key=key, context_tokens=context)
        path = _get(self._args, f"{role}_model_path", None)
        chat = await self._chat(path or _path(self._args, "hf_checkpoint"))
        return EngineLLM(
            self._engine(role),
            chat,
            template_kwargs=_get(self._args, "judge_template_kwargs", None),
            context_tokens=context,
        )

    def _engine(self, role: Role) -> EngineClient:
        if role not in self._engines:
            key = self._key(role)
            if key not in self._engine_http:
                self._engine_http[key] = connections(key)
            self._engines[role] = EngineClient(
                lambda: dialect_of(self._kind(role)),
                lambda: self.url(role),
                self._engine_http[key],
                key=lambda: self._published_key(role),
                wait_seconds=_ENGINE_WAIT_SECONDS,
            )
        return self._engines[role]

    def _key(self, role: Role) -> str | None:
        """The engine's key is for the engine; a server elsewhere has one of its own."""
        url, engine = (getattr(self._args, f"{name}_url", None) for name in (role, "engine"))
        own = not url or (isinstance(url, str) and engine and _server(url) == _server(engine))
        key: str | None = getattr(self._args, f"{'engine' if own else role}_api_key", None)
        return key

    def _published_key(self, role: Role) -> str | None:
        """The key that the engine at this role's address made itself (the embedded engine)."""
        endpoint, url = self._published(role), self.url(role)
        if endpoint is None or url is None or endpoint.url.rstrip("/") != url.rstrip("/"):
            return None
        key = endpoint.info.get("key")
        return key if isinstance(key, str) else None

    def _kind(self, role: Role) -> str | None:
        """A published engine says its kind; one at a configured address is of the policy's."""
        configured = bool(getattr(self._args, f"{role}_url", None))
        said = _get(self._args, "engine_kind", "auto")
        if configured and said != "auto":
            return str(said)
        endpoint = self._published("policy" if configured else role)
        return endpoint.info.get("engine") if endpoint is not None else None

    def _pool(self) -> aiohttp.ClientSession:
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
            self._http = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self._http

    async def _chat(self, path: str) -> Tokenizer:
        """Loaded once, off the event loop; a failed load is tried again by the next turn."""
        task = self._chats.get(path)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.ensure_future(asyncio.to_thread(self._load_chat, path))
            self._chats[path] = task
        return await asyncio.shield(task)


def get_resources(args: Any) -> Resources:
    """`args.judge_resources`, made at the first call (also where no worker runs)."""
    found: Resources | None = getattr(args, "judge_resources", None)
    if found is None:
        found = args.judge_resources = Resources(args)
    return found


def speaks_openai(url: str, model: str | None) -> bool:
    """Whether an address is an OpenAI-compatible one rather than an engine's own: it has a path
    such as `/v1`, or comes with a model name."""
    path = urlsplit(url).path
    return bool(model) or path.startswith("/v") or "/v1" in path or "/chat/" in path


def _server(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _get(args: Any, name: str, default: Any) -> Any:
    value = getattr(args, name, None)
    return default if value is None else value


def _path(args: Any, name: str) -> str:
    value = getattr(args, name, None)
    if not value:
        raise ConfigError(f"the judge needs the model's folder (args.{name}) for its tokenizer")
    return str(value)
