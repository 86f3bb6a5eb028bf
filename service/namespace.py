"""What keeps cached prefixes apart that must never match, whatever their tokens.

KV depends on more than the tokens: on the weights, on the adapter, and on whose it is. All of it is part of the cache's
key. Each part goes behind its own length, so that no two namespaces can be spelled the same, whatever the parts hold.
"""

from __future__ import annotations

from dataclasses import dataclass

_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Namespace:
    """Prefixes match only within one.

    Attributes:
        generation: Identifies the loaded weights: another file under the same name is another generation.
        salt: The client's own.
        adapter: Identifies what was added to the weights; empty for nothing.
    """

    generation: str
    salt: str
    adapter: str = ""

    def encode(self) -> bytes:
        """The cache's key of it: generation, adapter and salt, each as UTF-8 behind its length in four bytes."""
        parts = (part.encode() for part in (self.generation, self.adapter, self.salt))
        return b"".join(len(part).to_bytes(_LENGTH_BYTES, "little") + part for part in parts)

    @classmethod
    def decode(cls, encoded: bytes) -> Namespace:
        """The namespace that ``encode`` made this of.

        Raises:
            ValueError: It made no such thing.
        """
        parts, start = [], 0
        for _ in range(3):
            begin = start + _LENGTH_BYTES
            start = begin + int.from_bytes(encoded[start:begin], "little")
            parts.append(encoded[begin:start].decode())
        namespace = cls(parts[0], parts[2], parts[1])
        if namespace.encode() != encoded:
            raise ValueError(f"{encoded!r} is no namespace")
        return namespace
