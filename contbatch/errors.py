"""The package's own exceptions: few, and each message says what was wrong, the values, and what to change."""

from __future__ import annotations


class ContbatchError(Exception):
    """Base of every exception that this package raises on purpose."""


class InvalidRequest(ContbatchError, ValueError):
    """A request that cannot be accepted as it was written. Nothing else is affected."""


class RequestTooLarge(InvalidRequest):
    """A request that could never finish with this model length, pool or budget."""


class DuplicateRequest(InvalidRequest):
    """A request id that is already in use by an unfinished request."""


class QueueFull(InvalidRequest):
    """The queue has reached its limit; the request may be sent again later."""


class DeadlineExceeded(ContbatchError, TimeoutError):
    """A request was not finished by its deadline and was aborted."""


class InvalidConfig(ContbatchError, ValueError):
    """A configuration value that no engine could run with."""


class UnknownName(ContbatchError, ValueError):
    """A model or policy name that does not exist."""


class CheckpointError(ContbatchError, ValueError):
    """A checkpoint that is incomplete, damaged, or of an architecture that is not supported."""


class DeviceError(ContbatchError, RuntimeError):
    """A device or a number format that this machine does not have."""


class KernelsMissing(ContbatchError, RuntimeError):
    """Compiled kernels that cannot be had on this machine: no compiler, or it failed, or the format has none."""


class TraceError(ContbatchError, ValueError):
    """A trace, workload or golden file that is cut, damaged, or of another version."""


class SchedulerStalled(ContbatchError, RuntimeError):
    """Unfinished requests exist, but no step brings any of them further."""


class PolicyError(ContbatchError, RuntimeError):
    """A policy asked a step verb for something that the rules forbid."""


class StepFailed(ContbatchError, RuntimeError):
    """The executor raised in a forward pass. The engine is intact: the next step runs the same plan again."""


class IntegrityError(ContbatchError, AssertionError):
    """A rule that must always hold (design: "Rules that always hold") was found broken."""


class MissingDependency(ContbatchError, ImportError):
    """An optional package is needed for this call and is not installed."""
