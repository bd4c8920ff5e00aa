"""What ringlet's commands share: the parser, the options that mean the same everywhere, and files to write."""
