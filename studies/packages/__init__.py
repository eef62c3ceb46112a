"""Training loops of packages, each called with a small model and random data: what ``audit`` says of them.

``python -m studies.audit_page --packages FOLDER`` runs those whose package is in the folder. Nothing of a package is
changed; checked.toml has what reading its loop has shown.
"""
