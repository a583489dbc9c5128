"""Builders and harnesses that several test folders share."""
