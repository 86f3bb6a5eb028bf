"""Checks every field of a GenerateRequest before anything is allocated for it.

``check_request`` looks at everything that needs no tokenizer; the time it takes does not grow with the prompt, so it
may run on the event loop, and it reports every field that is wrong, not only the first. What grows with the prompt
(``check_ids``, ``check_chat``) runs where prompts are tokenized; ``fit_prompt`` looks at the length once it is known.

A range is tested by what is allowed, never by what is not: ``not (low <= value <= high)`` also catches NaN. Floats
are checked from one table, ``FLOAT_RANGES``, which a test compares with the message's descriptor, so that a new
float field cannot be forgotten.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scheduler.request import Sampling
from service.errors import InvalidRequestError, NotServedError, Violation
from service.namespace import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.message import Message
    from radixd.v1 import generate_pb2 as pb

    from kvcache.base import Int32Array

MAX_REQUEST_ID_BYTES = 256
MAX_SALT_BYTES = 256
MAX_CONTINUATIONS = 128
MAX_STOP_STRINGS = 32
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_IDS = 128


@dataclass(frozen=True, slots=True)
class Range:
    """The values a field may have: from ``low`` to ``high``, both included unless ``low_open``."""

    low: float
    high: float
    low_open: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.low_open and value == self.low)

    def __str__(self) -> str:
        return f"{'above' if self.low_open else 'at least'} {self.low:g} and at most {self.high:g}"


FLOAT_RANGES = {
    "sampling.temperature": Range(0, 100),
    "sampling.top_p": Range(0, 1, low_open=True),
    "sampling.min_p": Range(0, 1),
    "sampling.frequency_penalty": Range(-2, 2),
    "sampling.presence_penalty": Range(-2, 2),
    "sampling.repetition_penalty": Range(0, 10, low_open=True),
    "sampling.logit_bias": Range(-100, 100),
}
"""Every float field of GenerateRequest, by path; a map's range is that of its values."""

NEUTRAL = {
    "sampling.frequency_penalty": 0.0,
    "sampling.presence_penalty": 0.0,
    "sampling.repetition_penalty": 1.0,
}
"""The one value of a field that asks for nothing, where any other is not served yet."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the served model allows.

    Attributes:
        vocab_size: Token ids are in [0, vocab_size).
        context_length: Prompt and output together, in tokens.
        eos_token_ids: Ids that end generation unless the request ignores them.
        default_temperature: For requests that name none.
        generation: Identifies the loaded weights: what others computed must not be found.
    """

    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    default_temperature: float = 1.0
    generation: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """What a valid request asks for, with every default filled in; only its prompt is still unread.

    Attributes:
        sampling: How tokens are drawn.
        n: Continuations.
        max_tokens: As asked; None is up to the end of the context.
        stop_ids: End-of-sequence ids included, unless they are to be ignored.
        stop_strings: In the request's order.
        namespace: Keeps cached prefixes of different weights and salts apart.
    """

    sampling: Sampling
    n: int
    max_tokens: int | None
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    namespace: bytes


def check_request(request: pb.GenerateRequest, limits: Limits) -> Checked:
    """Checks everything but the prompt's ids.

    Raises:
        InvalidRequestError: Fields are out of range.
        NotServedError: A field is in range, but this version does not serve it.
    """
    violations = [
        *_size_violations(request),
        *_float_violations(request, limits),
        *_prompt_violations(request, limits),
        *_stop_violations(request.stop, limits),
        *_constraint_violations(request),
    ]
    if violations:
        raise InvalidRequestError(violations)
    _refuse_not_served(request)
    return Checked(
        sampling=_sampling(request.sampling, limits),
        n=request.sampling.n or 1,
        max_tokens=request.stop.max_tokens if request.stop.HasField("max_tokens") else None,
        stop_ids=frozenset(request.stop.token_ids) | (frozenset() if request.stop.ignore_eos else limits.eos_token_ids),
        stop_strings=tuple(request.stop.strings),
        namespace=Namespace(limits.generation, request.cache.salt).encode(),
    )


def check_ids(field: str, ids: Iterable[int], vocab_size: int) -> Int32Array:
    """The ids as int32[n].

    Raises:
        InvalidRequestError: One is outside the vocabulary.
    """
    array = np.fromiter(ids, dtype=np.uint32)
    outside = np.flatnonzero(array >= vocab_size)
    if outside.size:
        first = int(outside[0])
        raise InvalidRequestError.of(
            f"{field}[{first}]", f"{int(array[first])} is outside the vocabulary of {vocab_size} tokens"
        )
    return array.astype(np.int32)


def check_chat(chat: pb.Chat) -> None:
    """Checks a conversation before it is rendered.

    Raises:
        InvalidRequestError: It has no messages, or one without a role.
    """
    if not chat.messages:
        raise InvalidRequestError.of("chat.messages", "at least one message is required")
    for position, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequestError.of(f"chat.messages[{position}].role", "must not be empty")


def fit_prompt(field: str, length: int, max_tokens: int | None, limits: Limits) -> int:
    """How many tokens a continuation of a prompt of ``length`` tokens may have: as asked, clamped to the context.

    Raises:
        InvalidRequestError: The prompt is empty, or leaves no room for one token.
    """
    if length == 0:
        raise InvalidRequestError.of(field, "the prompt has no tokens")
    room = limits.context_length - length
    if room < 1:
        raise InvalidRequestError.of(
            field,
            f"the prompt has {length} tokens, at most {limits.context_length - 1} fit the context"
            f" of {limits.context_length} with one token of output",
        )
    return room if max_tokens is None else min(max_tokens, room)


