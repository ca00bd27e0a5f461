"""Text out of tokens: exact for any tokens, any cuts and any stop strings, on both kinds of vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.service.api import api
from quire.service.api.valid_request import ValidRequest
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.text.token_decoder import TextStream
from quire.service.text.tokenizer import INLINE_BYTES, Tokenizer
from quire.service.text.vocabulary import ModelError, longest_token, vocabulary_bytes
from tests.service.fakes import save

TEXTS = st.text(alphabet=st.characters(codec="utf-8"), max_size=40)
IDS = st.lists(st.integers(0, 499), max_size=40)


@pytest.fixture(params=["byte_level_tokenizer", "sentencepiece_tokenizer"], scope="session")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def run(stream: TextStream, ids: list[int], cuts: list[int]) -> str:
    """Push `ids` cut into deltas of the given sizes (cycled), then finish, as a handler would."""
    out, at, turn = "", 0, 0
    while at < len(ids) and stream.matched is None:
        size = cuts[turn % len(cuts)]
        out += stream.push(ids[at : at + size])
        at, turn = at + size, turn + 1
    return out if stream.matched is not None else out + stream.finish()


@given(text=TEXTS, cuts=st.lists(st.integers(1, 7), min_size=1))
def test_what_was_encoded_comes_back(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = tokenizer._encode(text, special=False)
    got = run(TextStream(tokenizer, skip_special=False), ids, cuts)
    # A SentencePiece vocabulary marks the beginning of a text with a space, which a choice rightly keeps.
    assert got == tokenizer.text_of(ids, skip_special=False) or got == " " + tokenizer.text_of(ids, skip_special=False)


@given(ids=IDS, cuts=st.lists(st.integers(1, 7), min_size=1))
def test_any_bytes_decode_as_the_tokenizer_would(
    byte_level_tokenizer: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    """Random tokens are mostly broken UTF-8: each broken sequence becomes U+FFFD at the same place."""
    got = run(TextStream(byte_level_tokenizer), ids, cuts)
    assert got == byte_level_tokenizer.text_of(ids)


@given(ids=IDS)
def test_no_delta_ever_ends_inside_a_character(tokenizer: Tokenizer, ids: list[int]) -> None:
    text = "🙂 čaj 日本"
    stream = TextStream(tokenizer)
    for token in tokenizer._encode(text, special=False):
        assert "\ufffd" not in stream.push([token])
    assert stream.finish() == ""


def expected(
    tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...], minimum: int, include: bool
) -> tuple[str, int]:
    """The specification: after each token look at the complete text so far for the stop that begins first."""
    stream, early, late = TextStream(tokenizer), "", ""
    for count, token in enumerate(ids, 1):
        new = stream.push([token])
        if count <= minimum:
            early += new
            continue
        late += new
        found = [(late.find(stop), stop) for stop in stops if stop in late]
        if found:
            at, stop = min(found)
            return early + late[: at + (len(stop) if include else 0)], count
    late += stream.finish()
    found = [(late.find(stop), stop) for stop in stops if stop in late]
    if found:
        at, stop = min(found)
        late = late[: at + (len(stop) if include else 0)]
    return early + late, len(ids)


@given(
    text=st.text(alphabet="abAB 🙂é", max_size=30),
    stops=st.lists(st.text(alphabet="abAB 🙂é", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple),
    cuts=st.lists(st.integers(1, 7), min_size=1),
    minimum=st.integers(0, 5),
    include=st.booleans(),
)
def test_stop_strings_wherever_the_text_is_cut(
    tokenizer: Tokenizer, text: str, stops: tuple[str, ...], cuts: list[int], minimum: int, include: bool
) -> None:
    ids = tokenizer._encode(text, special=False)
    stream = TextStream(tokenizer, stop=stops, min_tokens=minimum, include_stop=include)
    got = run(stream, ids, cuts)
    assert (got, stream.tokens) == expected(tokenizer, ids, stops, minimum, include)


def test_text_that_cannot_begin_a_stop_string_is_not_held_back(byte_level_tokenizer: Tokenizer) -> None:
    stream = TextStream(byte_level_tokenizer, stop=("###",))
    ids = [byte_level_tokenizer._encode(char, special=False)[0] for char in "ab##c###d"]
    assert [stream.push([token]) for token in ids[:8]] == ["a", "b", "", "", "##c", "", "", ""]
    assert stream.matched == "###"


@given(ids=IDS)
def test_offsets_point_at_each_token(byte_level_tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = TextStream(byte_level_tokenizer, track_offsets=True)
    stream.push(ids)
    plain = TextStream(byte_level_tokenizer)
    offsets, chars = [], 0
    for token in ids:
        offsets.append(chars)
        chars += len(plain.push([token]))
    assert stream.take_offsets() == offsets
    assert stream.take_offsets() == []


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("kind", ["text", "ids", "truncated"])
@given(text=st.text(st.sampled_from("aT e🙂é\n."), min_size=1) | st.sampled_from(["a</s>b", "<s>", "</s></s>"]))
def test_echoed_offsets_point_into_the_echoed_text(
    tokenizer: Tokenizer, kind: str, skip_special: bool, text: str
) -> None:
    ids = tokenizer._encode(text, special=True)
    prompt: str | list[int] = ids if kind == "ids" else text
    asked = {"model": "m", "prompt": prompt, "echo": True, "logprobs": 0, "skip_special_tokens": skip_special}
    if kind == "truncated":
        asked["truncate_prompt_tokens"] = max(1, len(ids) - 1)
        ids = ids[-max(1, len(ids) - 1) :]
    valid = api.parse_completion(json.dumps(asked).encode(), GatewayConfig(), "m", 600.0)
    [prompted] = tokenizer.prompted(valid, [ids])
    if kind == "text":
        assert prompted.text == text
    offsets = prompted.offsets
    assert len(offsets) == len(ids)
    assert offsets == sorted(offsets)
    assert 0 <= offsets[0] <= offsets[-1] <= len(prompted.text)
    shown = tokenizer.vocabulary.bytes_of(ids, skip_special=skip_special and kind != "text")
    for at, (piece, offset) in enumerate(zip(shown, offsets, strict=True)):
        name = piece.decode("utf-8", "ignore")
        # Not: parts of a character, what the tokenizer has added, a space put before the text that is no part of it.
        whole = name.encode() == piece and b"\xef\xbf\xbd" not in piece
        if whole and at > 1 and "\ufffd" not in prompted.text:
            assert prompted.text[offset:].startswith((name, name.removeprefix(" "))), (offset, name, prompted)


def test_special_tokens_are_silent_unless_wanted(byte_level_tokenizer: Tokenizer) -> None:
    assert TextStream(byte_level_tokenizer).push([1]) == ""
    assert TextStream(byte_level_tokenizer, skip_special=False).push([1]) == "</s>"


def test_ids_beyond_the_vocabulary_have_no_text(byte_level_tokenizer: Tokenizer) -> None:
    """Models round their embedding up: such ids can be sampled."""
    assert TextStream(byte_level_tokenizer).push([10_000]) == ""


def request(**fields: object) -> ValidRequest:
    body = msgspec.json.encode({"model": "m", **fields})
    parse = api.parse_chat if "messages" in fields else api.parse_completion
    return parse(body, GatewayConfig(), "m", 600.0)


async def test_encoding_is_the_tokenizers_own(sentencepiece_tokenizer: Tokenizer) -> None:
    tokenizer = sentencepiece_tokenizer
    long = "The quick brown fox. " * (INLINE_BYTES // 10)
    [short, longer] = await tokenizer.encode(request(prompt=["The fox", long]))
    assert short[0] == 1  # begin-of-sequence
    assert tokenizer.text_of(short) == "The fox"
    assert tokenizer.text_of(longer) == long
    assert await tokenizer.encode(request(prompt=[[5, 6, 7]], truncate_prompt_tokens=2)) == [[6, 7]]


@given(text=TEXTS, special=st.booleans())
def test_the_batch_call_gives_what_the_single_one_gives(tokenizer: Tokenizer, text: str, special: bool) -> None:
    """Only the batch call lets other threads run meanwhile."""
    for given_text in (text, f"<s>{text}</s>", text * 50):
        expected_ids = tokenizer._backend.encode(given_text, add_special_tokens=special).ids
        assert tokenizer._encode(given_text, special=special) == expected_ids
    assert tokenizer.text_of(expected_ids) == tokenizer._backend.decode(expected_ids)


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.NFKC()])
@given(text=st.text(alphabet="ab é\u0301\u0323\u1100\u1161\u11a8\u03b1\u0313\u0300\u0345ﷺ🙂", max_size=60))
def test_no_token_stands_for_more_characters_than_the_longest(
    byte_level_tokenizer: Tokenizer, normalizer: Any, text: str
) -> None:
    backend = Backend.from_str(byte_level_tokenizer._backend.to_str())
    if normalizer is not None:
        backend.normalizer = normalizer
    longest = longest_token(backend, byte_level_tokenizer.vocabulary.table)
    assert longest is not None
    assert len(text) <= longest * len(backend.encode(text, add_special_tokens=False).ids)


def test_where_a_tokenizer_leaves_text_out_nothing_is_said_of_its_tokens(
    byte_level_tokenizer: Tokenizer, sentencepiece_tokenizer: Tokenizer
) -> None:
    assert longest_token(sentencepiece_tokenizer._backend, sentencepiece_tokenizer.vocabulary.table) is not None
    table = byte_level_tokenizer.vocabulary.table

    def changed(**parts: Any) -> int | None:
        backend = Backend.from_str(byte_level_tokenizer._backend.to_str())
        for name, part in parts.items():
            setattr(backend, name, part)
        return longest_token(backend, table)

    removed = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])
    assert changed() == max(map(len, table))
    assert changed(normalizer=normalizers.Sequence([normalizers.NFC()])) == 4 * max(map(len, table))
    assert changed(normalizer=normalizers.Strip()) is None
    assert changed(normalizer=normalizers.Replace("ab", "a")) is None
    assert changed(pre_tokenizer=removed) is None
    assert changed(pre_tokenizer=pre_tokenizers.Whitespace()) is None
    backend = Backend.from_str(byte_level_tokenizer._backend.to_str())
    backend.add_special_tokens([AddedToken("<x>", lstrip=True)])
    assert longest_token(backend, table) is None


class Never:
    """In place of a tokenizer that must not be asked."""

    def encode_batch_fast(self, texts: list[str], **options: object) -> list[object]:
        raise AssertionError("a text that cannot fit was encoded")


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    byte_level_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(str(byte_level_dir))
    longest = max(map(len, tokenizer.vocabulary.table))
    text = "a" * (100 * longest)
    assert len((await tokenizer.encode(request(prompt=text, max_tokens=1), longest=1 + len(text)))[0]) <= len(text)
    monkeypatch.setattr(tokenizer, "_backend", Never())
    with pytest.raises(Refusal) as caught:
        await tokenizer.encode(request(prompt=text, max_tokens=1), longest=100, total=10**9)
    assert (caught.value.code, caught.value.limit, caught.value.given) == ("context_length_exceeded", 100, 101)
    cut = request(prompt=["b", text], truncate_prompt_tokens=5)
    with pytest.raises(AssertionError):  # the first prompt fits
        await tokenizer.encode(cut, longest=10, total=100)
    cut = request(prompt=text, truncate_prompt_tokens=5)
    with pytest.raises(Refusal) as caught:
        await tokenizer.encode(cut, longest=10, total=99)
    assert (caught.value.code, caught.value.limit, caught.value.given) == ("too_many_tokens", 99, 100)


async def test_tokens_of_all_prompts_are_counted_together(byte_level_tokenizer: Tokenizer) -> None:
    valid = request(prompt=[[5] * 60, [5] * 60], max_tokens=1)
    assert len(await byte_level_tokenizer.encode(valid, longest=100, total=120)) == 2
    with pytest.raises(Refusal) as caught:
        await byte_level_tokenizer.encode(valid, longest=100, total=119)
    assert (caught.value.code, caught.value.limit, caught.value.given) == ("too_many_tokens", 119, 120)


async def test_the_chat_template_is_the_checkpoints_own(byte_level_tokenizer: Tokenizer) -> None:
    valid = request(messages=[{"role": "user", "content": "hi"}])
    [ids] = await byte_level_tokenizer.encode(valid)
    assert byte_level_tokenizer.text_of(ids, skip_special=False) == "<|user|>hi</s><|assistant|>"


async def test_a_template_that_refuses_is_the_clients_error(byte_level_tokenizer: Tokenizer) -> None:
    with pytest.raises(Refusal) as caught:
        await byte_level_tokenizer.encode(request(messages=[{"role": "tool", "content": "secret"}]))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported", "messages[0].role")
    assert "secret" not in caught.value.message


def test_a_tokenizer_without_a_byte_table_is_refused() -> None:
    backend = Backend(models.BPE({"a": 0}, []))
    backend.decoder = decoders.CTC()
    with pytest.raises(ModelError, match="a BPE model with decoder CTC is neither byte-level, SentencePiece-style nor"):
        vocabulary_bytes(backend)


WORDS = [
    "[UNK]",
    "hello",
    "world",
    "##s",
    ".",
    "don",
    "'",
    "t",
    "n't",
    "##ing",
    "do",
    "not",
    "##",
    "'s",
    ",",
    "čaj",
    "!",
]


@pytest.fixture(params=["WordPiece", "WordPiece as it is", "WordLevel", "WordLevel with WordPiece"], scope="module")
def words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose tokens are words with spaces between them."""
    kind, vocab = request.param, {word: at for at, word in enumerate(WORDS)}
    model = models.WordPiece if kind.startswith("WordPiece") else models.WordLevel
    backend = Backend(model(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind != "WordLevel":
        backend.decoder = decoders.WordPiece(cleanup=kind != "WordPiece as it is")
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens(["an added one"])
    return Tokenizer(str(save(backend, tmp_path_factory.mktemp("words") / "tiny")))


@given(
    ids=st.lists(st.integers(0, len(WORDS) + 5), max_size=12),
    cuts=st.lists(st.integers(1, 4), min_size=1),
    skip=st.booleans(),
)
def test_words_are_streamed_as_the_tokenizer_decodes_them_whole(
    words: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    """Also tokens that the vocabulary lacks, and special ones, before the first word."""
    got = run(TextStream(words, skip_special=skip), ids, cuts)
    assert got == words.text_of(ids, skip_special=skip)


def test_stop_strings_and_offsets_of_words(words: Tokenizer) -> None:
    ids = [WORDS.index("hello"), WORDS.index("world"), WORDS.index("world")]
    stream = TextStream(words, stop=("world",), track_offsets=True)
    assert run(stream, ids, [1]) == "hello "
    assert (stream.matched, stream.tokens, stream.take_offsets()) == ("world", 2, [0, 5])


async def test_a_prompt_of_words_is_echoed_with_its_offsets(words: Tokenizer) -> None:
    valid = request(prompt="hello world hello", echo=True, logprobs=1)
    [shown] = words.prompted(valid, await words.encode(valid))
    assert (shown.text, shown.offsets) == ("hello world hello", [0, 5, 11])


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tekken.json": "{}"}, "its tokenizer is Mistral's tekken.json, which Quire does not read; serve a copy that"),
        (
            {"qwen.tiktoken": "IQ== 0"},
            "its tokenizer is the tiktoken file qwen.tiktoken, which lacks the pre-tokenizer",
        ),
        (
            {"spiece.model": "x"},
            "its tokenizer is spiece.model, which servers do not read: run `quire convert-tokenizer ",
        ),
        ({}, "it has no tokenizer file; serve a copy that has a tokenizer.json"),
    ],
)
def test_tokenizer_files_that_are_not_read_are_refused_by_name(
    tmp_path: Path, files: dict[str, str], reason: str
) -> None:
    """transformers would make a tokenizer with an empty vocabulary of some of them."""
    for name, text in {"config.json": '{"model_type": "qwen2"}', **files}.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError) as caught:
        Tokenizer(str(tmp_path))
    assert str(caught.value).startswith(f"model {tmp_path}: {reason}")


