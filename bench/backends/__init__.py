"""How the workload is trained: a protocol and a registry, then one file per framework."""
