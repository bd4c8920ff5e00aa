"""The half of the benchmark that runs inside the ranks, the same for every library.

It needs numpy and the standard library only (`torch_ranks` also torch): the MPI peers, whose
environments hold no torch, import it as the top-level package `ranks`.
"""
