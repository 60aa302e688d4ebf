"""Tests that leave nothing out of a small scope."""
