"""Whether two models speak the same token ids, read from their tokenizer files alone.

A teacher scores the policy's ids as they are, so every id of the policy must be the same piece of
text for the teacher. More pieces on the teacher's side do no harm.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from openclaw_rl.errors import ConfigError

_SENTENCEPIECE = ("tokenizer.model", "spiece.model")


_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


def check_tokenizer(policy: Path) -> None:
    """The policy's folder must hold a tokenizer in one of the forms there are, as the gateway needs
    it. Raises `ConfigError`."""
    if not any(next(policy.glob(pattern), None) for pattern in _TOKENIZERS):
        raise ConfigError(f"MODEL_PATH: {policy} has no tokenizer (such as tokenizer.json)")


def difference(policy: Path, teacher: Path) -> str | None:
    """Why the teacher's tokenizer does not fit the policy's, in a few words; None where it does.

    Raises `ConfigError` where a folder has no tokenizer that can be read.
    """
    if policy.resolve() == teacher.resolve():
        return None
    ours, theirs = _pieces(policy), _pieces(teacher)
    if isinstance(ours, bytes) or isinstance(theirs, bytes):
        return None if ours == theirs else "their tokenizer files differ"
    wrong = [piece for piece, number in ours.items() if theirs.get(piece) != number]
    if not wrong:
        return None
    return f"{len(wrong)} of {len(ours)} tokens have another id or none"


def _pieces(folder: Path) -> dict[str, int] | bytes:
    """Piece -> id; or the bytes of a SentencePiece file, which are compared as a whole."""
    whole = folder / "tokenizer.json"
    if whole.is_file():
        content = _read(whole)
        vocab = (content.get("model") or {}).get("vocab") or {}
        if isinstance(vocab, list):  # unigram: [piece, score] in the order of ids
            vocab = {piece: number for number, (piece, _) in enumerate(vocab)}
        added = {item["content"]: item["id"] for item in content.get("added_tokens") or ()}
        return {**vocab, **added}
    if (folder / "vocab.json").is_file():
        added = {}
        if (folder / "added_tokens.json").is_file():
            added = _read(folder / "added_tokens.json")
        return {**_read(folder / "vocab.json"), **added}
    for name in _SENTENCEPIECE:
        if (folder / name).is_file():
            return (folder / name).read_bytes()
    raise ConfigError(f"{folder} has no tokenizer.json, vocab.json or tokenizer.model")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no JSON object")
    return content
