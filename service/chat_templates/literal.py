"""Keeps content of chat messages as text, even if it looks like a special token of the model.

    messages, tools, documents --hide--> private characters in them --template--> text --reveal--> text, spans
    "say <|end|>" --> "say \\ue000|end|>" --> "<|user|>say \\ue000|end|><|end|>" --> "<|user|>say <|end|><|end|>"
    encode the text once --> ids; a special token's id that overlaps a span --> the ids of its text

The template may write special tokens, but a client's content may not.  Otherwise the user of an application could end
a message and begin another one, of any role.  The rendered text does not show which part of it is content.  So each
character of content with which a special token could begin is hidden: it is replaced by a private-use Unicode
character that occurs nowhere in the request.  That character survives all operations of templates: trim, cut, split,
join, lower, replace, encode as JSON.

A template may search content for strings of its own, such as `</think>`, so these are not hidden.  Text of an assistant
is an exception, since templates drop everything before such a string.  There the strings are hidden, except around
reasoning at the beginning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from quire.service.common.refusal import bad_request

TRUSTED = ("system", "developer")  # roles of the application itself, whose messages may contain special tokens
WINDOW = 65_536  # characters per regex search, which holds the GIL: at most 1 ms
READINGS_KEPT = 4  # maximum number of cached _Reading objects
PRIVATE = "[\ue000-\uf8ff]"
ESCAPED = re.compile(r"\\u([ef][0-9a-f]{3})", re.I)  # JSON escape of a private-use character

_MARK = re.compile(r"[<\[][^\s<>\[\]]+[>\]]")
# Reasoning between a pair of tags, which clients without support for reasoning send back as content.
_REASONING = re.compile(r"\s*(?:<([\w:]+)>.*?</\1>|\[(\w+)\].*?\[/\2\])", re.S)

KeyOrder = Literal["", "exact", "lower"]  # order of an object's keys: unsorted, sorted, sorted ignoring case
Span = tuple[int, int]  # first character and end in the rendered text


class _Reading(NamedTuple):
    """The string constants of a template, for which it may search content."""

    exempt: dict[str, tuple[str, ...]]  # first character -> constants that must not be hidden
    constants: frozenset[str]  # all constants, in lower case
    marks: re.Pattern[str] | None  # regex of the constants that are markup; None if there are none


class LiteralContent:
    """The special tokens of one tokenizer, and the ids into which the text of each is encoded.  Thread-safe."""

    def __init__(self, backend: Any, controls: Iterable[str] = ()) -> None:
        """`backend`: a `tokenizers.Tokenizer`, which no other thread may use during this call.

        `controls`: further added tokens that content must not produce, since the template delimits messages by them."""
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
        # If special tokens are matched in normalized text, several spellings produce the same token.
        self._exact = backend.normalizer is None or not any(one.normalized for one in specials.values())
        lower = {one.content.lower() for one in specials.values()}
        self._lower = sorted(lower)
        self._joined = "\n".join(self._lower)
        self._longest = max(map(len, lower), default=0)
        self._firsts = {text[0] for text in lower if not text[0].isalnum() and not text[0].isspace()}
        # Suffixes of special tokens: content could complete a special token whose beginning the template writes.
        self._tails = {text[at:] for text in lower for at in range(1, len(text))}
        self._lasts = {text[-1] for text in lower}
        odd = [text for text in lower if text[0] not in self._firsts]
        self._odd = re.compile("|".join(map(re.escape, sorted(odd, key=len, reverse=True))), re.I) if odd else None
        by_length = sorted(self._texts.values(), key=len, reverse=True)
        # Special tokens by their first two characters: searching a long text for a few prefixes is fast.
        self._any = {
            prefix: re.compile("|".join(re.escape(text) for text in by_length if text[:2] == prefix))
            for prefix in {text[:2] for text in by_length}
        }
        self._readings: dict[frozenset[str], _Reading] = {}

    def hidden(self, constants: frozenset[str], *contents: Any, sorts: KeyOrder = "") -> Hidden:
        """Return a `Hidden` for one request.

        `constants`: string constants of the template.  `contents`: all values of the request that the template gets.
        `sorts`: the order in which the template writes the keys of an object."""
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
        """Return whether a text neither contains a special token nor ends with the beginning of one."""
        return not any(
            special in text
            or any(special.startswith(text[at:]) for at in range(max(0, len(text) - len(special)), len(text)))
            for special in self._lower
        )

    def hide(self, text: str, reading: _Reading, private: Callable[[str], str], *, key: bool = False) -> str:
        """Replace the characters with which a special token may begin, or continue, by private-use characters."""
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
            # Letters are hidden only if there is nothing else to hide, since templates that change case miss a hidden
            # letter.
            places = [at for at in head if not text[at].isalnum()] or head
            for at in places:
                chars[at] = private(text[at])
            made = "".join(chars)
        return made

    def _dangerous(self, key: str) -> bool:
        """Return whether a JSON key may contain or begin a special token.

        Other keys are not changed, since templates sort keys."""
        lower = key.lower()
        return key[-1:] in self._firsts or any(special[:2] in lower for special in self._lower)

    def _head(self, text: str, reading: _Reading) -> range:
        """Return the positions at the start of a text that may complete a special token begun by the template."""
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
        """Return whether a text is a part of a special token.  One search of the joined tokens excludes most texts."""
        return text in self._joined and any(text in special for special in self._lower)

    def spans(self, text: str, hidden: str, private: str) -> list[Span]:
        """Return the spans of a rendered text in which special tokens must stay text.

        `hidden`: the text before its private-use characters (those in `private`) were replaced."""
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
        # The batch call releases the GIL.
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
        ids: list[int] = []
        ends = iter([*spans, (len(text), len(text))])
        begin, end = next(ends)
        for token, (first, after) in zip(encoding.ids, encoding.offsets, strict=True):
            while first >= end and end < len(text):
                begin, end = next(ends)
            if token in self._literal and first < end and after > begin:
                # An added token may include the white space next to it.
                same = text[first:after] == self._texts[token]
                ids += self._literal[token] if same else self._plain(text[first:after])
            else:
                ids.append(token)
        return ids

    def _plain(self, text: str) -> list[int]:
        """Return the ids of a text, encoded without added tokens."""
        backend = self._backend
        given = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        words = (
            [given] if backend.pre_tokenizer is None else [w for w, _ in backend.pre_tokenizer.pre_tokenize_str(given)]
        )
        tokens = [token for word in words for token in backend.model.tokenize(word)]
        space = len(tokens) > 1 and tokens[0].value in ("\u2581", "\u0120") and not text[0].isspace()
        return [token.id for token in tokens[space:]]


class Hidden:
    """Hides characters of one request before rendering, and reveals them in the rendered text."""

    def __init__(
        self, literal: LiteralContent, reading: _Reading, contents: Iterable[Any], sorts: KeyOrder = ""
    ) -> None:
        self._literal, self._reading, self._contents, self._sorts = literal, reading, tuple(contents), sorts
        self._digits = ""  # ten private-use characters for the digits of ranks, see `_ranked`
        self._private: dict[str, str] = {}  # character -> private-use character that replaces it
        self._free: Iterator[str] | None = None

    def messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with private-use characters in place of those of special tokens, except for TRUSTED roles."""
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
        """Return an assistant's content with the template's markup hidden, except in reasoning at its beginning."""
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
        """Return a JSON value with characters hidden in its strings and keys."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            keys = {key: self._text(key, key=True) for key in value}
            if self._sorts and any(hidden != key for key, hidden in keys.items()):
                keys = self._ranked(keys)
            return {keys[key]: self.value(inner) for key, inner in value.items()}
        return [self.value(inner) for inner in value] if isinstance(value, list) else value

    def _ranked(self, keys: dict[str, str]) -> dict[str, str]:
        """Put the rank of each key before its hidden form, so that a template that sorts keys gets the right order.

        Keys that the template itself looks up are not affected: in a schema no key is hidden."""
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
        """Return the next private-use character that the request does not contain.  Raises Refusal if none is left."""
        if self._free is None:
            used = {code for text in _strings(self._contents) for code in _private_codes(text)}
            self._free = (chr(code) for code in range(0xE000, 0xF900) if code not in used)
        private = next(self._free, "")
        if not private:
            message = "messages: text that reads like special tokens beside 6,400 different private characters"
            raise bad_request("unsupported", message, "messages", "some private characters unused")
        return private

    def reveal(self, text: str) -> tuple[str, list[Span]]:
        """Restore hidden characters.  Returns the text, and the spans in which special tokens must stay text."""
        if not self._private:
            return text, []
        if "\\u" in text:  # the template may have written JSON in ASCII
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
    """Return a regex of the markup in a template's string constants; None if there is none."""
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
    """Yield the code points of private-use characters in a text, also of JSON escapes of such characters."""
    for at in range(0, 0 if text.isascii() else len(text), WINDOW):
        yield from map(ord, re.findall(PRIVATE, text[at : at + WINDOW]))
    at = text.find("\\u")
    while at >= 0:
        if match := ESCAPED.match(text, at):
            yield int(match[1], 16)
        at = text.find("\\u", at + 1)


def _without_prefix(backend: Any, text: str) -> list[int]:
    """Return the ids of a text, without the space that some tokenizers add before every text."""
    encoding = backend.encode(text, add_special_tokens=False)
    ids: list[int] = encoding.ids
    space = len(ids) > 1 and encoding.tokens[0] in ("\u2581", "\u0120") and not text[0].isspace()
    return ids[1:] if space else ids