async def test_the_chat_template_of_a_multimodal_checkpoint_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"[UNK]": 0, "hello": 1, "says": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = save(backend, tmp_path / "model")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    template = "{% for message in messages %}says {{ message.content[0].text }}{% endfor %}"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    valid = request(messages=[{"role": "user", "content": "hello"}])
    assert await Tokenizer(str(folder)).encode(valid) == [[2, 1]]
    (folder / "chat_template.json").write_text("[]")
    with pytest.raises(ModelError, match=r"chat_template\.json holds no chat template"):
        Tokenizer(str(folder))


def test_a_vocabulary_of_bert_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s"])
    )
    assert run(TextStream(Tokenizer(str(tmp_path))), [5, 6, 7], [1]) == "hello worlds"


def test_a_directory_that_is_no_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        Tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_code_of_a_models_repository_is_not_run(tmp_path: Path) -> None:
    """transformers does not ask on a terminal whether to run it."""
    folder, ran = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "none of ours"}))
    described = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "mine.py").write_text(f"open({str(ran)!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(ModelError, match="needs code from the model's repository") as caught:
        Tokenizer(str(folder))
    assert "\n" not in str(caught.value)
    assert not ran.exists()


async def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    backend = Backend(models.BPE())
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["a"])
    folder = save(backend, tmp_path / "base")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(Refusal) as caught:
        await Tokenizer(str(folder)).encode(request(messages=[{"role": "user", "content": "a"}]))
    assert caught.value.code == "no_chat_template"
