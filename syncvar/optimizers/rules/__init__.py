"""Update rules: pure arithmetic on arrays, for optimizers and parameter servers alike."""
