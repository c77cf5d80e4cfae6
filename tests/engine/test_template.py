"""The short way to render a template gives what `apply_chat_template` gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from openclaw_rl.engine.template import ChatTemplate
from tests.fakes.model import tiny_tokenizer
from tests.fakes.templates import CHATML, QWEN3_LIKE

TEXTS = st.text("ab<>\n |im_end", max_size=12)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS}),
        st.fixed_dictionaries(
            {"role": st.just("assistant"), "content": TEXTS},
            optional={"reasoning_content": TEXTS | st.none(), "items": TEXTS},
        ),
        st.fixed_dictionaries({"role": st.just("tool"), "content": TEXTS}),
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="module", params=[CHATML, QWEN3_LIKE], ids=["chatml", "qwen3"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> object:
    folder: Path = tmp_path_factory.mktemp("template")
    return AutoTokenizer.from_pretrained(tiny_tokenizer(folder, template=request.param))


@settings(max_examples=60, deadline=None)
@given(messages=MESSAGES, thinking=st.booleans())
def test_the_short_way_gives_the_same_text(
    tokenizer: object, messages: list[dict[str, object]], thinking: bool
) -> None:
    template = ChatTemplate(tokenizer)
    kwargs = {"enable_thinking": thinking}
    assert template._alias is not None
    assert template.render(messages, None, kwargs) == template._by_transformers(
        messages, None, kwargs
    )


def test_a_template_that_reads_a_method_of_a_message_is_rendered_alike(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.items() | list | length }}{{ m.role }};{% endfor %}"
    made = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path, template=source))
    template = ChatTemplate(made)
    messages = [{"role": "user", "content": "x", "items": "y"}]
    assert template.render(messages, None, {}) == "3user;"


def test_where_the_short_way_differs_it_is_not_taken(
    tokenizer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatTemplate, "_shortly", lambda *_: "something else")
    template = ChatTemplate(tokenizer)
    assert template._alias is None
    assert "hello" in template.render([{"role": "user", "content": "hello"}], None, {})
