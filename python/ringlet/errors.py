"""The five kinds of error, the same in C++ and Python (csrc/base/error.h)."""


class Error(RuntimeError):
    """What every failure of this library is."""


class InvalidUsage(Error, ValueError):
    """A call that cannot be right: refused before anything moves, or seen to differ from another rank's call."""


class PeerLost(Error):
    """Another rank's process is gone, or it left the group."""


class Timeout(Error):
    """A wait reached its deadline while the peer's process was still there."""


class SystemError(Error):
    """The operating system refused something; the message has its reason and what to do."""


class DeviceError(Error):
    """A GPU or its libraries refused something."""
