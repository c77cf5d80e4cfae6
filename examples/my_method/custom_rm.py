"""A reward of your own: copy this file, change it, and pass it with

    openclaw-rl up --model ... --custom-rm-path ./my_method/custom_rm.py

The judge calls `custom_rm(args, sample)` for each reply once it is known what happened next.
`sample.metadata` has: `messages` (the request), `reply`, `next_state` (what followed: the user's
message or the tools' results), `tools`, `session_id`, `turn_id`, `finish_reason`. `sample.response`
is the reply as the model wrote it.

Return a number (0 or None: nothing to learn), or a dict with any of `score`, `hint` (what the reply
should have been told: the teacher scores it for you), and, if you ask a teacher yourself,
`teacher_log_probs` (one a token of the reply) or `teacher_topk` (`{"ids": ..., "log_probs": ...}`,
K a token; with --opd-top-k the only one that counts). An exception, a timeout or NaN drops that one
turn, with the reason in `openclaw-rl status`. Raise `openclaw_rl.errors.EngineUnavailable` to have
the turn judged again later.
"""

from openclaw_rl.rewards import feedback

MAX_WORDS = 120
HINT = f"Keep the answer under {MAX_WORDS} words."


async def custom_rm(args, sample, **kwargs):
    """What the user says decides; where the user says nothing, a house rule does."""
    reward = await feedback.custom_rm(args, sample)
    if reward["score"] == 0 and len(sample.response.split()) > MAX_WORDS:
        return {"score": -0.5, "hint": HINT}
    return reward
