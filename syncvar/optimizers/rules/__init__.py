"""Update rules: pure arithmetic on arrays, for optimizers on ranks and parameter servers alike."""
