"""What a reward function sees, how it is called, and what it may return (see the README of
`rewards/`).

Guarantees: a sample holds the recorded tokens, log-probs and versions, and copies in `metadata`, so
that a reward cannot change the turn. A reward can neither block the event loop by computing in a
plain function nor end the process. A `Verdict` that was read holds only finite scores, and teacher
values (and rows of candidates) that are one for each token of the response; everything else is a
`BadReward` with the reason that the turn is dropped for.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from openclaw_rl.errors import HookError
from openclaw_rl.hooks import Sample
from openclaw_rl.types import TopK, Turn, Verdict

RewardFn = Callable[..., Any]

TEACHER_KEYS = frozenset({"teacher_log_probs", "teacher_topk"})
"""Keys by which a reward says that it has settled the teacher's part, even with None."""


class BadReward(HookError):
    """The reward cannot be used. `reason` is what the turn is dropped for."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def turn_sample(turn: Turn, response: str) -> Sample:
    """One turn, as a reward sees it: `tokens` is prompt + output, the response is the output."""
    messages = [dict(message) for message in turn.messages]
    return Sample(
        prompt=messages,
        tokens=[*turn.prompt_ids, *turn.output_ids],
        response=response,
        response_length=len(turn.output_ids),
        loss_mask=[1] * len(turn.output_ids),
        weight_versions=list(turn.output_versions),
        rollout_log_probs=None if turn.off_policy else list(turn.output_logprobs),
        session_id=turn.session_id,
        status=Sample.Status.TRUNCATED if turn.truncated else Sample.Status.COMPLETED,
        metadata={
            "turn_id": turn.turn_id,
            "session_id": turn.session_id,
            "messages": messages,
            "reply": dict(turn.reply),
            "next_state": [dict(message) for message in turn.next_state or ()],
            "tools": [dict(tool) for tool in turn.tools],
            "template_kwargs": dict(turn.template_kwargs),
            "sampling": dict(turn.sampling),
            "finish_reason": turn.finish_reason,
            "off_policy": turn.off_policy,
            "student_topk": turn.topk.as_dict() if turn.topk is not None else None,
        },
    )


async def call_reward(reward_fn: RewardFn, args: Any, sample: Sample) -> Any:
    """The reward's result within `args.judge_timeout` seconds. Raises what the reward raises,
    `BadReward` where it wants to end the process, and `TimeoutError`."""
    try:
        async with asyncio.timeout(args.judge_timeout):
            if inspect.iscoroutinefunction(reward_fn):
                return await reward_fn(args, sample)
            result = await _in_thread(reward_fn, args, sample)
            return await result if inspect.isawaitable(result) else result
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # ours, not the reward's
        raise BadReward("reward_failed", "the reward was cancelled") from None
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        kind = type(error).__name__
        raise BadReward("reward_failed", f"the reward raised {kind}") from None


async def _in_thread(function: RewardFn, *values: Any) -> Any:
    """Run in a daemon thread of its own: a function that never returns must neither use up the
    pool that the journal needs nor keep the process from ending."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function(*values))
        except StopIteration:
            future.set_exception(RuntimeError("StopIteration"))  # asyncio does not take one
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await asyncio.wrap_future(future)


def read_reward(result: Any, response_length: int, reward_key: str | None = None) -> Verdict:
    """Read a float, None, or a dict with `score` (or `reward_key`), `hint`, `teacher_log_probs`,
    `teacher_topk` (`{"ids": ..., "log_probs": ...}`, each [tokens][K]), and optionally `votes` and
    `abstained`. Raises `BadReward`."""
    if not isinstance(result, Mapping):
        return Verdict(score=_number(result))
    key = reward_key if reward_key and reward_key in result else "score"
    if not ({key, "hint", "abstained"} | TEACHER_KEYS) & result.keys():
        wanted = f"{reward_key!r} or 'score'" if reward_key else "'score'"
        raise BadReward("reward_invalid", f"the reward is a dict without {wanted}")
    hint = result.get("hint")
    if not isinstance(hint, str | None):
        raise BadReward("reward_invalid", f"the hint is {type(hint).__name__}, not text")
    return Verdict(
        score=_number(result.get(key)),
        hint=(hint or "").strip() or None,
        teacher_log_probs=_log_probs(result.get("teacher_log_probs"), response_length),
        teacher_topk=_topk(result.get("teacher_topk"), response_length),
        votes=tuple(map(_number, result.get("votes") or ())),
    )


_NOT_NUMBERS = (TypeError, ValueError, KeyError, OverflowError, RuntimeError)
"""What reading a reward's numbers, lists or tensors may raise."""


def _number(value: Any) -> float | None:
    """A score; None says "no opinion". Tensors and numpy numbers of one element are numbers."""
    if value is None:
        return None
    try:
        number = None if isinstance(value, str | bytes) else float(value)
    except _NOT_NUMBERS:
        number = None
    if number is None or not math.isfinite(number):
        reason = "reward_invalid" if number is None else "reward_nan"
        raise BadReward(reason, f"the score ({type(value).__name__}) is not a finite number")
    return number


def _log_probs(values: Any, length: int) -> list[float] | None:
    """A value for each token, NaN where the teacher has none."""
    if values is None:
        return None
    try:
        numbers = [math.nan if value is None else float(value) for value in values]
    except _NOT_NUMBERS:
        numbers = []
    if len(numbers) != length:
        raise BadReward("reward_invalid", f"teacher_log_probs is not a list of {length} numbers")
    return [value if math.isfinite(value) else math.nan for value in numbers]


def _topk(value: Any, length: int) -> TopK | None:
    try:
        topk = None if value is None else TopK.of_mapping(value, length)
    except _NOT_NUMBERS:
        what = f"no lists of ids and log_probs for {length} tokens"
        raise BadReward("reward_invalid", f"teacher_topk: {what}") from None
    return topk if topk is not None and topk.known else None


def where_of(error: BaseException) -> str:
    """Type and place of an error. Its message may hold conversation text and is left out."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
