"""What can go wrong between text and token ids. Each message is one clear line that may be shown to a client."""

from __future__ import annotations


class TextError(Exception):
    """The base of every error that this package raises on purpose."""


class TokenizerLoadError(TextError):
    """A model file has no vocabulary that can be served: missing, broken, or of a kind that is not supported."""


class UnknownTokenError(TextError):
    """A token id lies outside the vocabulary.

    Attributes:
        token_id: The id.
        vocab_size: Ids are in [0, vocab_size).
    """

    def __init__(self, token_id: int, vocab_size: int) -> None:
        super().__init__(f"token id {token_id} is outside the vocabulary of {vocab_size} tokens")
        self.token_id = token_id
        self.vocab_size = vocab_size


class UnencodableTextError(TextError):
    """A text holds something that the vocabulary cannot express.

    Attributes:
        position: Where, in characters from the start of the text.
    """

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"the text cannot be encoded at character {position}: {reason}")
        self.position = position


class TemplateError(TextError):
    """A chat template is broken, or refused the conversation."""


class NoChatTemplateError(TemplateError):
    """The model has no chat template."""

    def __init__(self) -> None:
        super().__init__("the model has no chat template")
