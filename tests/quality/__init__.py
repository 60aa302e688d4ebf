"""Tests of the checkers by what they find: planted faults, and odd clients that are right all the same."""
