"""The parts of the gradient reducer (reducer.py): a backward, windows of micro-batches, hooks, joining, times."""
