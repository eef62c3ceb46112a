"""The recorder of ``python -m bench audit``, inside each process of the audited command."""
