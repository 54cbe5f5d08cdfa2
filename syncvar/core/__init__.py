"""Settings, environment, errors, exit codes, dtypes, pytrees and array interop.

This room opens no socket and starts no thread. All other rooms may import it.
"""
