"""Update rules: pure arithmetic on arrays, which optimizers run on ranks and parameter servers on shards."""
