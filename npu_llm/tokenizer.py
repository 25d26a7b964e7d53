"""Text to token ids and back, also while the text is still being generated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from npu_llm.errors import ArtifactError, PromptError

_UNKNOWN = "\ufffd"  # what decoders put where bytes are not, or not yet, a character
_MOST_INCOMPLETE = 3  # bytes, and so U+FFFD and tokens, of a character that lacks its last byte
_MOST_WAITING = 8  # tokens: twice the longest character is surely not one character


class Tokenizer:
    """The model's tokenizer, a thin layer over the ``tokenizers`` library."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # Both settings are stored in tokenizer.json, and would silently cut or lengthen prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read a ``tokenizer.json``.

        Raises:
            ArtifactError: the file is missing or damaged.
        """
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises nothing more specific
            reason = " ".join(str(error).split())
            raise ArtifactError(
                f"cannot read the tokenizer {path} ({reason}): the artifact is damaged, export it again"
            ) from error

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's logits may be padded to more."""
        size: int = self._tokenizer.get_vocab_size()
        return size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``.

        Args:
            text: the prompt.
            add_special_tokens: add what the model expects around a prompt, such as a BOS token;
                chat templates write these themselves.

        Raises:
            PromptError: the text holds surrogates, as Python makes of input that is not UTF-8.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the prompt is not valid Unicode at character {error.start}: "
                "pass text that was read as UTF-8"
            ) from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; special tokens and ids that are no token give no text."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def has_text(self, token_id: int) -> bool:
        """Whether :meth:`decode` regards this token at all."""
        return token_id not in self._special and self._tokenizer.id_to_token(token_id) is not None


class Detokenizer:
    """Turns tokens into text one at a time, never showing half a character.

    A token alone does not say what its text is: characters span tokens, and decoders treat
    spaces by their neighbours. So a short window of tokens is decoded with the new one, and what
    goes beyond the text already given is new (the method of vLLM and of
    text-generation-inference). The window is bounded, so the cost per token does not grow.

    Text that ends in U+FFFD waits for the tokens that may complete its last character, but not
    for more than eight: bytes that are no character, and never will be, are given as U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._start()

    def step(self, token_id: int) -> str:
        """Take one token; return the text that is now final, often a word, sometimes nothing."""
        if not self._tokenizer.has_text(token_id):
            return ""  # in the window it would hide that the text does not begin there
        self._window.append(token_id)
        pending = self._pending()
        if self._is_final(pending):
            self._restart_window(self._window[self._given_tokens :])
            return pending
        if len(self._window) - self._given_tokens > _MOST_WAITING:
            return self._release(pending)
        self._waiting = len(pending)
        return ""

    def flush(self) -> str:
        """Return the text still held, and be ready for another sequence."""
        pending = self._pending()
        self._start()
        return pending

    def _start(self) -> None:
        self._restart_window([])

    def _pending(self) -> str:
        text = self._tokenizer.decode(self._window)
        if text.startswith(self._given):
            return text[len(self._given) :]
        # Byte-fallback decoders turn a whole run of byte tokens into U+FFFD once one of them is
        # wrong, also what was returned as a character before. That cannot be taken back.
        return self._tokenizer.decode(self._window[self._given_tokens :])

    def _is_final(self, pending: str) -> bool:
        # The same decoders make one U+FFFD of each byte of a run that is not yet valid. So where
        # the text gets shorter, the run has become valid: its U+FFFD is a character of the text.
        return bool(pending) and (not pending.endswith(_UNKNOWN) or len(pending) < self._waiting)

    def _release(self, pending: str) -> str:
        """Return text that waited in vain, but for what may still be half a character."""
        unknown = len(pending) - len(pending.rstrip(_UNKNOWN))
        held = min(unknown, _MOST_INCOMPLETE)
        # Where this cuts a character, the window's text is wrong at its start only, and stays so.
        self._restart_window(self._window[-_MOST_WAITING:], held)
        return pending[: len(pending) - held]

    def _restart_window(self, window: list[int], held: int = 0) -> None:
        """Begin with these tokens, all of their text returned but the last ``held`` U+FFFD."""
        text = self._tokenizer.decode(window)
        self._window = window
        self._given = text[: len(text) - held]
        self._given_tokens = len(window) - held
        self._waiting = held  # characters that could not be returned so far


class StopMatcher:
    """Finds stop strings in text that comes in pieces.

    Text that may be the beginning of a stop string is held back until that is decided. The match
    that *begins* earliest counts, of several there the shortest, however the text was cut into
    pieces.

    Attributes:
        matched: the stop string found, or None. Also :meth:`flush` may set it: with the stop
            strings "abcd" and "bc", the text "abc" matches only if it ends there.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.matched: str | None = None
        self._stop = sorted(stop, key=len)
        self._held = ""

    def push(self, text: str) -> str:
        """Take a piece of text; return what is safe to print, nothing from a stop string on."""
        if self.matched is not None:
            return ""
        self._held += text
        start, stop = self._find()
        undecided = self._undecided(before=start)
        if undecided < start:
            return self._take(undecided)
        return self._end(start, stop)

    def flush(self) -> str:
        """The text is over: return what was held, up to a stop string if there is one."""
        return "" if self.matched is not None else self._end(*self._find())

    def _find(self) -> tuple[int, str | None]:
        """Return where the first stop string begins, or the end of the text, and which it is."""
        found = [(self._held.find(stop), stop) for stop in self._stop if stop in self._held]
        # min keeps the first of equals, and the shortest stop string comes first.
        return min(found, key=lambda match: match[0], default=(len(self._held), None))

    def _undecided(self, *, before: int) -> int:
        """Return the first place whose text to the end is the beginning of a stop string."""
        longest = len(self._stop[-1]) if self._stop else 1
        for place in range(max(0, len(self._held) - longest + 1), before):
            rest = self._held[place:]
            if any(stop.startswith(rest) for stop in self._stop):
                return place
        return before

    def _end(self, start: int, stop: str | None) -> str:
        self.matched = stop
        text = self._take(start)
        if stop is not None:
            self._held = ""
        return text

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text
