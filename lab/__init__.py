"""The lab: measurements and checks, one module for each command."""
