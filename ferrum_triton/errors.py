"""Every error this package raises on purpose, under one base class."""


class FerrumError(Exception):
    """Base of all errors raised by ferrum_triton."""


class InputError(FerrumError, ValueError):
    """An argument an op cannot accept.

    Attributes:
        op: name of the op, e.g. ``"rms_norm"``.
        argument: name of the offending argument.
        got: what was passed, in words.
        allowed: what would have been accepted.
        advice: what to do about it.
    """

    def __init__(self, op: str, argument: str, got: str, allowed: str, advice: str) -> None:
        self.op, self.argument, self.got = op, argument, got
        self.allowed, self.advice = allowed, advice
        super().__init__(f"{op}: {argument} is {got}; allowed: {allowed}. {advice}")

    def __reduce__(self) -> tuple:
        return type(self), (self.op, self.argument, self.got, self.allowed, self.advice)


class UnknownOp(FerrumError, AttributeError):
    """A name that is not a registered op."""


class MissingKernel(FerrumError, NotImplementedError):
    """An op that no provider of the backend implements."""


class BackendUnavailable(FerrumError, RuntimeError):
    """A backend whose device or library is absent on this machine."""


class FileError(FerrumError, ValueError):
    """A model file that is malformed, truncated, hostile or of an unknown kind.

    Attributes:
        path: the file.
        offset: byte offset of the record at fault, or None when no single place is.
        reason: what is wrong, in words.
    """

    def __init__(self, path: object, reason: str, offset: int | None = None) -> None:
        self.path, self.reason, self.offset = str(path), reason, offset
        where = "" if offset is None else f" at byte {offset}"
        super().__init__(f"{self.path}{where}: {reason}")

    def __reduce__(self) -> tuple:
        return type(self), (self.path, self.reason, self.offset)
