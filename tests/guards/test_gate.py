"""Each limit is tripped by replies that deserve it, and by nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from openclaw_rl.config import GuardsConfig
from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.errors import ConfigError
from openclaw_rl.guards import Guard, Probes, batch_refusal, best_of, refusal
from openclaw_rl.journal import Journal, Version
from tests.fakes.model import tiny_tokenizer
from tests.guards.test_measures import AIR, BALLOON, GLAD, HEALTHY
from tests.journal.build import record

BASE = [*HEALTHY, "A key lifts small pins in the lock until it can turn."]


@dataclass
class Script:
    """A prober whose tokens are characters: it says `replies`, and finds each token of them as
    likely as told. It writes down what the base was asked."""

    replies: list[str]
    own: float = -0.5
    under_base: float = -0.9
    of_base: float = -0.6
    kept: float = -0.7
    elsewhere: float = -4.0
    """After another question than its own."""
    asked_of_base: list[Sequence[int]] = field(default_factory=list)

    def reply(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, base: bool = False
    ) -> list[list[int]]:
        if base:
            self.asked_of_base += prompts
        said = BASE if base else self.replies
        return [list(map(ord, said[p[0] % len(said)][:max_tokens])) for p in prompts]

    def score(
        self, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]], *, base: bool
    ) -> list[list[float]]:
        rotated = list(prompts) != sorted(prompts)

        def value(prompt: Sequence[int], reply: Sequence[int]) -> float:
            if base and rotated:
                return self.elsewhere
            if base:
                own = "".join(map(chr, reply)) in BASE
                return self.of_base if own else self.under_base
            return self.kept if prompt[0] >= 100 else self.own

        return [[value(p, r)] * len(r) for p, r in zip(prompts, replies, strict=True)]


def guard(tmp_path: Any, script: Script, **limits: Any) -> Guard:
    def decode(ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    probes = Probes([[0], [1], [2], [3]], [[100], [101]], decode, {0})
    config = GuardsConfig(**{"probe_tokens": 80, **limits})
    return Guard(config, Journal.open(tmp_path / "j.db"), probes, script)


SOUND = [
    "Red leaves lost their green in the cold nights.",
    "See whether its wheels run straight.",
    "Try lemon and salt, and wait an hour.",
    "Pins inside fall into place for the right key only.",
]


def test_sound_replies_are_served(tmp_path):
    why, figures = guard(tmp_path, Script(SOUND)).examine()
    assert why == ""
    assert figures["sound"] == 1
    assert figures["kl"] == pytest.approx(0.4)
    assert figures["harm"] == pytest.approx(-0.1)
    assert figures["logprob"] == pytest.approx(-0.9)
    assert figures["length"] == pytest.approx(sum(map(len, SOUND)) / 4)
    for name in ("empty", "cut", "repetition", "vague"):
        assert figures[name] == 0


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("repetition", Script([BALLOON, AIR, *SOUND[2:]])),
        ("similarity", Script([GLAD[0], GLAD[1], GLAD[0], GLAD[0]])),
        ("empty", Script([".", *SOUND[1:]])),
        ("cut", Script([f"{a} {b} {b}" for a, b in zip(SOUND, BASE, strict=True)])),
        ("kl", Script(SOUND, own=-0.1, under_base=-1.3)),
        ("harm", Script(SOUND, kept=-0.9)),
        ("drift", Script(SOUND, own=-1.4, under_base=-2.0)),
        ("kl", Script(SOUND, own=math.nan)),
        ("vague", Script(SOUND, elsewhere=-1.0)),
    ],
)
def test_each_limit_refuses_and_0_is_no_limit(tmp_path, name, script):
    why, _ = guard(tmp_path, script).examine()
    assert [part.split()[0] for part in why.split(", ")] == [name]
    assert guard(tmp_path, script, **{f"max_{name}": 0}).examine()[0] == ""


def test_the_session_that_said_one_thing_to_four_questions_is_refused(tmp_path):
    """Version 11 of one person's run, of which gradient norm and reward said nothing."""
    why, figures = guard(tmp_path, Script([AIR] * 4)).examine()
    assert "repetition 1.00 (limit 0.25)" in why
    assert "similarity" in why
    assert figures["sound"] == 0


