"""Stop strings: finds the first one in a text that arrives in pieces, and never shows part of it too early.

All strings are searched for at once by one automaton (Aho and Corasick, "Efficient string matching", CACM 18(6), 1975)
that takes one step for each character, wherever the pieces' borders fall. Its state is the longest suffix of the text
so far that begins some stop string, which is exactly what has to be held back: one character less could show part of a
stop string, one more would delay text for nothing.

Which string wins: the one completed first. Of several completed by the same character, the longest, so that the text is
cut before the earliest of them. This is known the moment a string completes, and does not depend on the pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class StopStrings:
    """A set of stop strings, compiled once and shared by a request's continuations. Immutable.

    Building takes time and memory in proportion to the strings' total length.

    Raises:
        ValueError: One of the strings is empty.
    """

    __slots__ = ("_children", "_depth", "_fallback", "_found", "first_characters", "strings")

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self.strings = tuple(strings)
        if "" in self.strings:
            raise ValueError("a stop string is empty")
        self.first_characters = frozenset(string[0] for string in self.strings)
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]
        self._found: list[str | None] = [None]
        for string in self.strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            child = self._children[state].get(character)
            if child is None:
                child = len(self._children)
                self._children[state][character] = child
                self._children.append({})
                self._depth.append(self._depth[state] + 1)
                self._fallback.append(0)
                self._found.append(None)
            state = child
        self._found[state] = string

    def _link(self) -> None:
        """Points each state at the longest shorter suffix that is a state, shortest states first."""
        level = list(self._children[0].values())
        while level:
            following: list[int] = []
            for state in level:
                for character, child in self._children[state].items():
                    self._fallback[child] = self.step(self._fallback[state], character)
                    if self._found[child] is None:
                        self._found[child] = self._found[self._fallback[child]]
                    following.append(child)
            level = following

    def step(self, state: int, character: str) -> int:
        """The state after one more character; 0 is the state of the empty text."""
        while character not in self._children[state]:
            if state == 0:
                return 0
            state = self._fallback[state]
        return self._children[state][character]

    def found(self, state: int) -> str | None:
        """The longest stop string that ends here."""
        return self._found[state]

    def depth(self, state: int) -> int:
        """How many of the last characters may begin a stop string."""
        return self._depth[state]


class StopMatcher:
    """Passes one continuation's text through, up to its first stop string.

    Args:
        strings: What to stop at; may be empty.
        include_stop: Lets the stop string itself through, and nothing after it.
    """

    __slots__ = ("_held", "_include_stop", "_matched", "_state", "_strings")

    def __init__(self, strings: StopStrings | Iterable[str], *, include_stop: bool = False) -> None:
        self._strings = strings if isinstance(strings, StopStrings) else StopStrings(strings)
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that appeared, if one did."""
        return self._matched

    @property
    def held(self) -> str:
        """Text not let through yet: the longest suffix so far that may begin a stop string."""
        return self._held

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes more text.

        Returns:
            The text that may be shown now, and the stop string if it has appeared. After that, all text is dropped.
        """
        if self._matched is not None:
            return "", self._matched
        strings, state = self._strings, self._state
        if state == 0 and strings.first_characters.isdisjoint(text):
            return text, None
        for position, character in enumerate(text):
            state = strings.step(state, character)
            self._matched = strings.found(state)
            if self._matched is not None:
                return self._cut(self._held + text[: position + 1]), self._matched
        self._state = state
        text = self._held + text
        border = len(text) - strings.depth(state)
        self._held = text[border:]
        return text[:border], None

    def flush(self) -> str:
        """The text held back for a stop string that never completed. Call once no more text can come."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _cut(self, text: str) -> str:
        self._held = ""
        if self._include_stop or self._matched is None:
            return text
        return text[: len(text) - len(self._matched)]
