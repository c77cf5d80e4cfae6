"""Practice: while nobody talks, the policy answers past questions again, and a teacher that has the
person's standing rule in view says how likely it would have said the same.

Guarantees: a practice turn is a turn like any other (its exact tokens, log-probs and versions from
the policy's engine, a verdict, a session of its own with source `practice`), so it is counted,
leased and trained as they are. It only fills up what live turns leave open of a batch; there are at
most `args.practice` of them for each live turn that was judged; none are made while training is
paused or while the person is content. A policy or teacher that is away costs the attempt, never a
value.

A reply that the teacher finds hardly likelier after its own question than after others says nothing
of it: such a turn is blamed, not distilled. A small teacher, pushed to be brief, likes "I am a
helpful assistant" itself; distilled, it spreads to every question.

Sources: one rule for many questions instead of one hint for one reply, arXiv 2605.11182; prompt
distillation, Snell et al. 2022 (arXiv 2209.15189).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openclaw_rl.engine.types import Reply, collect
from openclaw_rl.errors import EngineError, OpenClawRLError
from openclaw_rl.guards.measures import vague
from openclaw_rl.hooks import Sample
from openclaw_rl.journal.store import Journal
from openclaw_rl.journal.turns import PRACTICE, Opinion
from openclaw_rl.judge.models import Models
from openclaw_rl.judge.reward import turn_sample
from openclaw_rl.types import TopK, Turn, Verdict

log = logging.getLogger(__name__)

OPINIONS = 16
"""The newest opinions of the person: whether they are content, and what the standing rule is."""
RECENT = 4
"""Live turns for which the limit on practice is counted: a long time of content buys no burst."""
CONTENT = 0.8
"""No practice where this share of them is praise: it would only wear down what pleases."""
ANCHORS = (
    "Write a poem about autumn.",
    'Translate "thank you" into Spanish.',
    "What is 9 times 6?",
    "Name five animals.",
    "Write a Python function that reverses a string.",
    "Tell me a short story about a dragon.",
    "Write an email to my landlord about a broken heater.",
    "List three reasons to read books.",
    "Summarize the plot of Cinderella.",
    "Write a haiku about rain.",
    "Convert 10 miles to kilometers.",
    "Write a SQL query that selects all users.",
    "Give me a recipe for pancakes.",
    "Fix the grammar: he go to school yesterday.",
    "Write a product description for a lamp.",
    "Invent a name for a cat.",
    "What is the square root of 81?",
    "Write a dialogue between two friends.",
    "Name the planets of the solar system.",
    "Write a limerick.",
    "Make a packing list for a weekend trip.",
    "Explain this code: for i in range(3): print(i)",
    "Describe a sunset to someone who is blind.",
    "Draft a toast for a wedding.",
)
OTHERS = 3
"""Other questions after which the teacher scores a reply as well."""
OPENINGS, LONGEST_OPENING = 64, 2048
"""Past questions to choose from, and the most tokens of such a prompt."""
LOOK_SECONDS = 2.0


StandingRule = Callable[[Any, Sequence[str]], Awaitable[str | None]]
"""A hook: of what a person asked for, newest first, what holds for every reply; None: nothing."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Questions to answer again (turns, one of them perhaps twice), how many anchors beside them,
    and the opinions, newest first, that the rule is made of."""

    questions: Sequence[Turn]
    anchors: int
    opinions: Sequence[Opinion]


class Practice:
    """See the module. `args`: those of the judge."""

    def __init__(
        self,
        journal: Journal,
        models: Models,
        args: Any,
        standing_rule: StandingRule,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._journal, self._models, self._args, self._clock = journal, models, args, clock
        self._standing_rule = standing_rule
        self._random = random.Random()

    async def run(self) -> None:
        """Practise whenever nobody has talked for `args.practice_idle_seconds`, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                newest = await asyncio.to_thread(self._journal.newest_turn)
                if self._clock() - newest >= self._args.practice_idle_seconds:
                    await self.fill()
            except OpenClawRLError as error:
                log.warning("no practice: %s", error)

    async def fill(self) -> int:
        """Make the turns that the next batch lacks; how many, 0 where there is no reason to.
        Raises `JournalError`, and `EngineError` where the rule's author is away."""
        plan = await asyncio.to_thread(self._plan)
        if plan is None:
            return 0
        rule = await self._rule([opinion.hint for opinion in plan.opinions if opinion.hint])
        if rule is None:
            self._models.count("practice_without_rule")
            return 0
        anchors = [
            await self._anchor(plan.questions[0], text)
            for text in self._random.sample(ANCHORS, min(plan.anchors, len(ANCHORS)))
        ]
        made = await asyncio.gather(
            *(self._practise(turn, rule, plan.questions) for turn in plan.questions),
            *(self._practise(turn, None) for turn in anchors),
        )
        log.info("practice: %d of %d turns made", sum(made), len(made))
        return sum(made)

    async def _rule(self, corrections: Sequence[str]) -> str | None:
        """What the hook makes of them. Raises `EngineError` where its author is away."""
        try:
            return await self._standing_rule(self._args, corrections)
        except OpenClawRLError:
            raise
        except Exception as error:  # a user's hook; its words may quote a conversation
            self._models.count("standing_rule_failed")
            log.warning("no practice: the standing rule's hook raised %s", type(error).__name__)
            return None

    def _plan(self) -> Plan | None:
        journal, args = self._journal, self._args
        rollout = journal.endpoint("rollout")  # nobody trains before it was published
        live, practised = journal.practised(RECENT)
        batch = 0 if rollout is None else int(rollout.info["batch_size"])
        lacking = batch - journal.outcomes().ready
        if not 0 < lacking <= args.practice * live - practised or "pause" in journal.asked():
            return None
        opinions = journal.opinions(OPINIONS)
        praise = sum((opinion.score or 0.0) > 0 for opinion in opinions)
        if not any(opinion.hint for opinion in opinions) or praise >= CONTENT * len(opinions):
            return None
        # Of the one who corrected last: their questions, their rule.
        owner = next(opinion.owner for opinion in opinions if opinion.hint)
        openings = journal.openings(owner, OPENINGS, LONGEST_OPENING)
        if not openings:
            return None
        anchors = round(lacking * args.practice_anchors)
        often = -(-lacking // len(openings))
        chosen = self._random.sample(openings * often, lacking - anchors)
        turns = {turn_id: turn for turn_id in chosen if (turn := journal.turn(turn_id))}
        own = [opinion for opinion in opinions if opinion.owner == owner]
        return Plan([turns[turn_id] for turn_id in chosen if turn_id in turns], anchors, own)

    async def _anchor(self, question: Turn, text: str) -> Turn:
        """A request of another kind, in the form of `question`."""
        system = [message for message in question.messages if message.get("role") == "system"]
        messages = (*system, {"role": "user", "content": text})
        prompt = await self._models.prompt(messages, question.tools, question.template_kwargs)
        return replace(question, messages=messages, prompt_ids=prompt)

    async def _practise(
        self, question: Turn, rule: str | None, others: Sequence[Turn] = ()
    ) -> bool:
        """One reply and what the teacher says of it, into the journal; whether there is one."""
        try:
            reply = await self._reply(question)
            if reply is None:
                return False
            turn = await self._turn(question, reply)
            sample = turn_sample(turn, str(turn.reply["content"]))
            values = await self._models.teach(sample, [rule or ""])
            if values is None:
                return False
            elsewhere = await self._elsewhere(question, sample, values.hint, others)
        except EngineError:
            self._models.count("practice_failed")
            return False
        verdict = Verdict(hint=rule, teacher_log_probs=values.log_probs, teacher_topk=values.topk)
        if elsewhere and vague(values.log_probs, elsewhere) and self._args.w_rl:
            self._models.count("practice_vague")
            verdict = Verdict(score=-1.0, hint=rule)
        await asyncio.to_thread(self._journal.record_practice, turn, verdict)
        return True

    async def _elsewhere(
        self, question: Turn, sample: Sample, hint: str, others: Sequence[Turn]
    ) -> list[Sequence[float]]:
        """The teacher's log-probs of the reply after other questions; none where they say nothing:
        the first calls of an agent may well be the same."""
        asked = {turn.request_hash: turn.messages for turn in others}
        asked.pop(question.request_hash, None)
        if question.tools:
            return []
        found = await asyncio.gather(*(
            self._models.teach(
                replace(sample, metadata={**sample.metadata, "messages": messages}), [hint]
            )
            for messages in self._random.sample(list(asked.values()), min(OTHERS, len(asked)))
        ))  # fmt: skip
        return [values.log_probs for values in found if values is not None]

    async def _reply(self, question: Turn) -> Reply | None:
        asked = {name: value for name, value in question.sampling.items() if name in _KEPT}
        sampling = asked | {"temperature": self._args.rollout_temperature}
        engine = await self._models.policy()
        rid = f"practice-{uuid.uuid4().hex}"
        reply = await collect(
            engine.generate(
                question.prompt_ids,
                sampling,
                rid=rid,
                top_logprobs=self._args.opd_top_k,
                interval=None,
            )
        )
        # What the journal would refuse to train (nothing said, no log-probs) is no practice.
        return reply if reply.ids and reply.logprobs is not None else None

    async def _turn(self, question: Turn, reply: Reply) -> Turn:
        name = f"{PRACTICE}-{uuid.uuid4().hex}"
        ended = reply.finish is not None and reply.finish.type == "stop"
        turn = Turn(
            turn_id=name,
            session_id=name,
            source=PRACTICE,
            owner=question.owner,
            kind_reason=f"{PRACTICE} of {question.session_id}",  # purged with it
            created=self._clock(),
            sampling={
                **{name: value for name, value in question.sampling.items() if name in _KEPT},
                "temperature": self._args.rollout_temperature,
            },
            finish_reason="stop" if ended else "length",
            truncated=not ended,
            prompt_ids=question.prompt_ids,
            output_ids=reply.ids,
            output_logprobs=reply.logprobs or (),
            output_versions=reply.versions,
            topk=TopK.of_candidates(reply.top, top_k) if (top_k := self._args.opd_top_k) else None,
            messages=question.messages,
            tools=question.tools,
            template_kwargs=question.template_kwargs,
        )
        text = await self._models.response_text(turn)
        return replace(turn, reply={"role": "assistant", "content": text})


_KEPT = frozenset({"max_new_tokens", "stop_token_ids", "stop"})
"""What a practice reply has of the sampling of its question: where it ends, not how it is drawn."""
