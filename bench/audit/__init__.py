"""The audit wing: what backends compute, and what configs will do, checked by measurement.

The path of a scenario from scenarios.toml to the pages:

1. ``scenario`` reads the TOML tables, and ``scenario_runner`` runs them under each backend, in as
   few process groups as possible.
2. In each rank ``recorder`` trains the ``decoder``, a model with one weight per use of a sample,
   through the ``job`` that a backend gets, and records every fetch, loss and step, and what each
   update changed.
3. ``decoded_scenario`` decodes these records into the coefficient of each sample in each update.
4. ``diagnosis`` applies its rules to them, with those of ``semantics_findings`` for a loss that is
   divided twice; the gravest finding is the verdict.
5. ``conformance`` puts the verdicts of all scenarios and backends into one table, and
   ``weight_figure`` draws the coefficients of one scenario as maps.
6. ``semantics_files`` writes everything.

The other commands: ``command/`` audits any training command, ``invariance/`` compares one with
itself at another split of its batch, ``stepcount`` calculates the steps of a ``training_plan``,
``monitor`` measures ThroughputMonitor, ``dtypes`` the precision of sums, and ``lint/`` reads
configs.
"""
