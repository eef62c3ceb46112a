"""Studies of the bench itself, each with a page in docs.

``nox -s results`` says which pages and runs are out of date, and makes them again.
"""
