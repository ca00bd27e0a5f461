"""Content of chat messages stays text, even if it reads like a special token of the model.

    messages, tools, documents --hide--> private characters in them --template--> text --reveal--> text, spans
    "say <|end|>" --> "say \\ue000|end|>" --> "<|user|>say \\ue000|end|><|end|>" --> "<|user|>say <|end|><|end|>"
    encode everything once --> ids; a special token's id that overlaps a span --> the ids of its text

The template may write special tokens, and a client's content may not.  Otherwise the user of an application could end
a message and write another one, of any role.  A rendering does not show which part of it is content.  So each character
of content with which a special token could begin is hidden: a private character that occurs nowhere in the request
stands for it.  It keeps its place whatever the template does: trim, cut, split, join, lower, replace, write as JSON.

A template may look into content for strings of its own, such as `</think>`.  Those are left as they are, but for what
an assistant's text: templates drop all before such a string.  There only reasoning at the beginning is left to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from quire.service.common.refusal import bad_request

TRUSTED = ("system", "developer")  # roles of the application itself, whose messages may hold special tokens
WINDOW = 65_536  # characters searched at once: no other thread runs meanwhile, 1 ms at worst
READINGS_KEPT = 4  # sets of a template's own strings: the model's, and those of clients
PRIVATE = "[\ue000-\uf8ff]"
ESCAPED = re.compile(r"\\u([ef][0-9a-f]{3})", re.I)  # as JSON writes a private character in ASCII

_MARK = re.compile(r"[<\[][^\s<>\[\]]+[>\]]")
# Reasoning between a pair of tags, as clients send it back that do not know it.
_REASONING = re.compile(r"\s*(?:<([\w:]+)>.*?</\1>|\[(\w+)\].*?\[/\2\])", re.S)

KeyOrder = Literal["", "exact", "lower"]  # "lower": whatever the case; "": as they come
Span = tuple[int, int]  # first character and end in the rendered text


class _Reading(NamedTuple):
    """What a template looks for in content."""

    exempt: dict[str, tuple[str, ...]]  # strings of the template that begin no special token, by their first character
    constants: frozenset[str]  # all of its strings, in lower case
    marks: re.Pattern[str] | None  # those of them that are markup; None: there are none


class LiteralContent:
    """The special tokens of one tokenizer, and the ids of their text.  Thread-safe."""

    def __init__(self, backend: Any, controls: Iterable[str] = ()) -> None:
        """`backend`: a `tokenizers.Tokenizer`, which no other thread may use meanwhile.

        `controls`: further added tokens that must stay text: the template begins or ends messages with them."""
        added = backend.get_added_tokens_decoder()
        extra = frozenset(controls)
        specials = {token: one for token, one in added.items() if (one.special or one.content in extra) and one.content}
        self._backend = backend
        before, backend.encode_special_tokens = backend.encode_special_tokens, True
        try:
            self._literal = {
                token: _without_prefix(backend, one.content) if one.special else self._plain(one.content)
                for token, one in specials.items()
            }
        finally:
            backend.encode_special_tokens = before
        self._texts = {token: one.content for token, one in specials.items()}
        # Tokens that are looked for in normalized text may be written in many ways.
        self._exact = backend.normalizer is None or not any(one.normalized for one in specials.values())
        lower = {one.content.lower() for one in specials.values()}
        self._lower = sorted(lower)
        self._joined = "\n".join(self._lower)
        self._longest = max(map(len, lower), default=0)
        self._firsts = {text[0] for text in lower if not text[0].isalnum() and not text[0].isspace()}
        # A text that begins like the rest of a special token, behind what the template has written.
        self._tails = {text[at:] for text in lower for at in range(1, len(text))}
        self._lasts = {text[-1] for text in lower}
        odd = [text for text in lower if text[0] not in self._firsts]
        self._odd = re.compile("|".join(map(re.escape, sorted(odd, key=len, reverse=True))), re.I) if odd else None
        by_length = sorted(self._texts.values(), key=len, reverse=True)
        # By their first two characters: a search for a few prefixes costs a long text little.
        self._any = {
            prefix: re.compile("|".join(re.escape(text) for text in by_length if text[:2] == prefix))
            for prefix in {text[:2] for text in by_length}
        }
        self._readings: dict[frozenset[str], _Reading] = {}

    def hidden(self, constants: frozenset[str], *contents: Any, sorts: KeyOrder = "") -> Hidden:
        """Return what hides characters of `contents`: all values of a request that the template gets.

        `constants`: the template's own strings.  `sorts`: its order of the keys of an object."""
        return Hidden(self, self._reading(constants), contents, sorts)

    def _reading(self, constants: frozenset[str]) -> _Reading:
        if (known := self._readings.get(constants)) is not None:
            return known
        tails: dict[str, set[str]] = {}
        for constant in constants:
            for at, char in enumerate(constant):
                if char in self._firsts and self._harmless(constant[at:].lower()):
                    tails.setdefault(char, set()).add(constant[at:])
        exempt = {char: tuple(sorted(found, key=len, reverse=True)) for char, found in tails.items()}
        made = _Reading(exempt, frozenset(constant.lower() for constant in constants), _marks(constants))
        if len(self._readings) >= READINGS_KEPT:
            self._readings = {}
        self._readings[constants] = made
        return made

    def _harmless(self, text: str) -> bool:
        """Return whether a text neither holds a special token nor ends in the beginning of one."""
        return not any(
            special in text
            or any(special.startswith(text[at:]) for at in range(max(0, len(text) - len(special)), len(text)))
            for special in self._lower
        )

    def hide(self, text: str, reading: _Reading, private: Callable[[str], str], *, key: bool = False) -> str:
        """Return a text with private characters for those with which a special token may begin, or continue."""
        if key and not self._dangerous(text):
            return text
        head = range(0) if key else self._head(text, reading)
        made = text
        for first in self._firsts:
            if first not in text:
                continue
            exempt = [string for string in reading.exempt.get(first, ()) if string in text]
            if exempt:
                pattern = "|".join(map(re.escape, [*exempt, first]))
                made = re.sub(pattern, lambda found: found[0] if len(found[0]) > 1 else private(found[0]), made)
            else:
                made = made.replace(first, private(first))
        if self._odd is not None:
            made = self._odd.sub(lambda found: "".join(map(private, found[0])), made)
        if head:
            chars = list(made)
            # Letters would keep their case under a template that changes it.
            places = [at for at in head if not text[at].isalnum()] or head
            for at in places:
                chars[at] = private(text[at])
            made = "".join(chars)
        return made

    def _dangerous(self, key: str) -> bool:
        """Return whether a key holds or ends in more of a special token than its first character.

        Others stay as they are: templates sort keys."""
        lower = key.lower()
        return key[-1:] in self._firsts or any(special[:2] in lower for special in self._lower)

    def _head(self, text: str, reading: _Reading) -> range:
        """Return the positions at the beginning of a text that may complete what the template writes before it."""
        begin = 0 if text[:1] > " " else len(text) - len(text.lstrip())
        start = text[begin : begin + self._longest].lower()
        if len(text) <= begin + self._longest and self._within_special(bare := start.rstrip()):
            return range(begin, begin + len(bare)) if bare not in reading.constants else range(0)
        ends = [at for last in self._lasts if (at := start.rfind(last)) >= 0]
        for size in range(max(ends, default=-1) + 1, 0, -1):
            if start[:size] in self._tails:
                return range(begin, begin + size)
        return range(0)

    def _within_special(self, text: str) -> bool:
        """Return whether a special token has this text.  One search of all of them rules most texts out."""
        return text in self._joined and any(text in special for special in self._lower)

    def spans(self, text: str, hidden: str, private: str) -> list[Span]:
        """Return the spans of a text that must not be one special token.

        `hidden`: the same text with the private characters `private` in it."""
        if not self._exact:
            return [match.span() for match in re.finditer(f"[{private}]", hidden)]
        return [span for span in sorted(self._occurrences(text)) if text[slice(*span)] != hidden[slice(*span)]]

    def _occurrences(self, text: str) -> Iterator[Span]:
        for prefix, pattern in self._any.items():
            at = text.find(prefix)
            while at >= 0:
                end, done = at + WINDOW, 0
                for match in pattern.finditer(text, at, end):
                    done = match.end()
                    yield match.span()
                at = text.find(prefix, max(done, end - self._longest + 1))

    def encode(self, text: str, spans: list[Span]) -> list[int]:
        """Return the token ids of a rendered text; special tokens that overlap `spans` become the ids of their text."""
        # The batch call lets other threads run meanwhile.
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
        ids: list[int] = []
        ends = iter([*spans, (len(text), len(text))])
        begin, end = next(ends)
        for token, (first, after) in zip(encoding.ids, encoding.offsets, strict=True):
            while first >= end and end < len(text):
                begin, end = next(ends)
            if token in self._literal and first < end and after > begin:
                # A token may absorb the spaces next to it, too.
                same = text[first:after] == self._texts[token]
                ids += self._literal[token] if same else self._plain(text[first:after])
            else:
                ids.append(token)
        return ids

    def _plain(self, text: str) -> list[int]:
        """Return the ids of a text in which no added token is looked for."""
        backend = self._backend
        given = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        words = (
            [given] if backend.pre_tokenizer is None else [w for w, _ in backend.pre_tokenizer.pre_tokenize_str(given)]
        )
        tokens = [token for word in words for token in backend.model.tokenize(word)]
        space = len(tokens) > 1 and tokens[0].value in ("\u2581", "\u0120") and not text[0].isspace()
        return [token.id for token in tokens[space:]]


