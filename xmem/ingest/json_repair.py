"""Repairs one broken JSON value: bare quotes, lone backslashes, control characters, inf and nan, stray commas."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal

import msgspec

#: Values nested deeper than this are left out of a repaired record.
DEPTH_LIMIT = 64
#: A text longer than this is not repaired.
REPAIR_LIMIT = 1 << 20

_LONGEST_NUMBER = 400
_SPACE = re.compile(r"[\s\x00]*")
_STRICT_STRING = re.compile(
    r'"[^"\\\x00-\x1f\ud800-\udfff]*+(?:\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r'[^"\\\x00-\x1f\ud800-\udfff]*+)*+"'
)
_AFTER_KEY = re.compile(r"\s*:")
_AFTER_MEMBER = re.compile(r'\s*(?:,\s*"(?:[^"\\]|\\.)*+"\s*:|\}\s*(?:[,}\]]|\Z)|,\s*\}\s*(?:[,}\]]|\Z))')
_AFTER_ITEM = re.compile(r'\s*(?:\]|,\s*(?:["\d\[{\]tfn-]|[+-]?[iI]nf|[nN]a[nN]))')
_QUOTE = re.compile(r'"')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?=\s*(?:[,}\]]|\Z))")
_NON_FINITE = re.compile(
    r"[+-]?(?:inf(?:inity)?|s?nan(?:\([^)]*\))?|1\.#(?:inf|ind|qnan|snan)\d*)(?=\s*(?:[,}\]]|\Z))", re.I
)
_WORD = re.compile(r"""[^\s,:{}\[\]"]+""")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_LONE_BACKSLASH = re.compile(r'\\(?!")')
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_CONTROL = re.compile(r"[\x00-\x1f\ud800-\udfff]")
_TOKEN = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|(?P<open>[{\[])|(?P<close>[}\]])'
_TEXT_TOKEN = re.compile(_TOKEN, re.DOTALL)
_BYTES_TOKEN = re.compile(_TOKEN.encode(), re.DOTALL)


def repair_json(text: bytes) -> tuple[object, Counter[str]] | None:
    """Return the value that a broken JSON text stands for, and issue codes with counts; None where it cannot be.

    Nothing is ever added at the end: a text that stops early is not repaired.
    """
    repairs: Counter[str] = Counter()
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError:
        decoded = text.decode("utf-8", "replace")
        repairs["invalid_utf8"] = 1
    cleaned = _Repairer(decoded, repairs).run()
    if cleaned is None:
        return None
    try:
        return msgspec.json.Decoder(float_hook=Decimal).decode(cleaned), +repairs
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


