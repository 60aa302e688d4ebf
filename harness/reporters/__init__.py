"""Reporters: one module a form, each a function of a `harness.check.Report`. They decide nothing."""
