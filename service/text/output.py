"""One continuation's text: ids in, text that may be sent out, and where it stops.

Bytes become characters (``Detokenizer``), characters pass the stop strings (``StopMatcher``). The token that ended a
continuation goes to ``finish``, never to ``push``: it is no text, unless the request wants the stop included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.text.detokenizer import Detokenizer
from service.text.stops import StopMatcher, StopStrings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from service.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextEvent:
    """What one token added.

    Attributes:
        text: New text to send; may be empty.
        stop_string: The stop string that the text has reached: the continuation is over.
    """

    text: str
    stop_string: str | None


class TextOutput:
    """The text of one continuation, from its first token to its end.

    All text returned, concatenated, is the continuation's whole text: never half a character, never part of a stop
    string that the request wants cut, nothing twice and nothing lost.

    Args:
        tokenizer: Gives the bytes of each id.
        stop_strings: Where the text is cut; compile them once for a request with several continuations.
        include_stop: Keeps the stop string, or the stop token's text.
        keep_special: Keeps the spelled text of control tokens.
    """

    __slots__ = ("_detokenizer", "_include_stop", "_keep_special", "_matcher", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: StopStrings | Iterable[str] = (),
        *,
        include_stop: bool = False,
        keep_special: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._include_stop = include_stop
        self._keep_special = keep_special
        self._detokenizer = Detokenizer(tokenizer, keep_special=keep_special)
        self._matcher = StopMatcher(stop_strings, include_stop=include_stop)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did. Whatever is pushed after that gives no text."""
        return self._matcher.matched

    def push(self, token_id: int) -> TextEvent:
        """Takes the next token of the text.

        Raises:
            UnknownTokenError: The id is outside the vocabulary.
        """
        return TextEvent(*self._matcher.push(self._detokenizer.push(token_id)))

    def finish(self, stop_token_id: int | None = None) -> str:
        """Ends the text.

        Args:
            stop_token_id: The end-of-sequence or stop id that ended it, if one did. Its own text is kept only with
                include_stop, and for a control token only with keep_special too.

        Returns:
            The rest: text held back for a stop string that never completed, and U+FFFD for an incomplete character.

        Raises:
            UnknownTokenError: The id is outside the vocabulary.
        """
        if self._matcher.matched is not None:
            return ""
        if stop_token_id is not None and self._shows(stop_token_id):
            # The token is what ends the text, so a stop string inside it changes nothing.
            own = self._detokenizer.push(stop_token_id) + self._detokenizer.flush()
            return self._matcher.flush() + own
        text, _ = self._matcher.push(self._detokenizer.flush())
        return text + self._matcher.flush()

    def _shows(self, stop_token_id: int) -> bool:
        return self._include_stop and (self._keep_special or not self._tokenizer.is_special(stop_token_id))
