"""Wiring only: the options and hooks are in harness/suite/plugin.py."""

pytest_plugins = ["harness.suite.plugin"]
