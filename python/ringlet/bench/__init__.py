"""`ringlet bench`: all-reduce and its kin, measured against gloo and the MPIs, interleaved in one run."""
