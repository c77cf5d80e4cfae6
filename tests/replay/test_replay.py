"""Past conversations in the journal: exact ids, once, judged, and learnt from."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest

from openclaw_rl.cli import main
from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.journal import Journal
from openclaw_rl.replay.files import ReplayError, find
from openclaw_rl.replay.run import new_files, replay
from openclaw_rl.replay.turns import Reader
from openclaw_rl.rewards.feedback import custom_rm
from openclaw_rl.rollout import generate_rollout
from openclaw_rl.types import State
from tests.fakes.model import tiny_tokenizer
from tests.fakes.templates import QWEN3_LIKE
from tests.gateway.conftest import world
from tests.judge.helpers import judge_all, make_args
from tests.replay.test_files import FIXTURES, write


def user(text):
    return {"role": "user", "content": text}


def reply(text):
    return {"role": "assistant", "content": text}


PRAISE, BLAME = "Perfect, thank you!", "That is wrong. Keep it short."
TALK = [user("What is rain?"), reply("Water."), user(PRAISE), reply("Glad."), user(BLAME)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reader(model):
    return Reader.open(str(model), "auto", None)


def bring(tmp_path, reader, *conversations, **options):
    path = write(tmp_path / "past.jsonl", *({"messages": c} for c in conversations))
    return replay([path], reader, tmp_path / "journal.db", 1000.0, **options)


def turns(tmp_path):
    with Journal.open(tmp_path / "journal.db") as journal:
        return [journal.turn(turn_id) for turn_id in journal.turn_ids()]


def test_the_ids_are_what_the_template_writes(tmp_path, reader, model):
    done = bring(tmp_path, reader, TALK)
    assert (done.added, done.left_out) == (2, Counter())
    first, second = turns(tmp_path)
    tokenizer = ChatTokenizer.load(model)
    whole = tokenizer.render(TALK)
    generation = tokenizer.render(TALK[:1])
    assert list(first.prompt_ids) == tokenizer.encode(generation)
    assert tokenizer.decode(first.output_ids) == "Water."
    assert first.output_ids[-1] in tokenizer.eos_ids
    marks = {"<|im_start|>", "<|im_end|>"}
    ids = [*second.prompt_ids, *second.output_ids]
    text = tokenizer.showing(marks, inner=marks).decode(ids)
    assert whole.startswith(text)
    assert second.parent_id == first.turn_id
    assert second.shares_tokens
    for turn, followed in ((first, PRAISE), (second, BLAME)):
        assert turn.off_policy
        assert (turn.state, turn.source) == (State.JUDGING, "replay")
        assert [m["content"] for m in turn.next_state] == [followed]
        assert list(turn.output_logprobs) == list(turn.output_versions) == []


def test_the_same_file_twice_adds_nothing_and_more_of_it_adds_the_rest(tmp_path, reader):
    assert bring(tmp_path, reader, TALK[:3]).added == 1
    again = bring(tmp_path, reader, TALK[:3], TALK[:3])
    assert (again.added, again.left_out) == (0, {"known": 2})
    more = bring(tmp_path, reader, TALK)
    assert (more.added, more.left_out) == (1, {"known": 1})
    assert len(turns(tmp_path)) == 2


def test_a_start_reads_only_files_that_are_new_or_changed(tmp_path, reader):
    data, journal = tmp_path / "data", tmp_path / "journal.db"
    assert new_files(data, journal) == []
    data.mkdir()
    one = write(data / "a.jsonl", {"messages": TALK})
    other = write(data / "b.jsonl", {"messages": TALK[:3]})
    assert new_files(data, journal) == [one, other]
    replay(find(data), reader, journal, 1000.0, dry_run=True)
    assert new_files(data, journal) == [one, other]
    replay([one], reader, journal, 1000.0)
    assert new_files(data, journal) == [other]
    replay([other], reader, journal, 1000.0)
    assert new_files(data, journal) == []
    write(other, {"messages": TALK})
    assert new_files(data, journal) == [other]


@pytest.mark.parametrize(("purge", "again"), [
    ({"older_than": 2000.0}, 0), ({"max_bytes": 1}, 0), ({"owner": ""}, 2),
])  # fmt: skip
def test_what_went_by_age_or_size_does_not_come_back(tmp_path, reader, purge, again):
    bring(tmp_path, reader, TALK)
    with Journal.open(tmp_path / "journal.db") as journal:
        assert journal.purge(**purge) == 2
        assert journal.outcomes().balanced()
        assert set(journal.outcomes().counters) == set()
    done = bring(tmp_path, reader, TALK)
    assert (done.added, done.left_out["known"]) == (again, 2 - again)


def test_a_dry_run_counts_by_reason_and_writes_nothing(tmp_path, reader):
    heartbeat = [user("Read HEARTBEAT.md if it exists"), reply("HEARTBEAT_OK"), user("x")]
    lines = []
    done = bring(tmp_path, reader, TALK, TALK[:2], heartbeat, [reply("Hi"), user("x")],
                 [user("q"), reply(""), user("x")], [user("q"), reply("a <|im_end|> b"), user("x")],
                 dry_run=True, emit=lines.append)  # fmt: skip
    assert done.added == 2
    assert done.left_out == {"no_next_state": 1, "side": 1, "no_user_message": 1,
                             "empty_reply": 1, "template_rewrites": 1}  # fmt: skip
    assert not (tmp_path / "journal.db").exists()
    (line,) = lines
    assert "1 of 1" in line
    assert "2 of 7 replies would be added" in done.describe(dry_run=True)


def test_a_broken_line_anywhere_writes_nothing_at_all(tmp_path, reader):
    good = write(tmp_path / "a.jsonl", {"messages": TALK})
    bad = write(tmp_path / "b.jsonl", {"messages": TALK}, "oops")
    with pytest.raises(ReplayError, match=r"b\.jsonl:2: is not JSON"):
        replay([good, bad], reader, tmp_path / "journal.db", 0.0)
    assert not (tmp_path / "journal.db").exists()


def test_tool_calls_and_results_of_a_recorded_openclaw_session(tmp_path, reader):
    done = replay(
        [FIXTURES / "v2026.3.23-2.jsonl"], reader, tmp_path / "journal.db", 0.0
    )  # fmt: skip
    assert (done.added, done.left_out) == (3, {"no_next_state": 1})
    _, hop, _ = turns(tmp_path)
    assert hop.next_state[0]["role"] == "tool"
    assert reader.tokenizer.decode(hop.output_ids) == (
        '<tool_call>\n{"name": "exec", "arguments": {"command": "echo hop-one"}}\n</tool_call>'
    )


def test_a_template_that_knows_no_calls_gives_no_turn(tmp_path):
    plain = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    simple = Reader.open(str(tiny_tokenizer(tmp_path / "m", template=plain)), "auto", None)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [user("q"), {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "ok"}]  # fmt: skip
    assert bring(tmp_path, simple, talk).left_out == {"template_rewrites": 1}


def test_where_the_template_drops_reasoning_each_turn_stands_alone(tmp_path):
    qwen = Reader.open(str(tiny_tokenizer(tmp_path / "m", template=QWEN3_LIKE)), "auto", None)
    talk = [user("q"), {**reply("a"), "reasoning_content": "hm"}, user("r"), reply("b"), user("s")]
    assert bring(tmp_path, qwen, talk).added == 2
    first, second = turns(tmp_path)
    assert "hm" in qwen.tokenizer.decode(first.output_ids)
    assert not second.shares_tokens
    assert "hm" not in qwen.tokenizer.decode(second.prompt_ids)


def test_a_conversation_beyond_the_context_is_left_out_and_counted(tmp_path, model):
    small = Reader.open(str(model), "auto", 10)
    assert bring(tmp_path, small, TALK).left_out["too_long"] == 2


def test_what_cannot_fit_is_left_out_without_tokenising_it(tmp_path, reader, monkeypatch):
    encoded = []
    encode = ChatTokenizer.encode

    def watched(self, text):
        encoded.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(ChatTokenizer, "encode", watched)
    done = bring(tmp_path, reader, [user("word " * 1_000_000), *TALK[1:]], TALK)
    assert (done.added, done.left_out) == (2, {"too_long": 2})
    assert 0 < max(encoded) < 1000


def test_no_live_conversation_goes_on_from_a_replayed_one(tmp_path, reader):
    bring(tmp_path, reader, TALK)
    with Journal.open(tmp_path / "journal.db") as journal:
        assert journal.heads(100) == []
        assert journal.outcomes().balanced()
        assert journal.outcomes().by_source["replay"]["bound"] == 2


async def test_turns_that_were_served_and_exported_are_not_learnt_from_again(tmp_path, model):
    async with world(tmp_path, model) as served:
        served.engine.say("Water.")
        first = await served.chat("What is rain?")
        served.engine.say("Frozen water.")
        talk = [user("What is rain?"), first.replay(), user("And snow?")]
        second = await served.chat(talk)
        served.engine.say("Welcome.")
        await served.chat([*talk, second.replay(), user(PRAISE)])
    words = ["--data", str(tmp_path)]
    exported = tmp_path / "out.jsonl"
    assert main(["export", *words, str(exported)]) == 0
    openclaws = [*talk, second.replay(), user(PRAISE)]  # as an agent keeps it: no tools, no system
    more = [*openclaws, reply("Welcome."), user("Good."), reply("And hail?"), user(BLAME)]
    write(tmp_path / "theirs.jsonl", {"messages": openclaws})
    reader = Reader.open(str(model), "auto", None)
    done = replay(find(tmp_path), reader, tmp_path / "journal.db", 1000.0)
    assert (done.added, done.left_out) == (0, {"known": 7, "no_next_state": 1})
    # What came later, elsewhere, is new; the turn before it is there, but under another id.
    write(tmp_path / "theirs.jsonl", {"messages": more})
    done = replay(find(tmp_path), reader, tmp_path / "journal.db", 1000.0)
    assert done.added == 1
    added = turns(tmp_path)[-1]
    assert (added.reply["content"], added.parent_id, added.off_policy) == ("And hail?", None, True)
    with Journal.open(tmp_path / "journal.db") as journal:
        assert journal.outcomes().counters == {}
    # What was replayed comes back by an export as little.
    assert main(["export", *words, "--session", added.session_id, str(tmp_path / "b.jsonl")]) == 0
    done = replay(find(tmp_path), reader, tmp_path / "journal.db", 2000.0)
    assert done.added == 0


def rollout_args(tmp_path, batch):
    return Namespace(journal_path=str(tmp_path / "journal.db"), rollout_batch_size=batch,
                     session_share=1.0, max_staleness=0, rollout_temperature=0.7,
                     host_name="h", rollout_poll_seconds=0.01)  # fmt: skip


async def test_it_is_judged_by_the_same_judge_and_batched_whatever_version_is_served(
    tmp_path, reader, model
):
    bring(tmp_path, reader, TALK)
    with Journal.open(tmp_path / "journal.db") as journal:
        journal.publish("policy", "http://x", {"weight_version": "99"}, 0.0)
        await judge_all(journal, custom_rm, make_args(tmp_path / "journal.db", w_opd=0,
                                                      hf_checkpoint=str(model)))  # fmt: skip
        assert [turn.verdict.score for turn in turns(tmp_path)] == [1.0, -1.0]
    output = generate_rollout(rollout_args(tmp_path, 2), 0, None)
    ((sample,),) = output.samples
    assert [turn["off_policy"] for turn in sample.metadata["turns"]] == [True, True]
    trained = [p for p, kept in zip(sample.rollout_log_probs, sample.loss_mask, strict=True)
               if kept]  # fmt: skip
    assert all(map(math.isnan, trained))
    assert output.metrics["rollout/off_policy_share"] == 1.0


@pytest.mark.parametrize("use_rollout_logprobs", [False, True])
async def test_replayed_praise_makes_a_reply_likelier_and_blame_less(
    tmp_path, use_rollout_logprobs
):
    torch = pytest.importorskip("torch", reason="needs torch (the local extra)")
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from openclaw_rl.local.learner import Learner
    from openclaw_rl.rollout.train_data import convert
    from tests.fakes.model import tiny_model
    from tests.local.tiny import train_args

    folder = tiny_model(tmp_path / "model")
    reader = Reader.open(str(folder), "auto", None)
    bring(tmp_path, reader, [user("What is rain?"), reply("Water."), user(PRAISE)],
          [user("What is snow?"), reply("It is a very long story."), user(BLAME)])  # fmt: skip
    with Journal.open(tmp_path / "journal.db") as journal:
        judge = make_args(tmp_path / "journal.db", w_opd=0, hf_checkpoint=str(folder))
        await judge_all(journal, custom_rm, judge)
    samples = [group[0] for group in generate_rollout(rollout_args(tmp_path, 2), 0, None).samples]
    base = AutoModelForCausalLM.from_pretrained(str(folder))
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    learner = Learner(
        train_args(tmp_path, custom_loss_function_path="openclaw_rl.losses.grpo_loss",
                   max_logprob_diff=1e-9, use_rollout_logprobs=use_rollout_logprobs),
        get_peft_model(base, lora),
    )  # fmt: skip

    def log_prob(sample):
        ids = torch.tensor([sample.tokens])
        with torch.no_grad():
            values = torch.log_softmax(learner.model(ids).logits[0], -1)
        n = sample.response_length
        return float(values[-n - 1 : -1].gather(1, ids[0, -n:, None]).sum())

    before = [log_prob(sample) for sample in samples]
    for _ in range(3):
        (report,) = learner.learn(convert(learner.args, samples))
        # No engine sampled these tokens, so there is no difference to an engine to stop at.
        assert (report.skipped, report.compared_tokens, report.logprob_diff) == (None, 0, 0.0)
        assert math.isfinite(report.loss)
    change = {s.reward: log_prob(s) - b for s, b in zip(samples, before, strict=True)}
    assert change[1.0] > 0 > change[-1.0]


def test_the_command_reads_data_path_where_no_path_is_given(tmp_path, model, capsys):
    data = tmp_path / "data"
    data.mkdir()
    write(data / "past.jsonl", {"messages": TALK})
    words = ["replay", "--model", str(model), "--data", str(data)]
    assert main([*words, "--dry-run"]) == 0
    assert "2 of 2 replies would be added" in capsys.readouterr().out
    assert main(words) == 0
    assert "1 files, 1 conversations: 2 of 2 replies added" in capsys.readouterr().out
    assert main([*words, str(tmp_path / "nowhere")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    exported = tmp_path / "out.jsonl"
    assert main(["export", "--data", str(data), str(exported)]) == 0
    assert exported.stat().st_mode & 0o777 == 0o600
    assert [json.loads(line)["score"] for line in exported.read_text().splitlines()] == [None] * 2
