"""The gradient reducer: a backward, windows of micro-batches, communication hooks, joining, measured merging, times."""

from .reducer import GradientReducer

__all__ = ["GradientReducer"]