def check_salt(field: str, salt: str) -> None:
    """Checks a salt that stands outside a GenerateRequest.

    Raises:
        InvalidRequestError: It is too long for any request to have it.
    """
    if len(salt.encode()) > MAX_SALT_BYTES:
        raise InvalidRequestError.of(field, f"must have at most {MAX_SALT_BYTES} bytes")


def _sampling(params: pb.SamplingParams, limits: Limits) -> Sampling:
    return Sampling(
        temperature=params.temperature if params.HasField("temperature") else limits.default_temperature,
        # A cut beyond the vocabulary cuts nothing; clamped, it fits the engine's int32.
        top_k=min(params.top_k, limits.vocab_size),
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        min_p=params.min_p,
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
    )


def _size_violations(request: pb.GenerateRequest) -> Iterable[Violation]:
    if len(request.request_id.encode()) > MAX_REQUEST_ID_BYTES:
        yield Violation("request_id", f"must have at most {MAX_REQUEST_ID_BYTES} bytes")
    if len(request.cache.salt.encode()) > MAX_SALT_BYTES:
        yield Violation("cache.salt", f"must have at most {MAX_SALT_BYTES} bytes")
    if request.sampling.n > MAX_CONTINUATIONS:
        yield Violation("sampling.n", f"must be at most {MAX_CONTINUATIONS}")


def _float_violations(request: pb.GenerateRequest, limits: Limits) -> Iterable[Violation]:
    for path, allowed in FLOAT_RANGES.items():
        name = path.removeprefix("sampling.")
        if name == "logit_bias":
            if len(request.sampling.logit_bias) > limits.vocab_size:
                yield Violation(path, f"must be at most {limits.vocab_size} entries, one for each token")
                continue
            for token_id, bias in request.sampling.logit_bias.items():
                if token_id >= limits.vocab_size:
                    yield Violation(f"{path}[{token_id}]", f"is outside the vocabulary of {limits.vocab_size} tokens")
                if bias not in allowed:
                    yield Violation(f"{path}[{token_id}]", f"must be {allowed}")
        elif _present(request.sampling, name) and getattr(request.sampling, name) not in allowed:
            yield Violation(path, f"must be {allowed}")


def _prompt_violations(request: pb.GenerateRequest, limits: Limits) -> Iterable[Violation]:
    match request.WhichOneof("prompt"):
        case None:
            yield Violation("prompt", "one of text, token_ids and chat is required")
        case "text":
            if not request.text:
                yield Violation("text", "must not be empty")
        case "token_ids":
            length = len(request.token_ids.ids)
            if length == 0:
                yield Violation("token_ids.ids", "must not be empty")
            elif length >= limits.context_length:
                yield Violation(
                    "token_ids.ids",
                    f"has {length} tokens, at most {limits.context_length - 1} fit the context"
                    f" of {limits.context_length} with one token of output",
                )
        case "chat":
            if not request.chat.messages:
                yield Violation("chat.messages", "at least one message is required")


def _stop_violations(stop: pb.StopCriteria, limits: Limits) -> Iterable[Violation]:
    if stop.HasField("max_tokens"):
        if stop.max_tokens < 1:
            yield Violation("stop.max_tokens", "must be at least 1")
        elif stop.min_tokens > stop.max_tokens:
            yield Violation("stop.min_tokens", "must be at most max_tokens")
    # Of what is too many only the number is looked at: the time this takes must not be the client's to choose.
    if len(stop.strings) > MAX_STOP_STRINGS:
        yield Violation("stop.strings", f"must be at most {MAX_STOP_STRINGS}")
    for position, string in enumerate(stop.strings[:MAX_STOP_STRINGS]):
        if not 1 <= len(string.encode()) <= MAX_STOP_STRING_BYTES:
            yield Violation(f"stop.strings[{position}]", f"must have 1 to {MAX_STOP_STRING_BYTES} bytes")
    if len(stop.token_ids) > MAX_STOP_IDS:
        yield Violation("stop.token_ids", f"must be at most {MAX_STOP_IDS}")
    for position, token_id in enumerate(stop.token_ids[:MAX_STOP_IDS]):
        if token_id >= limits.vocab_size:
            yield Violation(
                f"stop.token_ids[{position}]", f"{token_id} is outside the vocabulary of {limits.vocab_size} tokens"
            )


def _constraint_violations(request: pb.GenerateRequest) -> Iterable[Violation]:
    if not request.HasField("constraint"):
        return
    kind = request.constraint.WhichOneof("kind")
    if kind is None:
        yield Violation("constraint.kind", "is required")
    elif kind == "choice" and not request.constraint.choice.options:
        yield Violation("constraint.choice.options", "at least one is required")


def _refuse_not_served(request: pb.GenerateRequest) -> None:
    for path, neutral in NEUTRAL.items():
        name = path.removeprefix("sampling.")
        if _present(request.sampling, name) and getattr(request.sampling, name) != neutral:
            raise NotServedError(path)
    if request.sampling.logit_bias:
        raise NotServedError("sampling.logit_bias")
    if request.stop.min_tokens:
        raise NotServedError("stop.min_tokens")
    _refuse_present(request.output, "output", ("logprobs", "prompt_logprobs"))
    _refuse_present(request, "", ("constraint",))


def _refuse_present(message: Message, path: str, names: Iterable[str]) -> None:
    for name in names:
        if _present(message, name):
            raise NotServedError(f"{path}.{name}".lstrip("."))


def _present(message: Message, name: str) -> bool:
    """HasField by a name from a table; the generated types allow only literals."""
    return message.HasField(name)
