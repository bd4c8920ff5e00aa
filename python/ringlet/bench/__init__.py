"""`ringlet bench`: measures collectives against gloo and MPI libraries, interleaved in one run."""
