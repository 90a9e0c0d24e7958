"""The engine and its callers in virtual time: random load, random faults, checked histories."""
