"""The recorder of ``python -m bench invariance``, inside each process of the command."""
