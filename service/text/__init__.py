"""Text in and out of the model: tokenizer, chat template, incremental detokenizer, stop strings.

Everything here is synchronous and knows neither protobuf nor tensors. A tokenizer and a template never change after
construction and may be used from any thread; a detokenizer, a stop matcher or a text output belongs to one continuation
and to the thread that drives it.
"""

from service.text.detokenizer import Detokenizer
from service.text.errors import (
    NoChatTemplateError,
    TemplateError,
    TextError,
    TokenizerLoadError,
    UnencodableTextError,
    UnknownTokenError,
)
from service.text.output import TextEvent, TextOutput
from service.text.stops import StopMatcher, StopStrings
from service.text.template import ChatTemplate
from service.text.tokenizer import BpeTokenizer, PieceTokenizer, Tokenizer
from service.text.vocabulary import Vocabulary

__all__ = [
    "BpeTokenizer",
    "ChatTemplate",
    "Detokenizer",
    "NoChatTemplateError",
    "PieceTokenizer",
    "StopMatcher",
    "StopStrings",
    "TemplateError",
    "TextError",
    "TextEvent",
    "TextOutput",
    "Tokenizer",
    "TokenizerLoadError",
    "UnencodableTextError",
    "UnknownTokenError",
    "Vocabulary",
]
