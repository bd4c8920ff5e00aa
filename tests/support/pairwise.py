"""Expression trees of a dtype that is its own accumulator, such as float32: every addition rounds."""

import functools


def pairwise(trees, tree):
    """The tree whose nodes have two terms each: a node of n terms is n - 1 additions."""
    terms = [pairwise(trees, term) for term in trees.terms(tree)]
    return functools.reduce(lambda total, term: trees.combine((total, term)), terms) if terms else tree
