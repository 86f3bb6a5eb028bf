"""A byte-level BPE vocabulary out of a GGUF file's own metadata.

Everything about text comes from the model file, so a model is one file and no two sources can disagree. Only what can
be served exactly is accepted: another tokenizer kind, or a pre-tokenizer that is not known, is an error at load time.

Byte-level alphabet: each byte is one printable character; printable Latin-1 stands for itself and the others follow
from U+0100 on (GPT-2, "Language Models are Unsupervised Multitask Learners", 2019, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from service.text.errors import TokenizerLoadError
from service.text.gguf_metadata import Metadata, read_metadata
from service.text.pretokenizer import WordRules, word_rules
from service.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from pathlib import Path

_TURN_ENDS = frozenset(
    {
        "</s>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<eos>",
        "<|end_of_text|>",
        "<|end|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|im_end|>",
        "<|return|>",
    }
)
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_SPECIAL_TYPES = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.UNUSED)


@dataclass(frozen=True, slots=True)
class BpeVocabulary:
    """What a byte-level BPE tokenizer is built from.

    Attributes:
        common: What every tokenizer knows.
        model_tokens: Ids by token in the byte-level alphabet, under which words and merges are looked up. A special
            token stands under a key that no text can produce.
        merges: Pairs of tokens, first to be merged first.
        rules: How text is cut into words.
        literal_ids: Ids of tokens that text always yields where it spells them (user-defined tokens).
        control_ids: Ids of tokens that text yields only where control tokens are parsed.
    """

    common: Vocabulary
    model_tokens: dict[str, int]
    merges: list[tuple[str, str]]
    rules: WordRules
    literal_ids: tuple[int, ...]
    control_ids: tuple[int, ...]


def read_vocabulary(path: Path) -> BpeVocabulary:
    """Reads the vocabulary of a GGUF file.

    Raises:
        TokenizerLoadError: The file is broken, its tokenizer is not byte-level BPE, or its pre-tokenizer is missing or
            not supported. The message names the file.
    """
    metadata = read_metadata(path)
    try:
        return _build(metadata)
    except TokenizerLoadError as error:
        raise TokenizerLoadError(f"{path}: {error}") from error


def _build(metadata: Metadata) -> BpeVocabulary:
    model = metadata.string("tokenizer.ggml.model")
    if model != "gpt2":
        kind = "names no tokenizer" if model is None else f"has a {model!r} tokenizer"
        raise TokenizerLoadError(f"the file {kind} (tokenizer.ggml.model); only byte-level BPE ('gpt2') is supported")
    rules = word_rules(metadata.string("tokenizer.ggml.pre"))
    tokens, merges = metadata.strings("tokenizer.ggml.tokens"), metadata.strings("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise TokenizerLoadError("the BPE vocabulary has no tokens or no merges (tokenizer.ggml.tokens, .merges)")
    if len(set(tokens)) != len(tokens):
        raise TokenizerLoadError("a token appears twice in tokenizer.ggml.tokens")
    types = metadata.integers("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise TokenizerLoadError(f"there are {len(tokens)} tokens but {len(types)} token types")

    special = frozenset(i for i, kind in enumerate(types) if kind in _SPECIAL_TYPES)
    literal = tuple(i for i, kind in enumerate(types) if kind == TokenType.USER_DEFINED)
    eos_token_id, add_bos = metadata.integer("tokenizer.ggml.eos_token_id"), "tokenizer.ggml.add_bos_token"
    bos_token_id, says_bos = metadata.integer("tokenizer.ggml.bos_token_id"), metadata.boolean(add_bos)
    adds_bos = rules.adds_bos and bos_token_id is not None if says_bos is None else says_bos
    return BpeVocabulary(
        common=Vocabulary(
            pieces=_pieces(tokens, special.union(literal)),
            special=special,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            eos_token_ids=_eos_token_ids(metadata, tokens, types),
            add_bos=adds_bos,
            chat_template=metadata.string("tokenizer.chat_template"),
        ),
        # No byte maps to a space, so no word of the byte-level alphabet equals such a key.
        model_tokens={(f" {token}" if i in special else token): i for i, token in enumerate(tokens)},
        merges=_split_merges(merges),
        rules=rules,
        literal_ids=literal,
        control_ids=tuple(i for i in sorted(special) if types[i] != TokenType.UNUSED),
    )


def _eos_token_ids(metadata: Metadata, tokens: list[str], types: list[int]) -> frozenset[int]:
    named = {metadata.integer(f"tokenizer.ggml.{key}") for key in _EOS_KEYS}
    control = (i for i, kind in enumerate(types) if kind == TokenType.CONTROL)
    return frozenset({i for i in named if i is not None}.union(i for i in control if tokens[i] in _TURN_ENDS))


def _split_merges(merges: list[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise TokenizerLoadError(f"the merge {merge!r} is not two tokens and a space")
        pairs.append((left, right))
    return pairs


def _pieces(tokens: list[str], spelled: frozenset[int]) -> tuple[bytes, ...]:
    alphabet = _byte_alphabet()
    to_bytes = {ord(character): byte for byte, character in alphabet.items()}
    known = frozenset(alphabet.values())

    def piece(token_id: int, token: str) -> bytes:
        # A token with a character outside the alphabet was added as plain text, whatever its type says.
        if token_id in spelled or not known.issuperset(token):
            return token.encode()
        return token.translate(to_bytes).encode("latin-1")

    return tuple(piece(i, token) for i, token in enumerate(tokens))


def _byte_alphabet() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
