"""Token ids to text, one at a time.

Works on exact bytes through an incremental UTF-8 decoder: what a token adds is what its bytes complete. Comparing
decodes of growing windows of ids, the other way to do it, repeats or loses characters whenever a longer window decodes
differently from a shorter one; bytes have no such cases.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one continuation.

    Whatever the ids, the strings returned by ``push`` and then ``flush`` concatenate to ``tokenizer.decode(ids)``, and
    none of them ends inside a character.

    Args:
        tokenizer: Gives the bytes of each id.
        keep_special: Keeps the spelled text of control tokens.
    """

    __slots__ = ("_decoder", "_keep_special", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; often all of its own, sometimes none.

        Raises:
            UnknownTokenError: The id is outside the vocabulary.
        """
        if not self._keep_special and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """The rest: U+FFFD for a character that never became whole. The detokenizer is then as new."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
