"""Random schemas and sampling parameters of structured output, for hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.checkpoints import VOCAB


def kinds() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of five kinds: scalars with bounds, enums, arrays, objects, unions of these; at most three deep."""
    bounds = st.tuples(st.integers(-50, 50), st.integers(0, 40)).map(
        lambda at: {"type": "integer", "minimum": at[0], "maximum": at[0] + at[1]}
    )
    scalars = st.one_of(
        bounds,
        st.integers(0, 4).map(lambda most: {"type": "string", "maxLength": most}),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "pattern": "^[a-f]{1,3}-[0-9]$"}]),
    )
    values = st.one_of(st.integers(-9, 9), st.booleans(), st.none(), st.text('ab "\\\n\u00e9\u2603', max_size=5))
    enums = st.lists(values, min_size=1, max_size=4).map(lambda them: {"enum": them})

    def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda at: {"type": "array", "items": at[0], "minItems": at[1], "maxItems": at[1] + at[2]}
        )
        objects = st.tuples(
            st.dictionaries(st.sampled_from("abcd"), inner, max_size=3), st.sets(st.sampled_from("abcd"))
        ).map(
            lambda at: {
                "type": "object",
                "properties": at[0],
                "required": sorted(set(at[0]) & at[1]),
                "additionalProperties": False,
            }
        )
        unions = st.lists(inner, min_size=1, max_size=3).map(lambda them: {"anyOf": them})
        return st.one_of(arrays, objects, unions)

    return st.recursive(st.one_of(scalars, enums), nested, max_leaves=6)


def samplings() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"seed": st.integers(0, 2**63 - 1)},
        optional={
            "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
            "top_p": st.sampled_from([0.1, 0.9]),
            "top_k": st.sampled_from([1, 5]),
            "min_p": st.sampled_from([0.0, 0.2]),
            "min_tokens": st.sampled_from([1, 5, 60]),
            "presence_penalty": st.sampled_from([-2.0, 2.0]),
            "frequency_penalty": st.sampled_from([-2.0, 2.0]),
            "repetition_penalty": st.sampled_from([0.5, 1.8]),
            "logit_bias": st.lists(st.tuples(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 100.0])), max_size=3),
            "logprobs": st.sampled_from([0, 2]),
        },
    )
