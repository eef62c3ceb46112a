"""The same training twice: what it computes at two splits of its batch, and what first differs.

``splits`` makes the commands, ``split_runs`` runs one after the other with the recorder of
``inside/`` in their processes, ``state_comparison`` compares what they recorded,
``invariance_verdict`` says what that means, and ``invariance_screen`` shows it.
"""
