"""A tiny tokenizer and a tiny random model in Hugging Face format, made in a second.

`tiny_tokenizer(dir)` needs no torch; `tiny_model(dir)` imports it lazily. The tokenizer is a
byte-level BPE with a few hundred merges (so the same text has many token forms, as with real
models), a ChatML template, and Qwen's special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.fakes.templates import CHATML

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""ids 0, 1, 2: `special` in the tokenizer's sense; `<|im_end|>` ends a turn."""
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""ids 3 to 6: single tokens, not `special`, as in Qwen3."""
EOS_ID = 2

_CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is the capital of France? It is Paris.",
    "You are a helpful assistant. Please answer in one short sentence, thanks, that was perfect.",
    '{"name": "run", "arguments": {"path": "/tmp/file.txt", "command": "ls -la"}}',
    "system\nuser\nassistant\n\n<tool_response>\n</tool_response>\n# Tools\n\n<tools>\n</tools>",
    "def main(args): return [x for x in args if x is not None]  # too long, too short",
]


def tiny_tokenizer(
    directory: str | Path,
    *,
    template: str = CHATML,
    context_length: int = 4096,
    vocab_size: int = 512,
    corpus: Sequence[str] = (),
) -> Path:
    """Writes tokenizer, chat template and a `config.json` (no weights); returns the directory.

    Long prompts cost fewer tokens with a larger vocabulary that has seen such a `corpus`.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL, *MARKS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*_CORPUS, *corpus], trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [
        {**token, "special": token["content"] in SPECIAL} for token in data["added_tokens"]
    ]
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": context_length,
        },
    )
    (directory / "chat_template.jinja").write_text(template)
    size = tokenizer.get_vocab_size()
    _write(directory / "config.json", _config(context_length, size))
    _write(directory / "generation_config.json", {"eos_token_id": [EOS_ID, 0], "pad_token_id": 0})
    return directory


def tiny_model(
    directory: str | Path,
    *,
    template: str = CHATML,
    context_length: int = 4096,
    vocab_size: int = 512,
    corpus: Sequence[str] = (),
    seed: int = 0,
    scale: float = 1.0,
) -> Path:
    """A random Llama (2 layers, hidden size 64, float32) with the tokenizer above.

    `scale` multiplies the output layer: larger makes sharper distributions.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tiny_tokenizer(
        directory,
        template=template,
        context_length=context_length,
        vocab_size=vocab_size,
        corpus=corpus,
    )
    config = LlamaConfig(**json.loads((directory / "config.json").read_text()))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    model.generation_config.eos_token_id = [EOS_ID, 0]
    model.generation_config.pad_token_id = 0
    model.save_pretrained(str(directory))
    return directory


def _config(context_length: int, vocab_size: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context_length,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1))
