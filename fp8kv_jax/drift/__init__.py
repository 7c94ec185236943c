"""Drift: does a set of scales still fit, and what does it cost when it does not."""
