"""The tests of syncvar; CONTRIBUTING.md says what is where."""
