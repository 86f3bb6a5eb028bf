"""Why the service itself refuses a call. The scheduler's refusals are in scheduler/errors.py.

Each is translated to a gRPC status in one place, status.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHOWN_CHARACTERS = 80


class StartError(Exception):
    """The server cannot start. The message is one clear line for an operator."""


class SettingError(StartError):
    """A setting has a value that cannot be served.

    Attributes:
        name: The setting, as in Settings.
        value: Its value.
        problem: What is wrong with it.
    """

    def __init__(self, name: str, value: object, problem: str) -> None:
        super().__init__(f"--{name.replace('_', '-')} {value}: {problem}")
        self.name = name
        self.value = value
        self.problem = problem


class ServiceError(Exception):
    """A call was refused; the message is for its client."""


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong with one field.

    Attributes:
        field: Its path in the request message, such as "sampling.top_p".
        description: What it must be.
    """

    field: str
    description: str


class InvalidRequestError(ServiceError):
    """Fields of a request are out of range.

    Args:
        violations: At least one.
    """

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__("; ".join(f"{violation.field}: {violation.description}" for violation in violations))
        self.violations = tuple(violations)

    @classmethod
    def of(cls, field: str, description: str) -> InvalidRequestError:
        """A request with one bad field."""
        return cls([Violation(field, description)])


class NotServedError(ServiceError):
    """A request uses a field that this version does not serve."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{field}: not served by this version")
        self.field = field


class UnknownModelError(ServiceError):
    """A request names a model that this replica does not serve.

    Args:
        asked: The name it gives.
        served: The names it may give.
    """

    def __init__(self, asked: str, served: Sequence[str]) -> None:
        shown = asked if len(asked) <= _SHOWN_CHARACTERS else f"{asked[:_SHOWN_CHARACTERS]}..."
        super().__init__(f"model: {shown!r} is not served here; this replica serves {' or '.join(served)}")
