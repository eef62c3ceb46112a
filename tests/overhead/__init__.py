"""What the bench itself costs: its hot paths, timed by pytest-benchmark.

``nox -s overhead`` times them; the tests run each once, untimed. See ``tests/overhead/__main__.py``.
"""
