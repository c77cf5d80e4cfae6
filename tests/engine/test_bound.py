"""The bound on a text's tokens is never above what the tokenizer makes of it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from openclaw_rl.engine.bound import TokenBound
from tests.fakes.model import tiny_tokenizer

TEXTS = st.text() | st.text("ab <|im_start|>\n\u3000") | st.text("\u1fb3\u0301\u0308\u03b1 a")


@pytest.fixture(scope="module", params=[None, normalizers.NFC()], ids=["plain", "nfc"])
def backend(request, tmp_path_factory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("bound")
    made = Tokenizer.from_file(str(tiny_tokenizer(folder) / "tokenizer.json"))
    if request.param is not None:
        made.normalizer = request.param
    return made


@given(text=TEXTS)
def test_never_more_than_there_are(backend, text):
    assert TokenBound(backend).fewest(text, 0) <= len(backend.encode(text).ids)


def test_a_long_text_has_many(backend):
    assert TokenBound(backend).fewest("word" * 100_000, 4096) >= 4096
    assert TokenBound(backend).fewest("word " * 10, 4096) == 0


def test_nothing_is_told_of_other_kinds():
    made = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert TokenBound(made).fewest("word" * 100_000, 10) == 0
