"""How each family of byte-level BPE vocabularies cuts text into words before merging.

A GGUF file only names its family (`tokenizer.ggml.pre`). Guessing one gives ids that are nearly right, which no test of
the model would notice and which make it quietly worse; so a name that is not in this table is refused. Each entry was
checked against the family's own tokenizer definition and, id by id, against llama.cpp on a multilingual corpus.

Where the two differ the family's own definition wins: Qwen2 normalises to NFC, which llama.cpp leaves out. A
conversion that reads "smollm" as plain GPT-2 (as transformers' GGUF import does) glues the spaces before a digit
to it; SmolLM's own definition isolates every digit first, and so does llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from service.text.errors import TokenizerLoadError

# Rules in order: contractions in any case; letters with at most one leading mark; up to N digits; punctuation with its
# line breaks; blank lines; spaces except the last before a word; other spaces.
_WORDS_WITH_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class WordRules:
    """What a family adds to a byte-level BPE vocabulary.

    Attributes:
        pre_tokenizer: Cuts text into words of the byte-level alphabet.
        normalizer: Applied to text before that, or None.
        ignore_merges: A word that is itself a token is never built from merges.
        adds_bos: Whether text begins with BOS where the file does not say so.
    """

    pre_tokenizer: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


def word_rules(name: str | None) -> WordRules:
    """The rules of the family that `tokenizer.ggml.pre` names.

    Raises:
        TokenizerLoadError: No name, or one that is not known.
    """
    match name:
        case "gpt-2" | "gpt2":
            return WordRules(_byte_level(use_regex=True))
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return WordRules(pre_tokenizers.Sequence([digits, _byte_level(use_regex=True)]))
        case "llama-bpe":
            return WordRules(_split(_WORDS_WITH_DIGITS % "{1,3}"), ignore_merges=True, adds_bos=True)
        case "qwen2":
            return WordRules(_split(_WORDS_WITH_DIGITS % ""), normalizers.NFC())
        case None:
            raise TokenizerLoadError("the BPE vocabulary does not name its pre-tokenizer (tokenizer.ggml.pre)")
        case _:
            raise TokenizerLoadError(f"the pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported")


def _byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, _byte_level(use_regex=False)])
