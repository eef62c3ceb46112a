"""Commands of the command line, one module each, with ``add(commands)`` that adds the command's own parser.

Such a module imports what it needs when its command runs: ``--help`` of any other must not wait for it.
"""

COMMANDS: tuple[str, ...] = (
    "run",
    "plan",
    "report",
    "compare",
    "check",
    "cite",
    "export",
    "semantics",
    "throughput",
    "steps",
    "accumulation",
    "lint",
    "predict",
    "backends",
    "doctor",
)
"""Modules of this package, in the order in which ``--help`` lists them."""
