"""The command line. Every command is a thin layer over the API; one file each.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 a rank failed, 2 something the caller can
mend (one message, no traceback). Files are written whole at the end or not at all. torch is imported by the commands
that need it, so that ``--help`` is quick.
"""

from autoplan.cli.app import app, main

__all__ = ["app", "main"]
