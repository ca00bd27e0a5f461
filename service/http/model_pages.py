"""Pages of GET /v1/models, in Anthropic's format: `limit`, `after_id` and `before_id`; without them, all models.

ids:  a b c d e      limit=2              -> a b, has_more
                     limit=2&after_id=b   -> c d, has_more
                     limit=2&before_id=d  -> b c, has_more
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.service.common.refusal import bad_request

MOST = 1000  # maximum `limit`, as at Anthropic


def page_of(ids: list[str], query: Mapping[str, str]) -> tuple[list[str], bool]:
    """Return the ids of the requested page, and whether further ids follow it (with `before_id`: precede it).

    Raises Refusal for an invalid limit, an unknown id, and `after_id` together with `before_id`."""
    limit, after, before = query.get("limit"), query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise bad_request("invalid_value", "before_id: it excludes after_id", "before_id", None, before)
    first = 0 if after is None else _place(ids, "after_id", after) + 1
    last = len(ids) if before is None else _place(ids, "before_id", before)
    if limit is None:
        return ids[first:last], False
    count = int(limit) if limit.isascii() and limit.isdigit() and len(limit) <= len(str(MOST)) else 0
    if not 1 <= count <= MOST:
        raise bad_request("invalid_value", f"limit: from 1 to {MOST}", "limit", MOST, limit)
    has_more = last - first > count
    return (ids[max(first, last - count) : last] if before is not None else ids[first:last][:count]), has_more


def _place(ids: list[str], param: str, model: str) -> int:
    """Return the index of a model.  Raises Refusal if it is not in the list."""
    try:
        return ids.index(model)
    except ValueError:
        raise bad_request("invalid_value", f"{param}: no model has this id", param, None, model) from None
