"""Commands of the command line, one module each: ``add`` adds its parser, ``run`` runs it.

Such a module imports what it needs when its command runs: ``--help`` of any other must not wait for
it.
"""

COMMANDS: dict[str, tuple[str, ...]] = {
    "measure": ("run", "plan", "doctor", "backends"),
    "read": ("report", "compare", "check", "cite", "export"),
    "understand": (
        "semantics",
        "steps",
        "throughput",
        "lint",
        "audit",
        "invariance",
        "accumulation",
        "predict",
        "trace",
    ),
}
"""Modules of this package by what they are for, in the order in which ``--help`` lists them."""

TRAINING = frozenset({"run", "semantics", "throughput", "accumulation", "trace"})
"""Those that train: they need torch, which an installation without the extra ``frameworks`` does
not bring."""
