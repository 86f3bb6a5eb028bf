"""Text to token ids and back: one interface, two implementations.

``BpeTokenizer`` serves real models from a GGUF file's own vocabulary; ``PieceTokenizer`` serves a vocabulary given as a
list of pieces, for engines that play a script. Both promise:

- Control tokens spelled in a text are text, unless the caller asks for them to be parsed: a user cannot end a turn.
- At most one BOS, wherever the text came from.
- ``decode`` joins exact bytes and decodes once; nothing is stripped and nothing is cleaned up.

A tokenizer never changes after construction. ``encode`` may run in any thread and lets others run meanwhile; a text of
megabytes takes seconds and hundreds of bytes of memory for each token, so ask ``fewest_tokens`` first.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import tokenizers

from service.text.errors import TokenizerLoadError, UnencodableTextError, UnknownTokenError
from service.text.gguf_vocabulary import BpeVocabulary, read_vocabulary
from service.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path


class Tokenizer(ABC):
    """A vocabulary and the way text becomes its ids."""

    __slots__ = ("_longest", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._longest = max(map(len, vocabulary.pieces))

    @staticmethod
    def from_gguf(path: Path) -> Tokenizer:
        """The tokenizer of a GGUF model file, from its metadata alone.

        Raises:
            TokenizerLoadError: The file is broken, its tokenizer is not byte-level BPE, or its pre-tokenizer is missing
                or not supported. The message names the file.
        """
        vocabulary = read_vocabulary(path)
        try:
            return BpeTokenizer(vocabulary)
        except TokenizerLoadError as error:
            raise TokenizerLoadError(f"{path}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""
        return len(self._vocabulary.pieces)

    @property
    def bos_token_id(self) -> int | None:
        """Begins a sequence, if the model has such a token."""
        return self._vocabulary.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token that the model names first; ``eos_token_ids`` has all of them."""
        return self._vocabulary.eos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id at which generation ends by default."""
        return self._vocabulary.eos_token_ids

    @property
    def adds_bos(self) -> bool:
        """Whether ``encode`` begins with ``bos_token_id``."""
        return self._vocabulary.add_bos

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the model's chat template."""
        return self._vocabulary.chat_template

    def token_bytes(self, token_id: int) -> bytes:
        """A token's exact bytes; a control token's spelled text.

        Raises:
            UnknownTokenError: The id is outside the vocabulary.
        """
        if not 0 <= token_id < len(self._vocabulary.pieces):
            raise UnknownTokenError(token_id, self.vocab_size)
        return self._vocabulary.pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a mark that decoded text leaves out."""
        return token_id in self._vocabulary.special

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Turns text into ids.

        Args:
            text: Any Unicode text; may be empty.
            add_special: Begins with BOS if the model asks for it and the text does not already begin with it.
            parse_special: Reads control tokens spelled in the text as those tokens; for rendered chat templates.

        Raises:
            UnencodableTextError: The text holds a lone surrogate or something the vocabulary cannot express.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UnencodableTextError(error.start, "a lone surrogate is not a character") from error
        ids = self._encode_text(text, parse_special=parse_special)
        bos = self.bos_token_id
        if add_special and self.adds_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of ``len(encode(text))``, found without encoding: for refusing a text that cannot fit."""
        return -(-self._fewest_bytes(text) // self._longest)

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """Turns ids into text; bytes that are not UTF-8 appear as U+FFFD.

        Raises:
            UnknownTokenError: An id is outside the vocabulary.
        """
        pieces = (self.token_bytes(i) for i in ids if keep_special or not self.is_special(i))
        return b"".join(pieces).decode(errors="replace")

    @abstractmethod
    def _encode_text(self, text: str, *, parse_special: bool) -> list[int]:
        """A new list of the ids of a text without surrogates; no BOS is added."""

    def _fewest_bytes(self, text: str) -> int:
        """How many bytes the tokens of a text have in all, or less."""
        return len(text.encode())


class BpeTokenizer(Tokenizer):
    """Byte-level BPE over the `tokenizers` library.

    A byte that the vocabulary has no token for is left out, as the reference implementations do: SmolLM2 lacks six
    control characters and the lead bytes of planes 4 to 11, which hold no characters.

    Special tokens are split off here and not by the library, which can only do so always or never.

    Args:
        vocabulary: What to build it from.

    Raises:
        TokenizerLoadError: A merge names a token that does not exist.
    """

    __slots__ = ("_absent_bytes", "_control", "_ids", "_literal", "_model", "_shrinks")

    def __init__(self, vocabulary: BpeVocabulary) -> None:
        common = vocabulary.common
        super().__init__(common)
        self._model = _build_model(vocabulary)
        self._ids = {common.pieces[i].decode(): i for i in (*vocabulary.control_ids, *vocabulary.literal_ids)}
        self._control = _any_of(self._ids)
        self._literal = _any_of(common.pieces[i].decode() for i in vocabulary.literal_ids)
        present = {piece for i, piece in enumerate(common.pieces) if len(piece) == 1 and i not in common.special}
        self._absent_bytes = bytes(byte for byte in range(256) if bytes([byte]) not in present)
        self._shrinks = vocabulary.rules.normalizer is not None

    def _encode_text(self, text: str, *, parse_special: bool) -> list[int]:
        pattern = self._control if parse_special else self._literal
        if pattern is None:
            return self._encode_segments([text])[0]
        # With one group, split alternates ordinary text and a spelled token.
        parts = pattern.split(text)
        ids: list[int] = []
        for n, segment in enumerate(self._encode_segments(parts[::2])):
            ids += segment
            if 2 * n + 1 < len(parts):
                ids.append(self._ids[parts[2 * n + 1]])
        return ids

    def _encode_segments(self, segments: list[str]) -> list[list[int]]:
        # The batch call without offsets is the one that is twice as fast and hardly holds the interpreter's lock.
        return [encoding.ids for encoding in self._model.encode_batch_fast(segments, add_special_tokens=False)]

    def _fewest_bytes(self, text: str) -> int:
        kept = len(text.encode().translate(None, self._absent_bytes))
        # Composition shrinks UTF-8 to a third at most: three Hangul letters of three bytes to one syllable of three.
        return -(-kept // 3) if self._shrinks else kept


class PieceTokenizer(Tokenizer):
    """A vocabulary given as pieces; text becomes the longest piece that fits, again and again.

    Args:
        pieces: Each token's bytes, by id. Among equal ones the lowest id is used.
        special: Ids of marks, which text yields only where control tokens are parsed.
        eos_token_ids: Ids at which generation ends by default.
        bos_token_id: Begins a sequence.
        add_bos: Whether ``encode`` adds it.
        chat_template: Jinja source.

    Raises:
        TokenizerLoadError: No pieces, or an id outside them.
    """

    __slots__ = ("_control", "_ids", "_sizes", "_special_ids")

    def __init__(
        self,
        pieces: Sequence[bytes],
        *,
        special: Collection[int] = (),
        eos_token_ids: Collection[int] = (),
        bos_token_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        super().__init__(
            Vocabulary(
                pieces=tuple(pieces),
                special=frozenset(special),
                bos_token_id=bos_token_id,
                eos_token_id=min(eos_token_ids, default=None),
                eos_token_ids=frozenset(eos_token_ids),
                add_bos=add_bos,
                chat_template=chat_template,
            )
        )
        self._ids: dict[bytes, int] = {}
        self._special_ids: dict[bytes, int] = {}
        for i, piece in enumerate(pieces):
            (self._special_ids if i in self._vocabulary.special else self._ids).setdefault(piece, i)
        self._sizes = sorted({len(piece) for piece in self._ids if piece}, reverse=True)
        self._control = _any_of(piece.decode("latin-1") for piece in self._special_ids)

    @classmethod
    def bytewise(cls, special: Sequence[str] = ("<eos>",)) -> PieceTokenizer:
        """Ids 0 to 255 are the bytes; the special tokens follow, and generation ends at each of them."""
        ids = range(256, 256 + len(special))
        return cls([bytes([b]) for b in range(256)] + [s.encode() for s in special], special=ids, eos_token_ids=ids)

    def _encode_text(self, text: str, *, parse_special: bool) -> list[int]:
        data = text.encode()
        if not parse_special or self._control is None:
            return list(self._encode_bytes(data, 0, len(data)))
        ids: list[int] = []
        start = 0
        # As Latin-1 each byte is one character, so that positions in the string are positions in the bytes.
        for match in self._control.finditer(data.decode("latin-1")):
            ids += self._encode_bytes(data, start, match.start())
            ids.append(self._special_ids[match.group().encode("latin-1")])
            start = match.end()
        return [*ids, *self._encode_bytes(data, start, len(data))]

    def _encode_bytes(self, data: bytes, start: int, end: int) -> Iterator[int]:
        while start < end:
            for size in self._sizes:
                token_id = self._ids.get(data[start : min(start + size, end)])
                if token_id is not None and start + size <= end:
                    yield token_id
                    start += size
                    break
            else:
                position = len(data[:start].decode(errors="ignore"))
                raise UnencodableTextError(position, f"no piece begins with byte 0x{data[start]:02x}")


def _any_of(spelled: Iterable[str]) -> re.Pattern[str] | None:
    """Matches the longest of the texts at each place, as one group; None if there are none."""
    texts = sorted((re.escape(text) for text in spelled if text), key=len, reverse=True)
    return re.compile(f"({'|'.join(texts)})") if texts else None


def _build_model(vocabulary: BpeVocabulary) -> tokenizers.Tokenizer:
    try:
        model = tokenizers.Tokenizer(
            tokenizers.models.BPE(
                vocabulary.model_tokens, vocabulary.merges, ignore_merges=vocabulary.rules.ignore_merges
            )
        )
    except Exception as error:  # the library raises bare Exceptions, such as for a merge of unknown tokens
        raise TokenizerLoadError(f"the BPE vocabulary is broken: {error}") from error
    model.pre_tokenizer = vocabulary.rules.pre_tokenizer
    if vocabulary.rules.normalizer is not None:
        model.normalizer = vocabulary.rules.normalizer
    return model
