"""`ringlet bench`: measures collectives against gloo, interleaved in one run."""
