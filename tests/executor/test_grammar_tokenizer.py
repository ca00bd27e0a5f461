"""Text of a grammar that reads like an added token is text: it is answered by ordinary tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from quire.engine.executor import grammar_tokenizer
from quire.engine.executor.grammars import Grammars
from tests.checkpoints import VOCAB, tokenizer
from tests.executor.matchers import EOS, begin, choice, four_slots, regex, schema

BOS_TEXT = tokenizer().bos_token  # an added token that is in the model's own vocabulary as well
ADDED = [
    AddedToken("<think>"),
    AddedToken("[TOOL]"),
    AddedToken("<|im_end|>", special=True),
    AddedToken("[INST]", special=True),
]
TEXTS = ["<think>", "[TOOL]", "<|im_end|>", "[INST]", BOS_TEXT]


def with_added_tokens() -> Tokenizer:
    made = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    assert made.add_tokens(ADDED) == len(ADDED)
    return made


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder = tmp_path_factory.mktemp("added")
    with_added_tokens().save(str(folder / "tokenizer.json"))
    return four_slots(folder, vocab=VOCAB + len(ADDED))


def written(found: Grammars, grammar: str, *, jumps: bool) -> list[int]:
    """Return the tokens of an answer that ends as soon as it may."""
    tokens: list[int] = []
    begin(found, 0, grammar, [], **({} if jumps else {"logprobs": 1}))
    while EOS not in tokens:
        found.fill()
        [follower] = found.followers([0])
        bits = found.mask[0].view("uint32")
        allowed = [token for token in range(32 * len(bits)) if bits[token // 32] >> token % 32 & 1]
        assert allowed, (follower.row.error, tokens)
        assert len(tokens) < 60, tokens
        tokens.append(EOS if EOS in allowed else allowed[-1])
        follower.row.take(tokens[-1])
        follower.row.find_forced()
    found.free(0)
    return tokens[:-1]


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    ("make", "around"),
    [
        (choice, "{}"),
        (lambda text: choice(f"a {text} b", f"a {text} c"), "a {} b"),
        (lambda text: regex("".join(f"[{one}]" if one != "^" else one for one in text).replace("[[]", r"\[")), "{}"),
        (lambda text: schema({"const": f"x{text}"}), '"x{}"'),
    ],
)
def test_such_a_text_is_answered(
    grammars: Grammars, make: Callable[[str], str], around: str, text: str, jumps: bool
) -> None:
    tokens = written(grammars, make(text), jumps=jumps)
    special = [tokenizer().bos_token_id, VOCAB, VOCAB + 2, VOCAB + 3]
    assert not set(tokens) & set(special)
    assert plain(tokens) == around.format(text)


def plain(tokens: list[int]) -> str:
    return with_added_tokens().decode(tokens, skip_special_tokens=False)


def test_a_grammar_names_special_tokens_by_their_ids(grammars: Grammars) -> None:
    assert written(grammars, f'start: "a" <[{VOCAB + 2}]> "b"', jumps=True) == [
        *tokenizer().encode("a", add_special_tokens=False),
        VOCAB + 2,
        *tokenizer().encode("b", add_special_tokens=False),
    ]


def test_a_model_that_needs_the_name_of_such_a_token_is_served(tmp_path: Path) -> None:
    """A merge of BPE may produce the text of an added token; then its name stays."""
    made = json.loads(tokenizer().backend_tokenizer.to_str())
    left, right = made["model"]["merges"][-1]
    made["added_tokens"].append(
        {"id": made["model"]["vocab"][left + right], "content": left + right, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    found = four_slots(tmp_path)
    assert written(found, choice("yes"), jumps=True) == tokenizer().encode("yes", add_special_tokens=False)


def test_a_renamed_token_with_another_id_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids of a mask are the model's: rather a literal text fails than a token means another one."""
    file = tmp_path / "tokenizer.json"
    with_added_tokens().save(str(file))
    size, rename = VOCAB + len(ADDED), grammar_tokenizer._renamed

    def swapped(found: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
        renamed, ids = rename(found)
        return renamed, dict(zip(ids, reversed(ids.values()), strict=True))

    def tokens_of(text: str) -> list[int]:
        read = grammar_tokenizer.grammar_tokenizer(file, size, [EOS], [])
        return list(read.tokenize_str(text))

    assert len(tokens_of("[INST]")) > 1
    monkeypatch.setattr(grammar_tokenizer, "_renamed", swapped)
    assert tokens_of("[INST]") == [VOCAB + 3]
