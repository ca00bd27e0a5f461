"""Rules for the free text of an answer that may contain calls.

    CallBeginnings --FreeText--> Lark: text, and markers of regions, without any beginning of a call

A parser that reads calls in several notations needs a grammar that excludes all of them from free text.  Otherwise a
model could write a call whose arguments are not held to their schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.service.grammar.grammar import ANY_TEXT
from quire.service.text.call_beginnings import CallBeginnings
from quire.service.text.lark_text import LarkText


class FreeText:
    """Makes the rules of free text, for the special tokens of one model."""

    def __init__(self, begin: CallBeginnings, names: list[str], special: Mapping[str, int], quoted: LarkText) -> None:
        self._begin, self._special, self._quoted = begin, special, quoted
        said = "|".join(map(re.escape, names))
        texts = [re.escape(text).replace("/", "\\/") for text in begin.texts]
        barred = "|".join([*(pattern.replace("{names}", said) for pattern in begin.patterns), *texts])
        self._text = f"{ANY_TEXT} & ~/(?s:.*)({barred})(?s:.*)/"
        self.rules = list[str]()
        self._marks = {one: self._after(one) for one in special if self._is_free(one)}

    def _is_free(self, special: str) -> bool:
        """Return whether free text may contain a special token: a marker contains it, and no call begins with it."""
        if not any(special in text for text in self._begin.dropped):
            return False
        return all(self._following(special, text) != "" for text in self._begin.texts)

    def _following(self, special: str, text: str) -> str | None:
        """Return the text between the special token at the start of `text` and the next special token; else None."""
        if not text.startswith(special):
            return None
        rest = text[len(special) :]
        return rest[: self._quoted.first_special(rest)]

    def _after(self, special: str) -> str:
        """Return the assertion on the text after a special token if calls may begin with this token, too; else ""."""
        found = [self._following(special, text) for text in self._begin.texts]
        texts = "|".join(re.escape(text).replace("/", "\\/") for text in dict.fromkeys(found) if text)
        return f" & ~/({texts})(?s:.*)/" if texts else ""

    def of(self, name: str, opens: str, more: str = "") -> tuple[str, str]:
        """Return the rules for free text, and for free text that ends with `opens`.  `more`: further assertion."""
        every, ends = self._terminals(name, opens, more)
        later, laters = self._terminals("TEXT", opens, "") if more else (every, ends)
        items, lasts = list[str](), list[str]()
        for at, (mark, after) in enumerate(self._marks.items()):
            text, last = self._terminals(f"AFTER{at}", opens, after) if after else (later, laters)
            items.append(f"{self._quoted(mark)} {text}")
            lasts.append(f"{self._quoted(mark)} {last}")
        if not items:
            return every, ends
        low = name.lower()
        self.rules += [f"{low}_item: {' | '.join(items)}", f"{low}_last: {' | '.join(lasts)}"]
        return f"{every} {low}_item*", f"({ends} | {every} {low}_item* {low}_last)"

    def _terminals(self, name: str, opens: str, more: str) -> tuple[str, str]:
        """Return a terminal of free text, and what ends such a text with `opens`."""
        text = f"{self._text}{more}"
        if f"{name}: {text}" not in self.rules:
            self.rules.append(f"{name}: {text}")
            if opens not in self._special:
                self.rules.append(f"B_{name}: ({text}) {self._quoted(opens)}")
        return name, f"{name} {self._quoted(opens)}" if opens in self._special else f"B_{name}"
