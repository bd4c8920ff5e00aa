"""The five kinds of error, the same in C++ and Python (csrc/base/error.h).

Each is also what programs for torch.distributed and for Python's own sockets catch: a DistError, a DistBackendError (as
NCCL's are), a ConnectionError or TimeoutError, a ValueError.
"""

from torch.distributed import DistBackendError, DistError


class Error(DistError):
    """The base class of every failure of this library; a RuntimeError.

    `reported` is True for an error that began in another rank, which told this one.
    """

    reported = False


class InvalidUsage(Error, ValueError):
    """A call cannot be right. It was refused before anything moved, or it differs from another rank's call."""


class PeerLost(Error, DistBackendError, ConnectionError):
    """Another rank's process is gone, or it left the group."""


class Timeout(Error, DistBackendError, TimeoutError):
    """A wait reached its deadline while the peer's process was still there."""


class ResourceError(Error):
    """The operating system refused something; the message has its reason and what to do."""


class DeviceError(Error):
    """A GPU or its libraries refused something."""
