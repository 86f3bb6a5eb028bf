"""What every tokenizer knows of its tokens, whatever turns text into them.

Pieces are exact bytes: text is made by joining bytes and decoding once, never by joining decoded strings, because a
character may be spread over several tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from service.text.errors import TokenizerLoadError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model. Construction checks that every id named lies inside it.

    Attributes:
        pieces: Each token's bytes, by id; for a control token the UTF-8 of its spelled text.
        special: Ids of tokens that are marks, not text: left out of decoded text unless asked for.
        bos_token_id: Begins a sequence, if the model has such a token.
        eos_token_id: The one the chat template calls eos_token, if the model names one.
        eos_token_ids: Every id at which generation ends by default.
        add_bos: Whether an encoded prompt begins with bos_token_id.
        chat_template: Jinja source, if the model has one.

    Raises:
        TokenizerLoadError: There are no pieces, an id is outside them, or add_bos has no bos_token_id.
    """

    pieces: tuple[bytes, ...]
    special: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    add_bos: bool = False
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if not self.pieces:
            raise TokenizerLoadError("the vocabulary is empty")
        named = self.special | self.eos_token_ids | {i for i in (self.bos_token_id, self.eos_token_id) if i is not None}
        for token_id in sorted(named):
            if not 0 <= token_id < len(self.pieces):
                raise TokenizerLoadError(f"token id {token_id} is outside the vocabulary of {len(self.pieces)} tokens")
        if self.add_bos and self.bos_token_id is None:
            raise TokenizerLoadError("the vocabulary asks for a begin-of-sequence token but names none")