class Hidden:
    """The private characters of one request."""

    def __init__(
        self, literal: LiteralContent, reading: _Reading, contents: Iterable[Any], sorts: KeyOrder = ""
    ) -> None:
        self._literal, self._reading, self._contents, self._sorts = literal, reading, tuple(contents), sorts
        self._digits = ""  # private characters of ranks, in their order
        self._private: dict[str, str] = {}  # character -> the private one that stands for it
        self._free: Iterator[str] | None = None

    def messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with characters hidden in those that are not the application's own."""
        return [
            message
            if message["role"] in TRUSTED
            else {name: value if name == "role" else self._field(message, name) for name, value in message.items()}
            for message in messages
        ]

    def _field(self, message: dict[str, Any], name: str) -> Any:
        said = name == "content" and message["role"] == "assistant"
        return self.value(self._said(message[name]) if said else message[name])

    def _said(self, content: Any) -> Any:
        """Return content of an assistant in which no string of the template stands but in reasoning that begins it."""
        if isinstance(content, list):
            return [
                {**part, "text": self._said(part["text"])} if isinstance(part, dict) and "text" in part else part
                for part in content
            ]
        marks = self._reading.marks
        if not isinstance(content, str) or marks is None or marks.search(content) is None:
            return content
        begun = _REASONING.match(content)
        at = begun.end() if begun is not None else 0
        return content[:at] + marks.sub(lambda found: self._of(found[0][0]) + found[0][1:], content[at:])

    def value(self, value: Any) -> Any:
        """Return a value of JSON with characters hidden in its strings and keys."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            keys = {key: self._text(key, key=True) for key in value}
            if self._sorts and any(hidden != key for key, hidden in keys.items()):
                keys = self._ranked(keys)
            return {keys[key]: self.value(inner) for key, inner in value.items()}
        return [self.value(inner) for inner in value] if isinstance(value, list) else value

    def _ranked(self, keys: dict[str, str]) -> dict[str, str]:
        """Return hidden keys that a template sorts as the keys themselves: the rank of each precedes it.

        Names that a template itself looks up keep their text: a schema has none that is hidden."""
        if not self._digits:
            self._digits = "".join(self._next() for _ in range(10))
        ranked = sorted(keys, key=str.lower if self._sorts == "lower" else None)
        width = len(str(len(ranked)))
        ranks = {key: "".join(self._digits[int(digit)] for digit in f"{at:0{width}}") for at, key in enumerate(ranked)}
        return {key: ranks[key] + hidden for key, hidden in keys.items()}

    def _text(self, text: str, *, key: bool = False) -> str:
        return self._literal.hide(text, self._reading, self._of, key=key) if text else text

    def _of(self, char: str) -> str:
        return self._private.get(char) or self._new(char)

    def _new(self, char: str) -> str:
        self._private[char] = self._next()
        return self._private[char]

    def _next(self) -> str:
        """Return a private character that nothing else has, greater than those before.  Raises Refusal."""
        if self._free is None:
            used = {code for text in _strings(self._contents) for code in _private_codes(text)}
            self._free = (chr(code) for code in range(0xE000, 0xF900) if code not in used)
        private = next(self._free, "")
        if not private:
            message = "messages: text that reads like special tokens beside 6,400 different private characters"
            raise bad_request("unsupported", message, "messages", "some private characters unused")
        return private

    def reveal(self, text: str) -> tuple[str, list[Span]]:
        """Return a rendered text with its own characters again, and the spans in which special tokens stay text."""
        if not self._private:
            return text, []
        if "\\u" in text:  # a template may write JSON in ASCII
            escapes = {f"{ord(private):04x}": private for private in (*self._private.values(), *self._digits)}
            pattern = rf"\\u({'|'.join(escapes)})"
            text = re.sub(pattern, lambda found: escapes[found[1].lower()], text, flags=re.I)
        if self._digits:
            text = re.sub(f"[{self._digits}]", "", text)
        whole = text
        for char, private in self._private.items():
            whole = whole.replace(private, char)
        return whole, self._literal.spans(whole, text, "".join(self._private.values()))


def _marks(constants: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern of the markup in a template's strings."""
    found = {mark for constant in constants for mark in _MARK.findall(constant)}
    return re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True)))) if found else None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _strings(key)
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


def _private_codes(text: str) -> Iterator[int]:
    """Yield the private characters of a text, also those that JSON in it escapes."""
    for at in range(0, 0 if text.isascii() else len(text), WINDOW):
        yield from map(ord, re.findall(PRIVATE, text[at : at + WINDOW]))
    at = text.find("\\u")
    while at >= 0:
        if match := ESCAPED.match(text, at):
            yield int(match[1], 16)
        at = text.find("\\u", at + 1)


def _without_prefix(backend: Any, text: str) -> list[int]:
    """Return the ids of a text, without the space that some tokenizers put before every text."""
    encoding = backend.encode(text, add_special_tokens=False)
    ids: list[int] = encoding.ids
    space = len(ids) > 1 and encoding.tokens[0] in ("\u2581", "\u0120") and not text[0].isspace()
    return ids[1:] if space else ids
