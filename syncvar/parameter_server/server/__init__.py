"""A parameter server: it stores variables and applies what workers push."""
