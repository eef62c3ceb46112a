"""Studies of the bench itself, each with a page in docs.

``nox -s study`` asks how far verdicts can be trusted (docs/statistics.md), ``nox -s bytes`` where memory and bytes go
(docs/memory-and-bytes.md).
"""
