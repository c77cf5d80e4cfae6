"""Small conversations for the session tests."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from openclaw_rl.session.identity import RequestView
from openclaw_rl.session.tracker import Placement, Tracker
from openclaw_rl.types import Turn
from openclaw_rl.wire.chat import parse_messages

REQUESTS = Path(__file__).parents[1] / "fixtures" / "openclaw_requests"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, *calls: tuple[str, str, str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, name, arguments in calls
        ]
    return message


def tool(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def view(*messages: dict[str, Any], session: str | None = None, **kwargs: Any) -> RequestView:
    headers = dict(kwargs.pop("headers", {}))
    if session is not None:
        headers["x-session-id"] = session
    return RequestView(messages=messages, headers=headers, **kwargs)


class Client:
    """Plays requests against a tracker; time goes by one second a request."""

    def __init__(self, tracker: Tracker | None = None) -> None:
        self.tracker = tracker or Tracker()
        self.now = 0.0
        self.heads: dict[str, Turn] = {}
        self.ids = (f"t{n}" for n in itertools.count(1))

    def place(self, request: RequestView) -> Placement:
        self.now += 1
        return self.tracker.place(request, self.now)

    def commit(self, placement: Placement, reply: dict[str, Any]) -> str:
        head = self.tracker.commit(placement, next(self.ids), reply)
        self.heads[head.turn_id] = head
        return head.turn_id

    def turn(self, request: RequestView, reply: dict[str, Any]) -> tuple[Placement, str]:
        placement = self.place(request)
        return placement, self.commit(placement, reply)


def texts(placement: Placement) -> list[str] | None:
    """The next state's texts, or None."""
    if placement.next_state is None:
        return None
    return [message["content"] for message in placement.next_state]


def recorded(name: str) -> RequestView:
    """A recorded OpenClaw request, as the gateway would show it to the tracker."""
    data = json.loads((REQUESTS / f"{name}.json").read_text("utf-8"))
    body = data["body"]
    return RequestView(
        messages=parse_messages(body["messages"]),
        headers={key.lower(): value for key, value in data["headers"]},
        hints={k: body[k] for k in ("prompt_cache_key", "user", "metadata") if k in body},
        has_tools=bool(body.get("tools")),
    )


def before(request: RequestView, length: int) -> RequestView:
    """An earlier request of the same conversation: the first `length` messages."""
    return RequestView(
        messages=request.messages[:length],
        headers=request.headers,
        hints=request.hints,
        has_tools=request.has_tools,
    )
