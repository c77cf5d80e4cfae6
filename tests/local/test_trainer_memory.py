"""The memory table of the docs is the one the benchmark prints."""

from pathlib import Path

from benchmarks.memory import Shape, markdown, table

ROOT = Path(__file__).parent.parent.parent
SIZES = {"rank": 16, "micro": 4096, "sample": 4096, "chunk": 512, "kv_tokens": 16384}


def test_the_docs_show_the_arithmetic_as_it_is():
    printed = markdown(table(Shape(), **SIZES))
    assert printed in (ROOT / "docs" / "memory.md").read_text()


def test_a_4b_model_fits_a_16_gb_card():
    assert sum(size for *_, size in table(Shape(), **SIZES)) < 16e9
    # Qwen3-4B has 4.02e9 parameters
    assert abs(Shape().parameters / 4.02e9 - 1) < 0.01


def test_shapes_come_from_a_config_file(tmp_path):
    from transformers import AutoModelForCausalLM

    from tests.fakes.model import tiny_model

    folder = tiny_model(tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(folder)
    exact = sum(p.numel() for p in model.parameters())
    norms = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    assert Shape.of(folder).parameters == exact - norms
