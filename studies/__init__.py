"""Studies of the bench itself, each with a page in docs.

``nox -s results`` says which pages and runs are out of date, and makes them again. What tests share with a study is
imported from ``tests``; nothing of the package imports a study.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout, whose results, plots and docs the studies read and write."""