class _Repairer:
    """Walks over a text once and writes it down again as strict JSON."""

    def __init__(self, text: str, repairs: Counter[str]) -> None:
        self.text = text
        self.repairs = repairs
        self.position = 0
        self.out: list[str] = []
        self.stack: list[str] = []
        self.key = False  # a key is expected, not a value
        self.comma = False  # a value has ended: a comma must come before the next
        self.comma_read = False  # and it did

    def run(self) -> str | None:
        """Return the strict text, None where brackets do not match or the text stops early."""
        while True:
            self.position = _SPACE.match(self.text, self.position).end()  # type: ignore[union-attr]
            if self.position >= len(self.text):
                return "".join(self.out) if self.out and not self.stack else None
            letter = self.text[self.position]
            if letter in "}]":
                done = self._close(letter)
            elif letter in ",:":
                done = self._separate(letter)
            elif self.out and not self.stack:
                return None  # something stands behind the value
            elif letter in "{[":
                done = self._open(letter)
            elif letter == '"':
                done = self._string()
            else:
                done = self._bare()
            if not done:
                return None

    def _begin(self) -> None:
        if self.comma:
            self.out.append(",")
            self.repairs["repaired_syntax"] += not self.comma_read
        self.comma = self.comma_read = False

    def _value_done(self) -> bool:
        self.comma = True
        self.key = bool(self.stack) and self.stack[-1] == "{"
        return True

    def _open(self, letter: str) -> bool:
        if self.key:
            return False
        self._begin()
        if len(self.stack) >= DEPTH_LIMIT:
            end = find_end(self.text, self.position)
            if end is None:
                return False
            self.position = end
            self.repairs["repaired_syntax"] += 1
            self.out.append("null")
            return self._value_done()
        self.stack.append(letter)
        self.out.append(letter)
        self.position += 1
        self.key = letter == "{"
        return True

    def _close(self, letter: str) -> bool:
        if not self.stack or self.stack[-1] + letter not in ("{}", "[]"):
            return False
        if not self.comma and not self.key and self.stack[-1] == "{":  # a key without a value
            self.out.append("null")
            self.repairs["repaired_syntax"] += 1
        elif self.comma_read:  # a trailing comma
            self.repairs["repaired_syntax"] += 1
        self.comma_read = False
        self.stack.pop()
        self.out.append(letter)
        self.position += 1
        return self._value_done()

    def _separate(self, letter: str) -> bool:
        self.position += 1
        if letter == ":" or not self.stack:
            return False  # a colon is taken with its key
        if not self.comma or self.comma_read:  # a comma where a value or key should stand
            self.repairs["repaired_syntax"] += 1
            if self.stack[-1] == "{" and not self.key:
                self.out.append("null")
                self._value_done()
        self.comma_read = self.comma
        return True

    def _string(self) -> bool:
        key = self.key
        self._begin()
        after = _AFTER_KEY if key else _AFTER_MEMBER if self.stack[-1:] == ["{"] else _AFTER_ITEM
        strict = _STRICT_STRING.match(self.text, self.position)
        if strict and (after.match(self.text, strict.end()) or not self.stack):
            self.out.append(strict[0])
            self.position = strict.end()
        elif not self._broken_string(after) and not (strict and self._take(strict)):
            return False
        if not key:
            return self._value_done()
        colon = _AFTER_KEY.match(self.text, self.position)
        if colon is None:
            return False
        self.position = colon.end()
        self.out.append(":")
        self.key = False
        return True

    def _take(self, strict: re.Match[str]) -> bool:
        self.out.append(strict[0])
        self.position = strict.end()
        return True

    def _broken_string(self, after: re.Pattern[str]) -> bool:
        """Find the quote that closes a string by what stands behind it; an escaped quote closes it as a last resort."""
        start = self.position + 1
        last_resort = None
        for quote in _QUOTE.finditer(self.text, start):
            at = quote.start()
            if not after.match(self.text, at + 1):
                continue
            slashes = at - start - len(self.text[start:at].rstrip("\\"))
            if slashes % 2 == 0:
                return self._write(start, at)
            last_resort = last_resort or at
        return last_resort is not None and self._write(start, last_resort)

    def _write(self, start: int, end: int) -> bool:
        content = self.text[start:end]
        if _BAD_ESCAPE.search(content) or content.endswith("\\"):
            content = _LONE_BACKSLASH.sub(r"\\\\", content)
            if content.endswith("\\") and (len(content) - len(content.rstrip("\\"))) % 2:
                content += "\\"
        content = _SURROGATE.sub(r"\\ufffd", content)
        content = re.sub(r'((?:^|[^\\])(?:\\\\)*)"', r'\1\\"', content)
        content = re.sub(r'((?:^|[^\\])(?:\\\\)*)"', r'\1\\"', content)  # quotes side by side
        content = _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}" if found[0] < " " else "\ufffd", content)
        self.out.append(f'"{content}"')
        self.position = end + 1
        self.repairs["repaired_string"] += 1
        return True

    def _bare(self) -> bool:
        if self.key:
            return False
        self._begin()
        number = _NUMBER.match(self.text, self.position)
        non_finite = _NON_FINITE.match(self.text, self.position)
        word = number or non_finite or _WORD.match(self.text, self.position)
        if word is None:
            return False
        self.position = word.end()
        if number and len(number[0]) > _LONGEST_NUMBER:
            self.repairs["wide_integer"] += 1
            self.out.append("null")
        elif non_finite or (number and "inf" in str(float(number[0]))):
            self.repairs["non_finite_number"] += 1
            self.out.append("null")
        elif number:
            self.out.append(number[0])
        elif word[0] in _WORDS:
            self.repairs["repaired_syntax"] += _WORDS[word[0]] != word[0]
            self.out.append(_WORDS[word[0]])
        else:  # 0x7f, +1, 01: whoever reads the field decides
            self.out.append(msgspec.json.encode(word[0].replace("\ufffd", "?")).decode())
        return self._value_done()


def find_end(text: str | bytes, start: int) -> int | None:
    """Return where the object or array that starts at `start` ends; None where it does not end."""
    tokens: Iterator[re.Match[str]] | Iterator[re.Match[bytes]]
    tokens = _TEXT_TOKEN.finditer(text, start) if isinstance(text, str) else _BYTES_TOKEN.finditer(text, start)
    depth = 0
    for token in tokens:
        if token.lastgroup == "open":
            depth += 1
        elif token.lastgroup == "close":
            depth -= 1
            if depth <= 0:
                return token.end() if depth == 0 else None
    return None
