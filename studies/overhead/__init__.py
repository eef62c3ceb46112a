"""What the bench itself costs: its hot paths, which ``nox -s overhead`` times with pytest-benchmark."""
