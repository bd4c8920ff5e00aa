"""What stops a benchmark."""

from ringlet.errors import Error


class BenchError(Error):
    """A sweep that cannot run, or a rank that died in one; the message says which and what to do."""
