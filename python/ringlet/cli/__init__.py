"""ringlet's commands, and their common parts: the parser, common options, and files to write."""
