"""The real server in a box: SGLang 0.5.23 with a tiny model on a CPU, and tests that ask it; `tox -e real`."""
