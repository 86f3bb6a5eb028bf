"""A conversation at the terminal.

It survives what goes wrong on the way: a turn that failed is told and forgotten, and the conversation goes on from
where it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import grpc
from radixd.v1 import generate_pb2 as pb

from service.client import CallError
from service.errors import StartError
from service.terminal import InputError, at_keyboard, enable_editing, read_line

if TYPE_CHECKING:
    from service.client import Client, Options, Reply

PROMPT = "> "
_HELP = """\
/reset  forgets the conversation
/help   shows this
/exit   leaves, as Ctrl-D does
Ctrl-C  ends a reply; here it leaves
Anything else goes to the model; to send one word that begins with a slash, put a space in front."""


class Conversation:
    """Turns with a server, of which each sees all before it.

    Args:
        client: Talks to the server.
        options: What holds for each reply.
        system: What the conversation begins with, if anything.
    """

    def __init__(self, client: Client, options: Options, system: str | None) -> None:
        self._client = client
        self._options = options
        self._opening = [] if system is None else [pb.ChatMessage(role="system", content=system)]
        self._history = list(self._opening)
        self._model = client.model()
        self._failed = False

    def run(self) -> int:
        """Talks until the user leaves.

        Returns:
            The exit code: 1 if a turn failed and nobody was there to see it.

        Raises:
            StartError: The model cannot hold a conversation.
        """
        if not self._model.chat_template:
            raise StartError(f"{self._model.name} has no chat template; use radixd generate --raw")
        _tell(f"Talking with {self._model.name}. /reset starts over, /help lists commands, /exit or Ctrl-D leaves.")
        enable_editing()
        while True:
            try:
                line = read_line(PROMPT)
            except InputError as error:
                self._tell_failure(str(error))
                continue
            if line is None or line.strip() == "/exit":
                return 1 if self._failed and not at_keyboard() else 0
            self._take(line)

    def _take(self, line: str) -> None:
        word = line.rstrip()
        if word == "/reset":
            self._history = list(self._opening)
            _tell("The conversation starts over.")
        elif word == "/help":
            _tell(_HELP)
        elif word.startswith("/") and word[1:].isalpha():
            _tell(f"There is no command {word}; /help lists those there are.")
        elif word:
            self._say(line)

    def _say(self, line: str) -> None:
        """One turn; only if it got an answer is it remembered, for templates want the roles to alternate."""
        request = self._options.request()
        question = pb.ChatMessage(role="user", content=line)
        request.chat.messages.extend([*self._history, question])
        try:
            reply = self._client.stream(request)
        except CallError as error:
            self._tell_failure(f"{error}{self._advice(error, request.chat)}")
            return
        ended = (
            reply.speed() if reply.finished is not None else ", ".join(filter(None, (reply.length(), reply.speed())))
        )
        _tell(f"[{reply.reuse()}; {ended}]")
        if reply.text:
            self._history += [question, pb.ChatMessage(role="assistant", content=reply.text)]
        if self._filled(reply):
            _tell(f"The context of {self._model.context_length} tokens is full: /reset starts over.")

    def _advice(self, error: CallError, chat: pb.Chat) -> str:
        """What to do where a conversation no longer fits; nothing for any other failure."""
        match error.code:
            case grpc.StatusCode.INVALID_ARGUMENT:
                full = (self._client.prompt_tokens(chat) or 0) >= self._model.context_length
            case grpc.StatusCode.FAILED_PRECONDITION | grpc.StatusCode.RESOURCE_EXHAUSTED:
                full = not error.may_retry
            case _:
                full = False
        if not full:
            return ""
        if len(chat.messages) == len(self._opening) + 1:
            return "; send a shorter message"
        return "; the conversation is full: /reset starts over"

    def _filled(self, reply: Reply) -> bool:
        finished = reply.finished
        if finished is None or finished.reason != pb.FINISH_REASON_LENGTH:
            return False
        usage = finished.usage
        return usage.prompt_tokens + usage.completion_tokens >= self._model.context_length

    def _tell_failure(self, text: str) -> None:
        self._failed = True
        _tell(f"radixd: {text}")


def _tell(text: str) -> None:
    click.echo(text, err=True)
