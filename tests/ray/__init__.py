"""Tests that need the package ray: `tox -e ray`."""
