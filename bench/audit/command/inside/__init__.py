"""The recorder of ``python -m bench audit``, inside each process of the audited command.

Imports nothing of bench: the command may run in another environment. sitecustomize loads these files by their path.
It communicates nothing, draws from no global generator, changes no tensor, and never raises into the training.
"""
