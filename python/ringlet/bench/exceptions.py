"""What stops a benchmark."""


class BenchError(RuntimeError):
    """A sweep that cannot run, or a rank that died in one; the message says which and what to do."""