def test_a_fall_below_the_best_version_is_refused_though_the_base_is_as_bad():
    found = {"kl": 0.1, "harm": 0.0, "logprob": -1.0, "vague": 0.0, "empty": 0.0, "cut": 0.0,
             "repetition": 0.5, "similarity": 0.1, "sound": 0.5}  # fmt: skip
    assert refusal(found, found, None, GuardsConfig()) == ""
    assert refusal(found, found, {"sound": 0.7}, GuardsConfig()) == ""
    assert refusal(found, found, {"sound": 0.9}, GuardsConfig()) == "fall 0.40 (limit 0.25)"


def test_the_best_version_was_served_and_measured_the_newest_of_equals():
    def version(n: int, state: Any = "served", **figures: float) -> Version:
        return Version(version=n, state=state, figures=figures)

    bad = version(6, "refused", sound=1.0)
    made = [bad, version(5, sound=0.4), version(4, sound=0.8), version(3, sound=0.8), version(0)]
    best = best_of(made)
    assert best is not None
    assert best.version == 4
    assert best_of([bad, version(0)]) is None


def test_the_best_version_is_read_from_the_journal(tmp_path):
    watching = guard(tmp_path, Script([SOUND[0], SOUND[0], *SOUND[2:]]), max_similarity=0)
    assert watching.examine()[0] == ""
    watching.journal.record_version(Version(version=1, state="served", figures={"sound": 1.0}))
    assert watching.examine()[0] == "fall 0.50 (limit 0.25)"


def test_the_base_is_asked_each_prompt_once_while_it_is_in_use(tmp_path):
    script = Script(SOUND)
    watching = guard(tmp_path, script)
    watching.examine()
    assert script.asked_of_base == [[0], [1], [2], [3], [100], [101]]
    watching.journal.record_turn(record("t1", prompt_ids=[7, 8]))
    watching.examine()
    watching.examine()
    assert script.asked_of_base[6:] == [[7, 8]]


# -- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "replies", "sessions", "why"),
    [
        ("max_batch_empty", [".", "", *HEALTHY[:2]], "abcd", "empty"),
        ("max_batch_looping", [BALLOON, BALLOON, *HEALTHY[:2]], "abcd", "looping"),
        ("max_batch_session", HEALTHY, "aab", "one_session"),
    ],
)
def test_a_batch_beyond_a_limit_is_not_learnt(limit, replies, sessions, why):
    off = {"max_batch_empty": 0, "max_batch_looping": 0, "max_batch_session": 0}
    assert batch_refusal(replies, sessions, GuardsConfig(**off)) == ""
    assert batch_refusal(replies, sessions, GuardsConfig(**off | {limit: 0.4})) == why
    assert batch_refusal(replies, sessions, GuardsConfig(**off | {limit: 0.7})) == ""


def test_one_person_may_fill_a_batch_by_default():
    assert batch_refusal(HEALTHY, "aaa", GuardsConfig()) == ""


# -- probes --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: Any) -> ChatTokenizer:
    return ChatTokenizer.load(tiny_tokenizer(tmp_path_factory.mktemp("model")))


def prompt(tokenizer: ChatTokenizer, *messages: dict[str, str]) -> list[int]:
    return tokenizer.encode(tokenizer.render(list(messages)))


def test_the_users_own_probes_stand_beside_the_shipped_ones(tmp_path, tokenizer):
    shipped = Probes.load("", tokenizer)
    assert len(shipped.questions) >= 12
    assert len(shipped.unrelated) >= 8
    lines = tmp_path / "own.txt"
    lines.write_text("Who are you?\n\n  Where to?  \n")
    own = Probes.load(str(lines), tokenizer).questions[len(shipped.questions) :]
    assert own == [
        prompt(tokenizer, {"role": "user", "content": text})
        for text in ("Who are you?", "Where to?")
    ]
    talk = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    messages = tmp_path / "own.jsonl"
    messages.write_text(f"{json.dumps(talk)}\n{json.dumps({'messages': talk})}\n")
    own = Probes.load(str(messages), tokenizer).questions[len(shipped.questions) :]
    assert own == [prompt(tokenizer, *talk)] * 2


@pytest.mark.parametrize("line", ["not json", "7", '["text"]', '{"prompt": "Hi"}'])
def test_probes_that_are_none_are_one_line_without_their_text(tmp_path, tokenizer, line):
    path = tmp_path / "own.jsonl"
    path.write_text(f'[{{"role": "user", "content": "Hi"}}]\n{line}\n')
    with pytest.raises(ConfigError, match="line 2: not a list of messages") as caught:
        Probes.load(str(path), tokenizer)
    assert "\n" not in str(caught.value)
    assert "Hi" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        Probes.load(str(tmp_path / "none.txt"), tokenizer)
