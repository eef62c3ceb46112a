"""Classes that a config names.

That is by LightningCLI's class_path and init_args, Hydra's _target_, target and params, or a name.
"""

from __future__ import annotations

from bench.audit.lint.config_file import ConfigPart

NAMES = ("class_path", "_target_", "target")
INSIDE = ("init_args", "params")
"""Where the arguments are; beside _target_ otherwise."""


def is_class(part: ConfigPart) -> bool:
    """Whether a mapping names a class."""
    return any(name in part.names_here for name in NAMES)


def class_name(part: ConfigPart) -> str:
    """The class without its modules, or a plain name.

    Empty if there is none, or it is not known here.

    Raises InputError if the name is no string.
    """
    for name in NAMES:
        if name in part.names_here:
            return _last_of_dotted(part.at(name))
    if isinstance(part.value, dict):
        return ""
    return _last_of_dotted(part)


def _last_of_dotted(place: ConfigPart) -> str:
    """The last part of a dotted name; empty if there is none, or it is not known here."""
    name = place.string()
    if name is None:
        return ""
    return name.rpartition(".")[2]


def arguments(part: ConfigPart) -> ConfigPart:
    """The mapping with the arguments of the class. Raises InputError if they are no mapping."""
    for name in INSIDE:
        if name in part.names_here:
            return part.at(name).mapping()
    if "_target_" in part.names_here:
        return part
    return part.at(INSIDE[0])
