"""Update rules as a program has them beside its script."""

import numpy as np

from syncvar.optimizers import update_rule


@update_rule(slots={"sum": 0.5})
def adagrad(value, slots, gradient, numbers):
    """Adagrad, as sv.optimizers.Adagrad has it."""
    total = slots["sum"] + gradient * gradient
    return value - numbers["learning_rate"] * gradient / (np.sqrt(total) + numbers["epsilon"]), {
        "sum": total
    }


@update_rule
def counted(value, slots, gradient, numbers):
    """Each step adds its number."""
    return value + numbers["step"]


@update_rule(slots={"steps_made": 0.0})
def picky(value, slots, gradient, numbers):
    """Refuse gradients that are not finite."""
    if not np.isfinite(gradient).all():
        bad = int((~np.isfinite(gradient)).sum())
        raise ArithmeticError(f"{bad} elements of the gradient are not finite")
    return value - gradient, {"steps_made": slots["steps_made"] + 1}


@update_rule
def writes(value, slots, gradient, numbers):
    value -= gradient
    return value


@update_rule
def wrong_shape(value, slots, gradient, numbers):
    return np.zeros(3)


@update_rule
def unknown_slot(value, slots, gradient, numbers):
    return value, {"momentum": gradient}


def unregistered(value, slots, gradient, numbers):
    return value
