"""Every error that a user can meet, in one tree.

    PlacewrightError            job failed, exit code 1
      UserError                 refused input or wrong usage, exit code 2
        ModelFileError          the model file is broken, incomplete or not supported
        SettingsError           a settings file, variable or flag is wrong
        PlanError               a plan is missing, ambiguous, damaged or does not hold here
        RequestError            a request cannot be served as asked; carries an API error code
      EngineError               an engine failed
        EngineStartError        it never became ready
        EngineDiedError         the process is gone or stopped answering
        RequestFailedError      one request failed, the engine lives on
      MeasureError              a measurement could not be made
        TrialTimeoutError       a trial did not end in its time

A message says what was asked, what is there and what to try.
"""

from __future__ import annotations

_STEERING = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\t"), ord("\n")}, "\ufffd")


def printable(text: str) -> str:
    """`text` with U+FFFD for characters that steer a terminal: names in a model file are a stranger's words."""
    return text.translate(_STEERING)


class PlacewrightError(Exception):
    """Base of all errors shown to a user; `exit_code` is what the command line returns."""

    exit_code = 1


class UserError(PlacewrightError):
    """Input was refused before work began."""

    exit_code = 2


class ModelFileError(UserError):
    """The model file cannot be read or is not supported."""


class SettingsError(UserError):
    """A settings file, environment variable or flag holds something unusable."""


class PlanError(UserError):
    """A plan is missing, ambiguous, damaged, or its key does not hold on this machine."""


class RequestError(UserError):
    """A request that cannot be served as asked.

    `code` is the OpenAI error code (for example `context_length_exceeded`), `param` the field at fault,
    `status` the HTTP status, `details` extra numbers for the error body.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_request",
        param: str | None = None,
        status: int = 400,
        details: dict[str, int | float | str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.status = status
        self.details = details or {}


class EngineError(PlacewrightError):
    """An engine failed."""


class EngineStartError(EngineError):
    """The engine never became ready; the message holds its last words."""


class EngineDiedError(EngineError):
    """The engine's process is gone or stopped answering."""


class RequestFailedError(EngineError):
    """One request failed; the engine lives on. `code` is that of the protocol's `failed`, or "timeout"."""

    def __init__(self, message: str, code: str = "internal") -> None:
        super().__init__(message)
        self.code = code


class MeasureError(PlacewrightError):
    """A measurement could not be made."""


class TrialTimeoutError(MeasureError):
    """A trial did not end in the time that it was given."""
