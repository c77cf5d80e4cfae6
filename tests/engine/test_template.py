"""A template is rendered as `apply_chat_template` renders it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from openclaw_rl.engine.template import ChatTemplate
from openclaw_rl.errors import EngineRefused
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
def test_the_text_is_that_of_transformers(
    tokenizer: Any, messages: list[dict[str, Any]], thinking: bool
) -> None:
    assert ChatTemplate(tokenizer).render(
        messages, None, {"enable_thinking": thinking}
    ) == tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )


def test_a_template_that_reads_a_method_of_a_message_is_rendered_alike(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.items() | list | length }}{{ m.role }};{% endfor %}"
    made = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path, template=source))
    messages = [{"role": "user", "content": "x", "items": "y"}]
    assert ChatTemplate(made).render(messages) == "3user;"


def test_what_a_message_lacks_is_named_as_by_transformers(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.author.name }}{% endfor %}"
    made = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path, template=source))
    for _ in range(2):
        with pytest.raises(EngineRefused, match="'dict object' has no attribute 'author'"):
            ChatTemplate(made).render([{"role": "user", "content": "x"}])


def test_where_the_short_way_differs_it_is_not_taken(tokenizer: Any) -> None:
    class Other:
        """A later `transformers` that chooses its template in another way."""

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def get_chat_template(self, *_: object) -> str:
            return "something else"

    assert "hello" in ChatTemplate(Other()).render([{"role": "user", "content": "hello"}])
