"""A reward of your own: copy this file, change it, and pass it with

    openclaw-rl up --model ... --custom-rm-path ./my_method/custom_rm.py

The judge calls `custom_rm(args, sample)` for each reply once it is known what happened next.
`sample.response` is the reply as the model wrote it; `sample.metadata` has the `messages` of the
request, `reply`, `next_state` (what followed: the user's message or the tools' results) and more.
Return a number (0 or None: nothing to learn) or a dict with `score`, `hint` (what the reply should
have been told), or both. All of it is in `openclaw_rl/rewards/README.md`.
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
