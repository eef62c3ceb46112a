"""What changes from version to version of Lightning and DeepSpeed, measured: ``nox -s versions``.

Each version is installed alone into an environment of its own, on top of the one that this runs in: torch and all else
are shared, so a version costs megabytes, and the same torch runs under all. The probes run there in a process of their
own. What they find goes into one table, in which a version that cannot be installed, imported or probed is a row that
says so.
"""
