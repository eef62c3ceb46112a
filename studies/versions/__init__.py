"""Measurements of packages' versions: ``nox -s versions`` writes docs/versions.md.

Each version is installed into an environment of its own on top of the current one, and used there in a process of its
own. A version that cannot be installed, imported or probed is a row that says so.
"""
