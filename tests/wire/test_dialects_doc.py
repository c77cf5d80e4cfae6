"""docs/dialects.md names every key that the code knows, and where it says so."""

import re
from pathlib import Path

import pytest

from openclaw_rl.wire import anthropic, chat

DOC = (Path(__file__).parents[2] / "docs" / "dialects.md").read_text()
CHAT, MESSAGES = DOC.split("## Chat Completions")[1].split("## Anthropic Messages")


def rows(text, word):
    """The keys of the table's rows that say `word`."""
    found = [line for line in text.splitlines() if line.startswith("|") and word in line]
    return set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in found)))


@pytest.mark.parametrize(("text", "module"), [(CHAT, chat), (MESSAGES, anthropic)])
def test_every_key_is_in_the_docs(text, module):
    assert set(module.IGNORED) <= rows(text, "ignored")
    assert set(module.SHAPES) <= rows(text, "refused")
    table = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    named = set(re.findall(r"`(\w+)[`.]", table))
    assert set(module.TAKEN) - named == set()
