"""`suffix` of /v1/completions: the markers of each family, where the texts are, and who is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.service.api.api import parse_completion
from quire.service.api.valid_request import ValidRequest
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.text.infill import FORMS, Form
from quire.service.text.tokenizer import Tokenizer
from tests.service.fakes import byte_level, sentencepiece_like, with_template

PREFIX, SUFFIX = "def f():\n    return", "\n# the end é"


def parsed(**fields: Any) -> ValidRequest:
    body = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 4, **fields}
    return parse_completion(json.dumps(body).encode(), GatewayConfig(), "tiny", 600.0)


def markers(form: Form) -> list[str]:
    return [marker for marker in (form.prefix, form.suffix, form.middle) if marker]


@pytest.mark.parametrize("form", FORMS, ids=[form.prefix for form in FORMS])
@pytest.mark.parametrize("make", [byte_level, sentencepiece_like], ids=["bytes", "sentencepiece"])
async def test_the_prompt_is_what_the_family_was_trained_on(
    tmp_path: Path, form: Form, make: Callable[[Path], Path]
) -> None:
    tokenizer = Tokenizer(str(with_template(make(tmp_path / "code"), "", markers(form))))
    valid = parsed()
    [ids] = await tokenizer.encode(valid)
    before, after = form.prefix + PREFIX, form.suffix + SUFFIX
    want = (after + before if form.suffix_first else before + after) + form.middle
    text = b"".join(tokenizer.vocabulary.bytes_of(ids, skip_special=False)).decode()
    if make is sentencepiece_like:  # it shows its own spaces, and puts one before the first text
        want, first = want.replace("\u2581", " "), form.prefix.replace("\u2581", " ")
        text = text.removeprefix("<s>").replace(f"{first} def", f"{first}def")
    assert text == want
    ended = tokenizer.end_infill(valid).sampling.stop_token_ids
    assert {tokenizer._backend.token_to_id(marker) for marker in markers(form)} <= set(ended)
    assert tokenizer.end_infill(parsed(ignore_eos=True)).sampling.stop_token_ids == []


async def test_a_model_without_markers_and_fields_that_do_not_fit_are_refused(byte_level_tokenizer: Tokenizer) -> None:
    with pytest.raises(Refusal) as caught:
        await byte_level_tokenizer.encode(parsed())
    assert (caught.value.param, caught.value.code) == ("suffix", "unsupported")
    for fields in ({"echo": True}, {"truncate_prompt_tokens": 3}):
        with pytest.raises(Refusal) as caught:
            parsed(**fields)
        assert caught.value.param in fields
    assert await byte_level_tokenizer.encode(parsed(suffix="")) == await byte_level_tokenizer.encode(
        parsed(suffix=None)
    )
