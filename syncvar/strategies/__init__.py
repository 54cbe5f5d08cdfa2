"""Strategies of tf.distribute: scope, run, reduce, input and uneven input."""
